"""The reference: Hugging Face transformers on the same weights, fp32, greedy. Computed once per test run.

One pass over each prompt and a candidate answer tells at each position whether the candidate's token is the likeliest:
where all are, it is the greedy answer, and where one is not, the greedy answer differs there first.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from headrace.engine.engine import Engine
from headrace.engine.sequence import NewToken, Sequence
from headrace.sampling_params import SamplingParams
from headrace.tokenizer import load_tokenizer
from tests.support.audit import assert_idle_pool
from tests.support.engines import engine_for
from tests.support.hf_reference import reference_model

NUM_NEW_TOKENS = 10
NUM_PROMPTS = 104
# Around block edges (32), chunk edges (16, 64, 512), and up to 1,100 tokens; the rest at random up to 60.
LENGTHS = (1, 2, 7, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 129, 200, 256, 333, 511, 513, 1100)
NEAR_TIE = 1e-4  # fp32: a smaller gap between the two best logits decides nothing
MAX_NEAR_TIES = 1


@dataclass(frozen=True, slots=True)
class Reference:
    """Prompts, the reference's answers, and the gap between its two best logits at each step."""

    prompts: list[list[int]]
    answers: list[list[int]]
    gaps: list[list[float]]

    def some(self, every: int) -> Reference:
        """Every so many of the prompts, for what takes long."""
        return Reference(self.prompts[::every], self.answers[::every], self.gaps[::every])

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


def answers_of(engine: Engine, prompts: list[list[int]], batch: int) -> list[list[int]]:
    """Answers, with up to `batch` sequences in the engine at once. The pool is clean afterwards."""
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    waiting, running = list(enumerate(prompts)), 0
    while waiting or running:
        while waiting and running < batch:
            number, prompt = waiting.pop(0)
            sampling = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0)
            engine.submit(Sequence(str(number), list(prompt), len(prompt), sampling, root=b"root"))
            running += 1
        for event in engine.step().events:
            if isinstance(event, NewToken):
                answers[event.sequence_id].append(event.token_id)
                running -= event.finish_reason is not None
    assert_idle_pool(engine.audit())
    return list(answers.values())


def prompts_of(token_ids: list[int], lengths: Items[int]) -> list[list[int]]:
    """Prompts of these lengths with different beginnings, so that none is a prefix of another one."""
    prompts = [token_ids[331 * number :][:length] for number, length in enumerate(lengths)]
    assert [len(prompt) for prompt in prompts] == list(lengths)
    return prompts


@pytest.fixture(scope="session")
def reference(model_files) -> Reference:
    text = (Path(__file__).parents[1] / "data" / "shakespeare.txt").read_text()
    token_ids = load_tokenizer(model_files).encode(text, add_special=False)
    draw = random.Random(0)
    lengths = [*LENGTHS, *(draw.randint(3, 60) for _ in range(NUM_PROMPTS - len(LENGTHS)))]
    prompts = prompts_of(token_ids, lengths)
    candidates = answers_of(engine_for(model_files), prompts, batch=8)
    model = reference_model(model_files)
    answers, gaps = [], []
    with torch.inference_mode():
        for prompt, candidate in zip(prompts, candidates, strict=True):
            tokens = torch.tensor([prompt + candidate[:-1]])
            best = model(tokens, logits_to_keep=NUM_NEW_TOKENS, use_cache=False).logits[0].topk(2)
            answers.append(best.indices[:, 0].tolist())
            gaps.append((best.values[:, 0] - best.values[:, 1]).tolist())
    return Reference(prompts, answers, gaps)
