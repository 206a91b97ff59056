"""Perplexity through the engine's forward pass against Hugging Face transformers, token by token."""

from __future__ import annotations

import math

import pytest
import torch

from bench.compare.perplexity import (
    VARIANTS,
    Score,
    Variant,
    measure,
    parse_llama,
    read_tokens,
    score,
    windows,
)
from headrace.config import EngineSettings
from headrace.engine.native import library
from tests.support.small_models import VOCAB_SIZE, random_model, write_folder

WINDOW = 48
NUM_TOKENS = 3 * WINDOW + 5


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    return write_folder(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()


@torch.inference_mode()
def reference(model, token_ids: list[int], bos_id: int | None) -> tuple[float, int]:
    """Written as its definition: exp of the mean of -log p, over the second halves of whole windows."""
    losses = []
    for number in range(len(token_ids) // WINDOW):
        tokens = token_ids[number * WINDOW : (number + 1) * WINDOW]
        if bos_id is not None:
            tokens[0] = bos_id
        probabilities = model(torch.tensor([tokens])).logits[0].double().softmax(-1)
        for position in range(WINDOW // 2, WINDOW - 1):
            losses.append(-math.log(probabilities[position, tokens[position + 1]]))
    return math.exp(sum(losses) / len(losses)), len(losses)


@pytest.mark.parametrize("bos_id", [None, 1])
@pytest.mark.parametrize(
    "backend",
    ["torch", pytest.param("cpu", marks=pytest.mark.skipif(library.load() is None, reason="no kernels"))],
)
def test_equals_the_definition(model, files, token_ids, backend, bos_id):
    settings = EngineSettings(block_size_tokens=16, max_step_tokens=WINDOW, backend=backend, num_threads=1)
    before = torch.get_num_threads()
    found = measure(files, Variant("x", torch.float32), token_ids, settings, bos_id)
    torch.set_num_threads(before)
    expected, num_scored = reference(model, token_ids, bos_id)
    assert found.num_scored == num_scored == 3 * 23
    assert found.perplexity == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_is_near_the_definition(model, files, token_ids, variant):
    """A small random model suffers from rounding, but its figure has to stay one of the same model."""
    settings = EngineSettings(block_size_tokens=16, max_step_tokens=WINDOW, backend="torch", num_threads=1)
    before = torch.get_num_threads()
    found = measure(files, variant, token_ids, settings, None)
    torch.set_num_threads(before)
    expected, _ = reference(model, token_ids, None)
    assert found.perplexity == pytest.approx(expected, rel=0.15)
    assert (found.perplexity == pytest.approx(expected, rel=1e-5)) == (variant.name == "float32")


def test_score_has_its_standard_error():
    # Losses 1 and 3: mean 2, deviation 1, and one degree of freedom.
    found = score(torch.tensor([1.0, 3.0], dtype=torch.float64))
    assert found.perplexity == pytest.approx(math.exp(2))
    assert found.error == pytest.approx(math.exp(2))
    assert found.num_scored == 2


def test_windows_are_whole_and_begin_with_bos():
    assert list(windows(range(10), 4, None)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(windows(range(8), 4, 99)) == [[99, 1, 2, 3], [99, 5, 6, 7]]


def test_text_becomes_tokens_without_its_last_newline(tiny_model_files, tmp_path):
    path = tmp_path / "text"
    path.write_text("ab\nc\n")
    assert read_tokens(tiny_model_files, path, 0) == ([97, 98, 10, 99], None)
    assert read_tokens(tiny_model_files, path, 2) == ([97, 98], None)


def test_what_llama_perplexity_prints_is_read():
    text = "[1]24.1,[2]22.0,\nFinal estimate: PPL = 22.0312 +/- 0.55128\n"
    assert parse_llama(text, 2) == Score(22.0312, 0.55128, 510)
    with pytest.raises(RuntimeError, match="gave no figure: nothing here"):
        parse_llama("nothing here", 2)
