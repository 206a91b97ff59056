"""The reference: Hugging Face transformers on the same weights, fp32, greedy. Computed once per test run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.tokenizer import load_tokenizer
from tests.support.hf_reference import reference_greedy, reference_model

NUM_NEW_TOKENS = 12
# Around block edges (32), chunk edges (16, 64, 512), and up to 2,000 tokens.
LENGTHS = (1, 2, 7, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 129, 200, 256, 333, 511, 513, 777, 1100, 2000)
NEAR_TIE = 1e-4  # fp32: a smaller gap between the two best logits decides nothing
MAX_NEAR_TIES = 1


@dataclass(frozen=True, slots=True)
class Reference:
    """Prompts, the reference's answers, and the gap between its two best logits at each step."""

    prompts: list[list[int]]
    answers: list[list[int]]
    gaps: list[list[float]]

    def check(self, answers: list[list[int]]) -> None:
        """Equal, token for token. Behind a near-tie a prompt is not compared further; these are counted and bounded."""
        near_ties = 0
        for prompt, expected, gaps, found in zip(self.prompts, self.answers, self.gaps, answers, strict=True):
            assert len(found) == NUM_NEW_TOKENS
            differing = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b]
            if differing:
                first = differing[0]
                assert gaps[first] < NEAR_TIE, (
                    f"prompt of {len(prompt)} tokens differs at {first}: {expected} {found}, gap {gaps[first]}"
                )
                near_ties += 1
        assert near_ties <= MAX_NEAR_TIES


@pytest.fixture(scope="session")
def reference(model_files) -> Reference:
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    token_ids = load_tokenizer(model_files).encode(text, add_special=False)
    # Different beginnings, so that no prompt is a prefix of another one.
    prompts = [token_ids[97 * number :][:length] for number, length in enumerate(LENGTHS)]
    assert [len(prompt) for prompt in prompts] == list(LENGTHS)
    model = reference_model(model_files)
    results = [reference_greedy(model, prompt, NUM_NEW_TOKENS) for prompt in prompts]
    return Reference(prompts, [list(tokens) for tokens, _ in results], [list(gaps) for _, gaps in results])
