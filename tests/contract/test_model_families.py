"""Every family is the model that Hugging Face transformers has: logits and greedy tokens, however the text is cut."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from headrace.clock import VirtualClock
from headrace.config import EngineSettings
from headrace.engine.block_pool import BlockPool
from headrace.engine.engine import Engine
from headrace.engine.forward import ForwardPass, load_forward
from headrace.engine.kv_cache import KvCache
from headrace.engine.models.decoder import Decoder
from headrace.engine.native import library
from headrace.engine.sequence import Chunk, Failed, NewToken, Sequence, StepPlan
from headrace.engine.torch_runner import TorchRunner
from headrace.engine.weights.load import load_model
from headrace.sampling_params import SamplingParams
from tests.support.audit import assert_idle_pool
from tests.support.hf_reference import reference_greedy
from tests.support.small_models import (
    IN_GGUF,
    MODELS,
    VOCAB_SIZE,
    WINDOW,
    random_model,
    rename_for_images,
    round_to,
    write_folder,
    write_gguf,
)

BLOCK_SIZE, NUM_BLOCKS, NUM_TOKENS = 8, 40, 110
PROMPT = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
KINDS = ("F32", "F16", "BF16", "Q8_0")
Backend = Literal["reference", "torch", "cpu"]
HERE: tuple[Backend, ...] = ("reference", "torch", "cpu") if library.load() else ("reference", "torch")
# Sizes of the chunks that the text comes in; the last one goes on to the end.
CUTS = {
    "at once": (NUM_TOKENS,),
    "in chunks": (13,),
    "in blocks": (8,),
    "then decoded": (90, 1),
    "decoded from the start": (1,),
    "unlike": (1, 2, 40, 1, 1, 33, 5),
}


def settings_of(backend: Backend, max_step_tokens: int = 512) -> EngineSettings:
    return EngineSettings(
        num_blocks=NUM_BLOCKS,
        block_size_tokens=BLOCK_SIZE,
        max_step_tokens=max_step_tokens,
        num_threads=1,
        backend=backend,
    )


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A model of transformers, and ours from the folder it saved; each once."""

    @cache
    def load(name: str) -> tuple[PreTrainedModel, Decoder]:
        theirs = random_model(name)
        files = write_folder(theirs, tmp_path_factory.mktemp("small"))
        return theirs, load_model(files, torch.float32)

    return load


def forward_of(model: Decoder, settings: EngineSettings) -> tuple[ForwardPass, KvCache]:
    """On one thread, with a cache full of NaN."""
    kv = KvCache.for_model(model.config, settings, torch.float32)
    kv.tensor.fill_(torch.nan)
    # The kernels take the layers out of the list that they are given.
    return load_forward(replace(model, layers=list(model.layers)), kv, settings), kv


@torch.inference_mode()
def logits_of(model: Decoder, cut: tuple[int, ...], backend: Backend) -> torch.Tensor:
    """Logits [T, V] at each position of the prompt, whose chunks follow one another through a paged cache."""
    forward, _ = forward_of(model, settings_of(backend))
    sequence = Sequence("s", PROMPT, NUM_TOKENS, SamplingParams(max_tokens=1), root=b"")
    sequence.block_ids = torch.randperm(NUM_BLOCKS).tolist()
    parts, start = [], 0
    while start < NUM_TOKENS:
        size = min(cut[min(len(parts), len(cut) - 1)], NUM_TOKENS - start)
        assert forward.run(StepPlan([Chunk(sequence, start, size)])) == [size - 1]
        parts.append(forward.logits(range(size)).clone())
        start += size
    return torch.cat(parts)


@torch.inference_mode()
def expected_logits(model: PreTrainedModel) -> torch.Tensor:
    logits = model(torch.tensor([PROMPT])).logits[0]
    assert logits.std() > 0.5  # the comparison means something
    return logits


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(loaded, name, cut):
    theirs, ours = loaded(name)
    expected = expected_logits(theirs)
    for backend in HERE:
        torch.testing.assert_close(logits_of(ours, cut, backend), expected, atol=1e-4, rtol=1e-4)


def greedy(engine: Engine, name: str, prompt: list[int], num_tokens: int) -> list[int]:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    engine.submit(Sequence(name, list(prompt), len(prompt), sampling, root=b"root"))
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        events = engine.step().events
        assert not [event for event in events if isinstance(event, Failed)]
        tokens += [event.token_id for event in events if isinstance(event, NewToken)]
    assert_idle_pool(engine.audit())
    return tokens


@pytest.mark.parametrize("backend", HERE[1:])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(loaded, name, backend):
    """Cold, with all of the prompt cached, with a part of it cached, and in chunks of several sizes."""
    theirs, ours = loaded(name)
    expected, gaps = reference_greedy(theirs, PROMPT, 30)
    assert min(gaps) > 1e-4  # no near-tie: equality is meant
    for max_step_tokens in (512, 32, 7):
        settings = settings_of(backend, max_step_tokens)
        engine = Engine(
            TorchRunner(*forward_of(ours, settings), ours.config.vocab_size),
            BlockPool(NUM_BLOCKS, BLOCK_SIZE),
            settings,
            frozenset(),
            VirtualClock(),
        )
        assert greedy(engine, "part", PROMPT[:50], 1)
        computed = engine.load().prefill_tokens
        assert greedy(engine, "first", PROMPT, 30) == expected
        assert engine.load().prefill_tokens - computed == NUM_TOKENS - 48  # six blocks of it were there
        assert greedy(engine, "again", PROMPT, 30) == expected
        assert engine.load().prefill_tokens - computed < NUM_TOKENS


@pytest.mark.parametrize("name", [name for name in MODELS if "window" in name or "gemma3" in name])
def test_the_context_reaches_beyond_the_window(loaded, name):
    """What windows hide matters: a model without them would say something else."""
    theirs, ours = loaded(name)
    assert any(ours.config.window(layer) == WINDOW for layer in range(ours.config.num_layers))
    without = replace(ours, config=replace(ours.config, sliding_window=NUM_TOKENS))
    found = logits_of(without, (NUM_TOKENS,), "reference")
    torch.testing.assert_close(found[:WINDOW], expected_logits(theirs)[:WINDOW], atol=1e-4, rtol=1e-4)
    assert (found[WINDOW:] - expected_logits(theirs)[WINDOW:]).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf_files_hold_the_same_models(tmp_path, name, kind):
    quantization = gguf.GGMLQuantizationType[kind]
    theirs = random_model(name)
    ours = load_model(write_gguf(theirs, tmp_path / "small.gguf", quantization), torch.float32)
    round_to(theirs, quantization)
    for backend in HERE[1:]:
        found = logits_of(ours, (70, 1), backend)
        torch.testing.assert_close(found, expected_logits(theirs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_weights_over_several_files_with_an_index(tmp_path, name):
    theirs = random_model(name)
    files = write_folder(theirs, tmp_path / "small", max_shard_size="50KB")
    assert (files.path / "model.safetensors.index.json").is_file()
    assert len(list(files.path.glob("*.safetensors"))) > 2
    found = logits_of(load_model(files, torch.float32), (NUM_TOKENS,), "torch")
    torch.testing.assert_close(found, expected_logits(theirs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_gemma_3_that_sees_images(tmp_path, prefix):
    theirs = random_model("gemma3, scaled rope")
    write_folder(theirs, tmp_path / "small")
    ours = load_model(rename_for_images(tmp_path / "small", prefix), torch.float32)
    found = logits_of(ours, (NUM_TOKENS,), "torch")
    torch.testing.assert_close(found, expected_logits(theirs), atol=1e-4, rtol=1e-4)
