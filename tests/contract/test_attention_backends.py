"""What every attention backend does, held against attention written out over plain, unpaged keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from headrace.engine.attention import BACKENDS, load_backend
from headrace.engine.attention.base import StepBatch
from headrace.engine.kv_cache import KvCache
from headrace.engine.native import library
from headrace.engine.sequence import Chunk, Sequence, StepPlan
from headrace.model_config import ModelConfig
from headrace.sampling_params import SamplingParams

LAYERS, LAYER, BLOCK_SIZE, NUM_POSITIONS = 2, 1, 32, 3200
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}

# (tokens in the cache already, tokens of the chunk) of each sequence of a step
STEPS = {
    "one token, nothing before": [(0, 1)],
    "decodes of unlike length": [(0, 1), (1, 1), (31, 1), (32, 1), (33, 1), (150, 1)],
    "decodes too unlike for one batch": [(700, 1), (3, 1), (400, 1), (690, 1)],
    "whole prompts": [(0, 5), (0, 32), (0, 33)],
    "long prompt": [(0, 301)],
    "chunks behind a prefix": [(32, 32), (5, 2), (64, 129), (17, 3)],
    "decodes and chunks, mixed up": [(40, 1), (0, 9), (63, 1), (8, 40), (200, 1)],
}


def model_config(kv_heads: int = 2, heads: int = 4, head_dim: int = 64) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        num_layers=LAYERS,
        hidden_size=heads * head_dim,
        intermediate_size=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=2,
        max_model_tokens=4096,
        rope_theta=1.0,
        rms_norm_eps=1.0,
        tie_word_embeddings=True,
    )


CONFIG = model_config()
SLIDING = (LAYER == 0, LAYER == 1)
VARIANTS = {
    "window of one": replace(CONFIG, sliding_window=1, sliding_layers=SLIDING),
    "window within a block": replace(CONFIG, sliding_window=7, sliding_layers=SLIDING),
    "window of a block": replace(CONFIG, sliding_window=32, sliding_layers=SLIDING),
    "window over blocks": replace(CONFIG, sliding_window=77, sliding_layers=SLIDING),
    "window longer than the text": replace(CONFIG, sliding_window=4096, sliding_layers=SLIDING),
    "window of the other layer": replace(CONFIG, sliding_window=3, sliding_layers=SLIDING[::-1]),
    "scale": replace(CONFIG, query_scale=0.5),
    "cap": replace(CONFIG, query_scale=1.0, attention_softcap=5.0),
    "all at once": replace(
        model_config(1, 5, 16),
        query_scale=1.5,
        attention_softcap=8.0,
        sliding_window=40,
        sliding_layers=SLIDING,
    ),
}


@dataclass
class Sample:
    """Random tokens of one sequence, one layer: keys and values [tokens, K, D] and queries [tokens, H, D]."""

    start: int
    num_tokens: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sequence: Sequence = field(init=False)

    @property
    def new(self) -> slice:
        return slice(self.start, self.start + self.num_tokens)


def poison(cache: KvCache) -> None:
    """Every number reads as NaN."""
    if cache.quantization == "none":
        cache.tensor.fill_(torch.nan)
    else:
        cache.tensor.fill_(0x7F)  # NaN as fp8
    if cache.quantization == "int8":
        scale = torch.tensor([torch.nan]).view(torch.int8)
        cache.tensor[..., cache.head_dim :] = scale
    assert cache.gather(LAYER, torch.arange(cache.num_blocks)).isnan().all()


class Bench:
    """A backend, a cache full of NaN, and samples whose past is in the cache, in blocks strewn over it."""

    def __init__(
        self,
        backend_name: str,
        step: list[tuple[int, int]],
        config: ModelConfig = CONFIG,
        dtype: torch.dtype = torch.float32,
        block_size: int = BLOCK_SIZE,
        quantization: str = "none",
    ) -> None:
        self.config = config
        self.cache = KvCache(config, NUM_POSITIONS // block_size, block_size, dtype, quantization)
        poison(self.cache)  # what a sequence has not written must not matter
        self._backend = load_backend(backend_name, self.cache, config)
        self._generator = torch.Generator().manual_seed(len(step) + config.num_heads)
        self._free = torch.randperm(self.cache.num_blocks, generator=self._generator).tolist()
        self.samples = [self._sample(str(number), start, count) for number, (start, count) in enumerate(step)]

    def _random(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        shape = (num_tokens, num_heads, self.config.head_dim)
        return torch.randn(shape, generator=self._generator).to(self.cache.dtype)

    def _sample(self, name: str, start: int, num_tokens: int) -> Sample:
        total, kv_heads = start + num_tokens, self.config.num_kv_heads
        q, k, v = (self._random(total, heads) for heads in (self.config.num_heads, kv_heads, kv_heads))
        sample = Sample(start, num_tokens, q, k, v)
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        sample.sequence = Sequence(name, [0] * total, total, sampling, root=b"")
        num_blocks = -(-total // self.cache.block_size_tokens)
        sample.sequence.block_ids = [self._free.pop() for _ in range(num_blocks)]
        if self.cache.quantization == "none":
            self.write(self.cache.tensor, sample, range(start))
        elif start:
            self.write_quantized(sample, range(start))
        return sample

    def write(self, kv: torch.Tensor, sample: Sample, positions: range) -> None:
        size = self.cache.block_size_tokens
        for position in positions:
            block = kv[sample.sequence.block_ids[position // size], LAYER]
            block[0, :, position % size] = sample.k[position]
            block[1, :, position % size] = sample.v[position]

    def write_quantized(self, sample: Sample, positions: range) -> None:
        """The past, by the cache's own code, of which `tests/unit/engine/test_kv_cache.py` says what it does."""
        size = self.cache.block_size_tokens
        blocks = torch.tensor([sample.sequence.block_ids[position // size] for position in positions])
        at = torch.tensor(positions)
        self.cache.write(LAYER, blocks, at % size, sample.k[at], sample.v[at])

    def attend(self, samples: list[Sample] | None = None) -> list[torch.Tensor]:
        samples = samples or self.samples
        plan = StepPlan([Chunk(sample.sequence, sample.start, sample.num_tokens) for sample in samples])
        attend = self._backend.prepare(StepBatch.of(plan, self.cache.block_size_tokens))
        q, k, v = (torch.cat([getattr(sample, name)[sample.new] for sample in samples]) for name in "qkv")
        return list(attend(LAYER, q, k, v).split([sample.num_tokens for sample in samples]))

    def written_out(self, sample: Sample) -> torch.Tensor:
        q, k, v = sample.q[sample.new].double(), sample.k.double(), sample.v.double()
        group = q.shape[1] // k.shape[1]
        output = torch.empty_like(q)
        for row in range(q.shape[0]):
            end = sample.start + row + 1
            seen = slice(max(0, end - (self.config.window(LAYER) or end)), end)
            for head in range(q.shape[1]):
                scores = k[seen, head // group] @ q[row, head] * self.config.query_scale
                if cap := self.config.attention_softcap:
                    scores = (scores / cap).tanh() * cap
                output[row, head] = scores.softmax(0) @ v[seen, head // group]
        return output

    def check(self, tolerance: float = 2e-5) -> None:
        for sample, output in zip(self.samples, self.attend(), strict=True):
            assert output.dtype == self.cache.dtype
            torch.testing.assert_close(output.double(), self.written_out(sample), atol=tolerance, rtol=0.0)


@pytest.fixture(params=list(BACKENDS))
def backend_name(request) -> str:
    if request.param == "cpu" and library.load() is None:
        pytest.skip("the kernels were not compiled")
    return request.param


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize(
    ("dtype", "block_size", "kv_heads", "heads", "head_dim"),
    [
        (torch.float32, 32, 2, 6, 16),
        (torch.float32, 4, 3, 3, 16),
        (torch.float32, 5, 1, 4, 32),
        (torch.float32, 32, 1, 8, 256),
        (torch.bfloat16, 32, 3, 9, 64),
        (torch.bfloat16, 16, 2, 2, 64),
        (torch.bfloat16, 32, 1, 4, 256),
    ],
)
def test_equals_attention_written_out(backend_name, step, dtype, block_size, kv_heads, heads, head_dim):
    config = model_config(kv_heads, heads, head_dim)
    Bench(backend_name, step, config, dtype, block_size).check(TOLERANCE[dtype])


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_scale_cap_and_window_are_those_of_the_config(backend_name, config, step):
    Bench(backend_name, step, config).check()


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_scale_cap_and_window_in_bf16(backend_name, config):
    Bench(backend_name, STEPS["decodes and chunks, mixed up"], config, torch.bfloat16).check(5e-2)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_writes_the_new_tokens_and_nothing_else(backend_name, step):
    bench = Bench(backend_name, step)
    expected = bench.cache.tensor.clone()
    for sample in bench.samples:
        bench.write(expected, sample, range(sample.start, sample.start + sample.num_tokens))
    bench.attend()
    torch.testing.assert_close(bench.cache.tensor, expected, atol=0.0, rtol=0.0, equal_nan=True)


def test_what_lies_before_the_window_may_be_anything(backend_name):
    """Numbers that would win every comparison change nothing."""
    config = VARIANTS["window of a block"]
    bench = Bench(backend_name, [(150, 1), (96, 40)], config)
    expected = [bench.written_out(sample) for sample in bench.samples]
    for sample in bench.samples:
        outside = (sample.start - config.sliding_window + 1) // BLOCK_SIZE
        bench.cache.tensor[sample.sequence.block_ids[:outside]] = 1e30
    for output, wanted in zip(bench.attend(), expected, strict=True):
        torch.testing.assert_close(output.double(), wanted, atol=2e-5, rtol=0.0)


def test_a_broken_sequence_harms_no_other_one(backend_name):
    bench = Bench(backend_name, [(40, 1), (41, 1), (10, 20)])
    for name in "qkv":
        getattr(bench.samples[1], name)[:] = torch.nan
    outputs = bench.attend()
    assert outputs[1].isnan().all()
    for number in (0, 2):
        expected = bench.written_out(bench.samples[number])
        torch.testing.assert_close(outputs[number].double(), expected, atol=2e-5, rtol=0)


def test_shared_blocks_are_read_by_all(backend_name):
    bench = Bench(backend_name, [(64, 3), (64, 1)])
    first, second = bench.samples
    second.sequence.block_ids[:2] = first.sequence.block_ids[:2]
    second.k[:64], second.v[:64] = first.k[:64], first.v[:64]
    bench.check()


@pytest.mark.parametrize(("kv_heads", "heads"), [(2, 6), (2, 2), (1, 4)])
def test_bf16_on_cpu_does_not_depend_on_batch_or_chunk(kv_heads, heads):
    """Bit for bit: what is the same token is the same number, alone, in a batch, and in chunks of any size."""
    if library.load() is None:
        pytest.skip("the kernels were not compiled")
    config = model_config(kv_heads, heads)
    bench = Bench("cpu", [(0, 200), (170, 1), (30, 1), (7, 12)], config, torch.bfloat16)
    [sample, *others] = bench.samples
    [expected] = bench.attend([sample])
    for size in (1, 2, 7, 33, 64, 199):
        for first in range(0, 200, size):
            sample.start, sample.num_tokens = first, min(size, 200 - first)
            output = bench.attend([others[0], sample, *others[1:]])[1]
            assert torch.equal(output, expected[sample.new]), (size, first)


# How far 8 bits may move an output whose keys and values are normally distributed: half a step of int8 (the largest of
# a row, about 3, in 127 steps) and of fp8 (a sixteenth of the number), in a few numbers that weigh most.
QUANTIZED = {"int8": 0.1, "fp8": 0.4}
SHAPES = [(torch.float32, 4, 3, 3, 16), (torch.float32, 32, 2, 6, 20), (torch.bfloat16, 32, 3, 9, 64)]


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize(("dtype", "block_size", "kv_heads", "heads", "head_dim"), SHAPES)
def test_quantized_kv_is_attended_as_it_was_written(
    backend_name, quantization, step, dtype, block_size, kv_heads, heads, head_dim
):
    """As the reference does, from the same bytes; and close to what was there before it was quantized."""
    config = model_config(kv_heads, heads, head_dim)
    bench, reference = (
        Bench(name, step, config, dtype, block_size, quantization) for name in (backend_name, "reference")
    )
    outputs, expected = bench.attend(), reference.attend()
    assert torch.equal(bench.cache.tensor, reference.cache.tensor)
    errors = []
    for sample, output, same in zip(bench.samples, outputs, expected, strict=True):
        torch.testing.assert_close(output, same, atol=TOLERANCE[dtype], rtol=0.0)
        errors.append((output.double() - bench.written_out(sample)).abs().max().item())
    assert max(errors) < QUANTIZED[quantization]
    assert max(errors) > 1e-4  # it was quantized


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_scale_cap_and_window_over_quantized_kv(backend_name, config, quantization):
    step = STEPS["decodes and chunks, mixed up"]
    bench, reference = (
        Bench(name, step, config, quantization=quantization) for name in (backend_name, "reference")
    )
    for output, expected in zip(bench.attend(), reference.attend(), strict=True):
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=0.0)
