"""Gemma 3 270M as it is published in GGUF, Q4_K_M: tokens and token ids are those of Hugging Face transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from headrace import gguf_metadata
from headrace.clock import VirtualClock
from headrace.config import DEFAULT_CACHE_DIR, EngineSettings
from headrace.engine.block_pool import BlockPool
from headrace.engine.engine import Engine
from headrace.engine.forward import load_forward
from headrace.engine.kv_cache import KvCache
from headrace.engine.sequence import NewToken, Sequence
from headrace.engine.torch_runner import TorchRunner
from headrace.engine.weights.load import load_model
from headrace.errors import InvalidRequest, ModelError
from headrace.model_config import ModelFiles
from headrace.model_store import resolve
from headrace.sampling_params import SamplingParams
from headrace.tokenizer import ChatMessage, load_tokenizer
from tests.support.audit import assert_idle_pool
from tests.support.hf_reference import reference_greedy, reference_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_NEW_TOKENS = 10
BLOCK_SIZE, NUM_BLOCKS = 32, 60
NEAR_TIE = 1e-4
TEXTS = [
    "Hello world",
    " leading and trailing ",
    "def f(x):\n    return x + 1\n\n\n",
    "Größe 漢字 🙂 e\u0301 한국어",
    "tabs\t\tand\r\nlines, 1234567890",
    "<b>bold</b> <unused5> [multimodal]",
    "<start_of_turn>user\nhi<end_of_turn>\n",
    "",
]


@pytest.fixture(scope="module")
def gemma_files() -> ModelFiles:
    try:
        return resolve("gemma-3-270m", cache_dir=DEFAULT_CACHE_DIR)
    except ModelError as error:
        if "could not download" not in str(error):
            raise
        pytest.skip(f"the model is not on this machine: {error}")


def without_vocabulary(files: ModelFiles, path: Path) -> ModelFiles:
    """A copy of the file for transformers, which takes half a minute to read the vocabulary that it does not need."""
    metadata, data = gguf_metadata.read(files.path), np.memmap(files.path, np.uint8, "r")
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_vocab_size(files.config.vocab_size)
    for key, value in metadata.fields.items():
        if key.startswith("gemma3."):
            writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, value)
    for tensor in metadata.tensors.values():
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        raw = data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(*tensor.shape[:0:-1], -1)
        writer.add_tensor(tensor.name, raw.view(np.float32) if kind == 0 else raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return replace(files, path=path)


def greedy(engine: Engine, name: str, prompt: list[int]) -> list[int]:
    sampling = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
    engine.submit(Sequence(name, list(prompt), len(prompt), sampling, root=b"root"))
    tokens: list[int] = []
    while len(tokens) < NUM_NEW_TOKENS:
        tokens += [event.token_id for event in engine.step().events if isinstance(event, NewToken)]
    assert_idle_pool(engine.audit())
    return tokens


def test_answers_are_those_of_transformers(gemma_files, tmp_path):
    """A short prompt, and one that is longer than the window: cold, and from the cache."""
    tokenizer = load_tokenizer(gemma_files)
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    prompts = [tokenizer.encode(part, add_special=True) for part in ("Once upon a time there was a", text)]
    prompts[1] = prompts[1][:700]
    assert len(prompts[1]) > gemma_files.config.sliding_window
    theirs = reference_model(without_vocabulary(gemma_files, tmp_path / "gemma.gguf"))
    assert theirs.config.sliding_window == gemma_files.config.sliding_window
    model = load_model(gemma_files, torch.float32)
    settings = EngineSettings(num_blocks=NUM_BLOCKS, block_size_tokens=BLOCK_SIZE, max_step_tokens=256)
    cache = KvCache.for_model(gemma_files.config, settings, torch.float32)
    runner = TorchRunner(load_forward(model, cache, settings), cache)
    engine = Engine(runner, BlockPool(NUM_BLOCKS, BLOCK_SIZE), settings, frozenset(), VirtualClock())
    for number, prompt in enumerate(prompts):
        expected, gaps = reference_greedy(theirs, prompt, NUM_NEW_TOKENS)
        assert min(gaps) > NEAR_TIE  # equality is meant
        assert greedy(engine, f"cold {number}", prompt) == expected
        assert greedy(engine, f"warm {number}", prompt) == expected


def test_token_ids_are_those_of_transformers(gemma_files):
    tokenizer = load_tokenizer(gemma_files)
    theirs = AutoTokenizer.from_pretrained(gemma_files.path.parent, gguf_file=gemma_files.path.name)
    for text in TEXTS:
        found = tokenizer.encode(text, add_special=True)
        assert found == theirs.encode(text), text
        assert found.count(2) == 1  # BOS
    assert [tokenizer.token_bytes(i) for i in (0, 1, 2, 105, 106)] == [b""] * 5


def test_md_01_what_the_file_says_of_ends_and_chats(gemma_files):
    """<eos>, and <end_of_turn>, which it knows and does not declare. It is not tuned for chats and has no template."""
    assert gemma_files.eos_token_ids == {1, 106}
    tokenizer = load_tokenizer(gemma_files)
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.encode_chat([ChatMessage("user", "Hi")])


@torch.inference_mode()
def test_quantized_weights_that_are_kept_are_the_same_weights(gemma_files):
    kept = load_model(gemma_files, torch.bfloat16, quantization="auto")
    dense = load_model(gemma_files, torch.bfloat16)
    for ours, theirs in zip(kept.layers[::9], dense.layers[::9], strict=True):
        for part in ("qkv", "output", "gate_up", "down"):
            found = getattr(ours, part).dense(torch.bfloat16)
            assert torch.equal(found, getattr(theirs, part).weight), part
    ids = torch.tensor([0, 106, 262143])
    assert torch.equal(kept.embedding(ids), dense.embedding(ids))
