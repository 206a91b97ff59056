"""The runner on a tiny model: what a sequence is given depends on nothing but the sequence, on every forward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.config import EngineSettings
from headrace.engine import torch_runner
from headrace.engine.forward import load_forward
from headrace.engine.kv_cache import KvCache
from headrace.engine.layers.embedding import Embedding
from headrace.engine.models.decoder import Decoder
from headrace.engine.native import library
from headrace.engine.sampler import Draw, sample
from headrace.engine.sequence import Chunk, Sequence, StepPlan
from headrace.engine.torch_runner import TorchRunner
from headrace.engine.weights.load import load_model
from headrace.errors import HeadraceError, InternalError
from headrace.sampling_params import SamplingParams
from tests.support.hf_reference import reference_greedy, reference_model

BLOCK_SIZE, NUM_BLOCKS = 16, 64
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
PROMPTS = [[(11 * i * i + 3 * n) % 256 for i in range(n)] for n in (1, 2, 15, 16, 17, 40, 63, 90)]
BROKEN = 77  # a token whose embedding is NaN


@pytest.fixture(scope="module")
def model(tiny_model_files) -> Decoder:
    return load_model(tiny_model_files, torch.float32)


@pytest.fixture(params=["torch", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and library.load() is None:
        pytest.skip("the kernels were not compiled")
    return request.param


def make_runner(
    model: Decoder, backend: str, num_blocks: int = NUM_BLOCKS, **options: object
) -> tuple[TorchRunner, KvCache]:
    settings = EngineSettings.model_validate(
        {
            "num_blocks": num_blocks,
            "block_size_tokens": BLOCK_SIZE,
            "num_threads": 1,
            "backend": backend,
            **options,
        }
    )
    cache = KvCache.for_model(model.config, settings, model.dtype)
    # The kernels take the layers out of the list that they are given.
    return TorchRunner(
        load_forward(replace(model, layers=list(model.layers)), cache, settings),
        cache,
        model.config.vocab_size,
    ), cache


class Bench:
    """A runner with its cache, and sequences with blocks of their own."""

    def __init__(self, model: Decoder, backend: str, **options: object) -> None:
        self.runner, self.cache = make_runner(model, backend, **options)
        self._free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()

    def sequence(self, token_ids: list[int], sampling: SamplingParams = GREEDY, room: int = 16) -> Sequence:
        sequence = Sequence(str(len(self._free)), list(token_ids), len(token_ids), sampling, root=b"")
        num_blocks = -(-(len(token_ids) + room) // BLOCK_SIZE)
        sequence.block_ids = [self._free.pop() for _ in range(num_blocks)]
        return sequence

    def run(self, chunks: list[Chunk]) -> dict[str, int | HeadraceError]:
        """The token or the error of each sequence that has one."""
        results = zip(chunks, self.runner.run(StepPlan(chunks)), strict=True)
        found = {
            c.sequence.id: result.error or [token.token_id for token in result.drawn] for c, result in results
        }
        return {
            name: value[0] if isinstance(value, list) else value for name, value in found.items() if value
        }

    def generate(
        self, sequences: list[Sequence], num_tokens: int, chunk_tokens: int = 512
    ) -> list[list[int]]:
        """Each sequence's next tokens. All go along in every step: those that are ready decode, others prefill."""
        computed = {sequence.id: 0 for sequence in sequences}
        drawn: dict[str, list[int]] = {sequence.id: [] for sequence in sequences}
        while any(len(tokens) < num_tokens for tokens in drawn.values()):
            chunks = [
                Chunk(s, computed[s.id], min(chunk_tokens, len(s.token_ids) - computed[s.id]))
                for s in sequences
                if len(drawn[s.id]) < num_tokens
            ]
            results = self.run(chunks)
            assert set(results) == {chunk.sequence.id for chunk in chunks if chunk.samples}
            for chunk in chunks:
                computed[chunk.sequence.id] += chunk.num_tokens
                if chunk.sequence.id in results:
                    token_id = results[chunk.sequence.id]
                    assert isinstance(token_id, int)
                    chunk.sequence.token_ids.append(token_id)
                    drawn[chunk.sequence.id].append(token_id)
        return [drawn[sequence.id] for sequence in sequences]


@pytest.fixture(scope="module")
def expected(tiny_model_files) -> list[list[int]]:
    """The answers of Hugging Face transformers."""
    reference = reference_model(tiny_model_files)
    results = [reference_greedy(reference, prompt, 10) for prompt in PROMPTS]
    assert min(gap for _, gaps in results for gap in gaps) > 1e-4  # no near-tie: equality is meant
    return [tokens for tokens, _ in results]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 512])
def test_tokens_are_those_of_transformers_alone_and_together(model, backend, expected, chunk_tokens):
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        bench = Bench(model, backend)
        assert bench.generate([bench.sequence(prompt)], 10, chunk_tokens) == [tokens]
    bench = Bench(model, backend)
    assert bench.generate([bench.sequence(prompt) for prompt in PROMPTS], 10, chunk_tokens) == expected


def test_drawn_tokens_do_not_depend_on_the_batch(model, backend):
    kinds = [{}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 0.0}]
    samplings = [
        SamplingParams(max_tokens=64, seed=row, **kinds[row % len(kinds)]) for row in range(len(PROMPTS))
    ]
    together = Bench(model, backend)
    pairs = list(zip(PROMPTS, samplings, strict=True))
    answers = together.generate([together.sequence(prompt, sampling) for prompt, sampling in pairs], 10)
    for (prompt, sampling), answer in zip(pairs, answers, strict=True):
        alone = Bench(model, backend)
        assert alone.generate([alone.sequence(prompt, sampling)], 10) == [answer]


def test_a_sequence_goes_on_elsewhere_as_it_would_have_here(model, backend):
    sampling = SamplingParams(max_tokens=64, seed=5)
    here, there = Bench(model, backend), Bench(model, backend)
    [answer] = here.generate([here.sequence(PROMPTS[5], sampling)], 10)
    moved = there.sequence(PROMPTS[5], sampling)
    moved.token_ids += answer[:4]
    assert there.generate([moved], 6) == [answer[4:]]


def test_a_draw_is_numbered_by_the_tokens_of_the_answer(model, backend, monkeypatch):
    """Not by the length of the sequence: the same answer behind another prompt has the same uniform numbers."""
    seen: list[int] = []

    def recording_sample(logits_NV: torch.Tensor, draws: list[Draw]) -> list[int]:
        seen.extend(draw.position for draw in draws)
        return sample(logits_NV, draws)

    monkeypatch.setattr(torch_runner, "sample", recording_sample)
    bench = Bench(model, backend)
    first, second = bench.sequence(PROMPTS[3]), bench.sequence(PROMPTS[5])
    second.token_ids += [1, 2, 3, 4]
    bench.run([Chunk(s, 0, len(s.token_ids)) for s in (first, second)])
    assert seen == [0, 4]


def test_bf16_does_not_depend_on_batch_or_chunk(tiny_model_files, backend):
    if backend == "torch" and not torch.cpu.get_capabilities().get("avx512_bf16"):
        pytest.skip("other kernels than those whose order of sums was measured")
    model = load_model(tiny_model_files, torch.bfloat16)
    together = Bench(model, backend)
    answers = together.generate([together.sequence(prompt) for prompt in PROMPTS], 10)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        for chunk_tokens in (1, 7, 16):
            alone = Bench(model, backend)
            assert alone.generate([alone.sequence(prompt)], 10, chunk_tokens) == [answer]


def test_chunk_that_does_not_reach_the_end_draws_nothing(model, backend):
    bench = Bench(model, backend)
    assert bench.run([Chunk(bench.sequence(PROMPTS[5]), 0, 39)]) == {}


def broken(model: Decoder) -> Decoder:
    assert isinstance(model.embedding.weight, torch.Tensor)
    weight = model.embedding.weight.clone()
    weight[BROKEN] = torch.nan
    return replace(model, embedding=Embedding(weight, model.dtype, 1.0))


@pytest.mark.parametrize("kv_quantization", ["none", "int8", "fp8"])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(max_tokens=64, seed=1)])
def test_sequence_without_finite_logits_fails_alone(model, backend, sampling, kv_quantization):
    """Though what is not finite comes early in it, and reaches its last token through the cache alone."""
    bench = Bench(broken(model), backend, kv_quantization=kv_quantization)
    prompts = [PROMPTS[4], [BROKEN, *PROMPTS[3]], PROMPTS[5]]
    good, bad, other = [bench.sequence(prompt, sampling) for prompt in prompts]
    results = bench.run([Chunk(s, 0, len(s.token_ids)) for s in (good, bad, other)])
    error = results.pop(bad.id)
    assert isinstance(error, InternalError)
    assert "not finite" in str(error)
    fresh = Bench(model, backend, kv_quantization=kv_quantization)
    again = [fresh.sequence(prompt, sampling) for prompt in (PROMPTS[4], PROMPTS[5])]
    expected = fresh.run([Chunk(s, 0, len(s.token_ids)) for s in again])
    assert list(results.values()) == list(expected.values())


def test_sequence_on_which_the_model_raises_fails_alone(model, backend):
    bench = Bench(model, backend)
    good, bad, half = (bench.sequence(prompt) for prompt in (PROMPTS[5], [5, 10_000, 5], PROMPTS[6]))
    results = bench.run([Chunk(good, 0, 40), Chunk(bad, 0, 3), Chunk(half, 0, 20)])
    assert set(results) == {good.id, bad.id}
    assert isinstance(results[bad.id], InternalError)
    fresh = Bench(model, backend)
    assert [[results[good.id]]] == fresh.generate([fresh.sequence(PROMPTS[5])], 1)


def test_what_raises_alone_is_raised(model, backend):
    bench = Bench(model, backend)
    with pytest.raises(IndexError):
        bench.run([Chunk(bench.sequence([10_000]), 0, 1)])


def test_run_does_not_change_the_sequence(model, backend):
    bench = Bench(model, backend)
    sequence = bench.sequence(PROMPTS[5])
    before = replace(sequence, token_ids=list(sequence.token_ids), block_ids=list(sequence.block_ids))
    bench.run([Chunk(sequence, 0, 40)])
    for name in ("token_ids", "block_ids", "num_computed", "state", "hashes"):
        assert getattr(sequence, name) == getattr(before, name)


@pytest.mark.parametrize("max_step_tokens", [1, 20, 512])
@pytest.mark.parametrize("num_blocks", [2, NUM_BLOCKS])
def test_warm_up_fits_a_step_and_leaves_nothing_behind(model, backend, num_blocks, max_step_tokens):
    runner, cache = make_runner(model, backend, num_blocks, max_step_tokens=max_step_tokens)
    runner.warm_up(max_step_tokens)
    assert not cache.tensor.any()
