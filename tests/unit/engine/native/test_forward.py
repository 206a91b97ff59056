"""The native forward pass: a token's logits depend on nothing but the tokens before it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from headrace.engine.forward import EagerForward
from headrace.engine.kv_cache import KvCache
from headrace.engine.native.forward import NativeForward
from headrace.engine.sequence import Chunk, Sequence, StepPlan
from headrace.engine.weights.load import load_model
from headrace.engine.weights.source import Quantization
from headrace.model_config import ModelFiles
from headrace.sampling_params import SamplingParams
from tests.support.small_models import VOCAB_SIZE, random_model, write_folder

BLOCK_SIZE, NUM_BLOCKS, MOST_TOKENS = 8, 160, 600
LENGTH = 150  # of the text that is looked at
NAMES = ("llama, biases", "gemma3, scaled queries, caps")
FORMS: list[tuple[Quantization, str]] = [
    ("none", "none"),
    ("none", "int8"),
    ("none", "fp8"),
    ("int8", "none"),
    ("int4", "none"),
    ("int4", "int8"),
]


@pytest.fixture(autouse=True)
def _forced(instruction_set: str) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelFiles]:
    return cache(lambda name: write_folder(random_model(name), tmp_path_factory.mktemp("small")))


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Bench:
    """A forward pass over a cache of its own, whose blocks are dealt out in disorder."""

    def __init__(
        self, files: ModelFiles, form: tuple[Quantization, str], dtype: torch.dtype, threads: int
    ) -> None:
        """`threads`: 0 for the model as it is written in torch."""
        quantization, kv_quantization = form
        model = load_model(files, dtype, quantization=quantization)
        self._cache = KvCache(model.config, NUM_BLOCKS, BLOCK_SIZE, dtype, kv_quantization)
        self.forward = (
            NativeForward(model, self._cache, num_threads=threads, max_step_tokens=MOST_TOKENS)
            if threads
            else EagerForward(model, self._cache, "reference")
        )
        self._free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()

    def sequence(self, token_ids: list[int], prefix: list[int] | None = None) -> Sequence:
        """`prefix`: blocks that hold its beginning already."""
        sequence = Sequence("s", token_ids, len(token_ids), SamplingParams(max_tokens=1), root=b"")
        sequence.block_ids = list(prefix or [])
        while len(sequence.block_ids) * BLOCK_SIZE < len(token_ids):
            sequence.block_ids.append(self._free.pop())
        return sequence

    def give_back(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self._free = [*sequence.block_ids, *self._free]

    def step(self, *chunks: Chunk) -> list[torch.Tensor]:
        """Logits [tokens, V] of each chunk."""
        last_rows = self.forward.run(StepPlan(list(chunks)))
        logits = self.forward.logits(range(last_rows[-1] + 1)).clone()
        return list(logits.split([chunk.num_tokens for chunk in chunks]))

    def logits(self, sequence: Sequence, size: int, start: int = 0) -> torch.Tensor:
        """From `start` on, in chunks of `size`."""
        end = len(sequence.token_ids)
        parts = [
            self.step(Chunk(sequence, first, min(size, end - first)))[0] for first in range(start, end, size)
        ]
        return torch.cat(parts)

    def among_others(self, sequence: Sequence, size: int) -> torch.Tensor:
        """As `logits`, in a batch of five: one decodes, two are prefilled, and one decodes behind all."""
        others = [self.sequence(tokens(length, length)) for length in (90, 41, 24, 33)]
        for other in (others[0], others[3]):
            self.logits(other, 64)
        found, end = [], len(sequence.token_ids)
        for first in range(0, end, size):
            chunks = [
                Chunk(others[0], 89, 1),
                Chunk(others[1], 0, 41),
                Chunk(sequence, first, min(size, end - first)),
                Chunk(others[2], 0, 24),
                Chunk(others[3], 32, 1),
            ]
            found.append(self.step(*chunks)[2])
        self.give_back(*others)
        return torch.cat(found)


@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [
        *((NAMES[0], form, torch.bfloat16) for form in FORMS),
        (NAMES[0], FORMS[0], torch.float32),
        (NAMES[0], FORMS[-1], torch.float32),
        (NAMES[1], FORMS[0], torch.bfloat16),
        (NAMES[1], FORMS[-1], torch.bfloat16),
    ],
)
def test_bits_depend_on_neither_chunk_nor_batch_nor_cache_nor_threads(folder, name, form, dtype):
    text = tokens(LENGTH)
    one, two = (Bench(folder(name), form, dtype, threads) for threads in (1, 2))
    first = one.sequence(text)
    expected = one.logits(first, LENGTH)
    assert expected.isfinite().all()
    assert expected.std() > 0.5  # the comparison means something
    for bench in (one, two):
        for size in (1, 7, 16, 64, LENGTH):
            sequence = bench.sequence(text)
            assert torch.equal(bench.logits(sequence, size), expected), size
            bench.give_back(sequence)
        for size in (1, 64, LENGTH):
            sequence = bench.sequence(text)
            assert torch.equal(bench.among_others(sequence, size), expected), size
            bench.give_back(sequence)
    for num_cached in (1, 9, 18):
        sequence = one.sequence(text, first.block_ids[:num_cached])
        found = one.logits(sequence, 64, num_cached * BLOCK_SIZE)
        assert torch.equal(found, expected[num_cached * BLOCK_SIZE :]), num_cached
        one.give_back(one.sequence([], sequence.block_ids[num_cached:]))


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_model_in_torch(folder, name, form):
    """Of the same weights, quantized or not; with 8-bit KV a number may be rounded to the other side."""
    text = tokens(LENGTH)
    ours, theirs = (Bench(folder(name), form, torch.float32, threads) for threads in (1, 0))
    found, expected = (bench.logits(bench.sequence(text), 64) for bench in (ours, theirs))
    bound = 2e-4 if form[1] == "none" else 0.05
    assert (found - expected).abs().max() < bound


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**40])
def test_a_token_that_the_model_does_not_have_is_refused(folder, token_id):
    bench = Bench(folder("llama, biases"), ("none", "none"), torch.float32, 1)
    with pytest.raises(IndexError, match=f"of {VOCAB_SIZE} tokens"):
        bench.step(Chunk(bench.sequence([3, token_id, 3]), 0, 3))
    # The bad token is no concern of a chunk that lies before it.
    bench.step(Chunk(bench.sequence([3, token_id, 3]), 0, 1))


def test_logits_of_more_rows_than_a_step_has_tokens(folder):
    """Each choice of a prompt has a row. The kernels wrote them beyond their buffer."""
    bench = Bench(folder(NAMES[0]), FORMS[0], torch.float32, 2)
    text = tokens(9)
    expected = bench.logits(bench.sequence(text), len(text))
    found = bench.forward.logits([row for _ in range(MOST_TOKENS) for row in range(len(text))])
    assert torch.equal(found, expected.repeat(MOST_TOKENS, 1))
