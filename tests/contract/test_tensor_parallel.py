"""Several ranks are the model that one is: logits and greedy tokens, of every family, however the text is cut."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from headrace.config import EngineSettings
from headrace.engine.forward import EagerForward, ForwardPass
from headrace.engine.kv_cache import KvCache
from headrace.engine.parallel.ranks import ParallelForward
from headrace.engine.sequence import Chunk, Sequence, StepPlan
from headrace.engine.weights.load import load_model
from headrace.sampling_params import SamplingParams
from tests.support.ranks import rank_threads
from tests.support.small_models import MODELS, VOCAB_SIZE, random_model, write_folder

BLOCK_SIZE, NUM_BLOCKS, NUM_TOKENS = 8, 40, 110
PROMPT = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
CUTS = {"at once": (NUM_TOKENS,), "unlike": (1, 2, 40, 1, 1, 33, 5)}


@pytest.fixture(scope="module")
def files_of(tmp_path_factory):
    """A model's files, each once."""

    @cache
    def write(name: str):
        return write_folder(random_model(name), tmp_path_factory.mktemp("small"))

    return write


@torch.inference_mode()
def logits_of(forward: ForwardPass, cut: tuple[int, ...]) -> torch.Tensor:
    """Logits [T, V] at each position of the prompt, whose chunks follow one another through a paged cache."""
    sequence = Sequence("s", PROMPT, NUM_TOKENS, SamplingParams(max_tokens=1), root=b"")
    order = torch.Generator().manual_seed(2)
    sequence.block_ids = torch.randperm(NUM_BLOCKS, generator=order).tolist()
    parts, start = [], 0
    while start < NUM_TOKENS:
        size = min(cut[min(len(parts), len(cut) - 1)], NUM_TOKENS - start)
        assert forward.run(StepPlan([Chunk(sequence, start, size)])) == [size - 1]
        parts.append(forward.logits(range(size)).clone())
        start += size
    return torch.cat(parts)


def of_one(files, backend) -> torch.Tensor:
    model = load_model(files, torch.float32)
    settings = EngineSettings(num_blocks=NUM_BLOCKS, block_size_tokens=BLOCK_SIZE)
    return logits_of(
        EagerForward(model, KvCache.for_model(model.config, settings, torch.float32), backend),
        CUTS["at once"],
    )


def assert_same_logits(files, size: int, backend: str = "torch") -> None:
    expected = of_one(files, backend)
    with rank_threads(
        files, size, num_blocks=NUM_BLOCKS, block_size_tokens=BLOCK_SIZE, backend=backend
    ) as ranks:
        for shard in ranks.shards:
            shard.cache.tensor.fill_(torch.nan)
        forward = ranks.runner._own._forward
        assert isinstance(forward, ParallelForward)
        for cut in CUTS.values():
            torch.testing.assert_close(logits_of(forward, cut), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_two_ranks_are_those_of_one(files_of, name):
    assert_same_logits(files_of(name), 2)
