"""What every attention backend does, held against attention written out over plain, unpaged keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from headrace.engine.attention import BACKENDS, load_backend
from headrace.engine.attention.base import StepBatch
from headrace.engine.kv_cache import KvCache
from headrace.engine.sequence import Chunk, Sequence, StepPlan
from headrace.model_config import ModelConfig
from headrace.sampling_params import SamplingParams

LAYERS, LAYER, HEAD_DIM, NUM_BLOCKS = 2, 1, 16, 400
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


@pytest.fixture(params=list(BACKENDS))
def backend_name(request) -> str:
    return request.param


def make_cache(dtype: torch.dtype, block_size: int, kv_heads: int, heads: int) -> KvCache:
    config = ModelConfig(
        architecture="llama",
        num_layers=LAYERS,
        hidden_size=heads * HEAD_DIM,
        intermediate_size=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        vocab_size=2,
        max_model_tokens=4096,
        rope_theta=1.0,
        rms_norm_eps=1.0,
        tie_word_embeddings=True,
    )
    cache = KvCache(config, NUM_BLOCKS * 32 // block_size, block_size, dtype)
    cache.tensor.fill_(torch.nan)  # what a sequence has not written must not matter
    return cache


def make_samples(cache: KvCache, heads: int, step: list[tuple[int, int]]) -> list[Sample]:
    """Samples whose past is in the cache, in blocks strewn over it."""
    generator = torch.Generator().manual_seed(len(step) + heads)
    dtype, kv_heads = cache.tensor.dtype, cache.tensor.shape[3]
    free = torch.randperm(cache.num_blocks, generator=generator).tolist()
    samples: list[Sample] = []
    for number, (start, num_tokens) in enumerate(step):
        total = start + num_tokens

        def random(num_heads: int, total: int = total) -> torch.Tensor:
            return torch.randn(total, num_heads, HEAD_DIM, generator=generator).to(dtype)

        sample = Sample(start, num_tokens, random(heads), random(kv_heads), random(kv_heads))
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        sample.sequence = Sequence(str(number), [0] * total, total, sampling, root=b"")
        sample.sequence.block_ids = [free.pop() for _ in range(-(-total // cache.block_size_tokens))]
        for position in range(start):
            block = cache.tensor[sample.sequence.block_ids[position // cache.block_size_tokens], LAYER]
            block[0, :, position % cache.block_size_tokens] = sample.k[position]
            block[1, :, position % cache.block_size_tokens] = sample.v[position]
        samples.append(sample)
    return samples


def attended(backend_name: str, cache: KvCache, samples: list[Sample]) -> list[torch.Tensor]:
    plan = StepPlan([Chunk(sample.sequence, sample.start, sample.num_tokens) for sample in samples])
    attend = load_backend(backend_name, cache).prepare(StepBatch.of(plan, cache.block_size_tokens))
    q, k, v = (torch.cat([getattr(sample, name)[sample.new] for sample in samples]) for name in "qkv")
    return list(attend(LAYER, q, k, v).split([sample.num_tokens for sample in samples]))


def written_out(sample: Sample) -> torch.Tensor:
    q, k, v = sample.q[sample.new].double(), sample.k.double(), sample.v.double()
    group = q.shape[1] // k.shape[1]
    output = torch.empty_like(q)
    for row in range(q.shape[0]):
        seen = sample.start + row + 1
        for head in range(q.shape[1]):
            scores = k[:seen, head // group] @ q[row, head] / HEAD_DIM**0.5
            output[row, head] = scores.softmax(0) @ v[:seen, head // group]
    return output


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize(
    ("dtype", "block_size", "kv_heads", "heads"),
    [
        (torch.float32, 32, 2, 6),
        (torch.float32, 4, 3, 3),
        (torch.float32, 5, 1, 4),
        (torch.bfloat16, 32, 2, 6),
        (torch.bfloat16, 16, 2, 2),
    ],
)
def test_equals_attention_written_out(backend_name, step, dtype, block_size, kv_heads, heads):
    cache = make_cache(dtype, block_size, kv_heads, heads)
    samples = make_samples(cache, heads, step)
    for sample, output in zip(samples, attended(backend_name, cache, samples), strict=True):
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), written_out(sample), atol=TOLERANCE[dtype], rtol=0.0)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_writes_the_new_tokens_and_nothing_else(backend_name, step):
    cache = make_cache(torch.float32, 32, 2, 4)
    samples = make_samples(cache, 4, step)
    expected = cache.tensor.clone()
    for sample in samples:
        for position in range(sample.start, sample.start + sample.num_tokens):
            block = expected[sample.sequence.block_ids[position // 32], LAYER]
            block[0, :, position % 32] = sample.k[position]
            block[1, :, position % 32] = sample.v[position]
    attended(backend_name, cache, samples)
    torch.testing.assert_close(cache.tensor, expected, atol=0.0, rtol=0.0, equal_nan=True)


def test_a_broken_sequence_harms_no_other_one(backend_name):
    cache = make_cache(torch.float32, 32, 2, 4)
    samples = make_samples(cache, 4, [(40, 1), (41, 1), (10, 20)])
    for name in "qkv":
        getattr(samples[1], name)[:] = torch.nan
    outputs = attended(backend_name, cache, samples)
    assert outputs[1].isnan().all()
    for number in (0, 2):
        torch.testing.assert_close(outputs[number].double(), written_out(samples[number]), atol=2e-5, rtol=0)


def test_shared_blocks_are_read_by_all(backend_name):
    cache = make_cache(torch.float32, 32, 2, 4)
    first, second = make_samples(cache, 4, [(64, 3), (64, 1)])
    second.sequence.block_ids[:2] = first.sequence.block_ids[:2]
    second.k[:64], second.v[:64] = first.k[:64], first.v[:64]
    outputs = attended(backend_name, cache, [first, second])
    for sample, output in zip((first, second), outputs, strict=True):
        torch.testing.assert_close(output.double(), written_out(sample), atol=2e-5, rtol=0)


@pytest.mark.parametrize(("kv_heads", "heads"), [(2, 6), (2, 2), (1, 4)])
def test_bf16_on_cpu_does_not_depend_on_batch_or_chunk(kv_heads, heads):
    """Bit for bit: what is the same token is the same number, alone, in a batch, and in chunks of any size."""
    if not torch.cpu.get_capabilities().get("avx512_bf16"):
        pytest.skip("other kernels than those whose order of sums was measured")
    cache = make_cache(torch.bfloat16, 32, kv_heads, heads)
    [sample, *others] = make_samples(cache, heads, [(0, 200), (170, 1), (30, 1), (7, 12)])
    [expected] = attended("cpu", cache, [sample])
    for size in (1, 2, 7, 33, 64, 199):
        for first in range(0, 200, size):
            sample.start, sample.num_tokens = first, min(size, 200 - first)
            output = attended("cpu", cache, [others[0], sample, *others[1:]])[1]
            assert torch.equal(output, expected[sample.new]), (size, first)
