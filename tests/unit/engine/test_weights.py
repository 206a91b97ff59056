"""Weights come in checked, by name; the model they make is that of Hugging Face transformers, whatever the config."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.clock import VirtualClock
from headrace.config import EngineSettings
from headrace.engine.block_pool import BlockPool
from headrace.engine.engine import Engine
from headrace.engine.kv_cache import KvCache
from headrace.engine.sequence import NewToken, Sequence
from headrace.engine.torch_runner import TorchRunner, choose_dtype
from headrace.engine.weights.load import load_model
from headrace.errors import ModelError
from headrace.model_store import resolve
from headrace.sampling_params import SamplingParams
from tests.support.audit import assert_idle_pool
from tests.support.hf_reference import reference_greedy, reference_model
from tests.support.tiny_llama import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS, write_tiny_llama

PROMPT = [3 + (7 * i) % 200 for i in range(150)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def change(folder, *, config=None, tensors=None, drop=()):
    """Rewrite parts of a written model; returns its files."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **(config or {})}))
    weights = {**load_file(folder / "model.safetensors"), **(tensors or {})}
    save_file({k: v for k, v in weights.items() if k not in drop}, folder / "model.safetensors")
    return resolve(str(folder))


def biases(parts):
    generator = torch.Generator().manual_seed(1)
    return {
        f"model.layers.{layer}.{name}.bias": torch.randn(size, generator=generator)
        for layer in range(LAYERS)
        for name, size in parts.items()
    }


def greedy(files, num_tokens):
    settings = EngineSettings(num_blocks=32, block_size_tokens=16, max_step_tokens=48)
    cache = KvCache.for_model(files.config, settings, torch.float32)
    runner = TorchRunner(load_model(files, torch.float32), cache)
    engine = Engine(runner, BlockPool(cache.num_blocks, 16), settings, frozenset(), VirtualClock())
    engine.submit(Sequence("s", list(PROMPT), len(PROMPT), SamplingParams(num_tokens, 0.0), b"root"))
    tokens = []
    while len(tokens) < num_tokens:
        tokens += [event.token_id for event in engine.step().events if isinstance(event, NewToken)]
    assert_idle_pool(engine.audit())
    return tokens


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"config": {"rope_scaling": LLAMA3}},
        {"config": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}},
        {"config": {"tie_word_embeddings": True}, "drop": ("lm_head.weight",)},
        {
            "config": {"attention_bias": True, "mlp_bias": True},
            "tensors": biases(
                {
                    "self_attn.q_proj": HEADS * HEAD_DIM,
                    "self_attn.k_proj": KV_HEADS * HEAD_DIM,
                    "self_attn.v_proj": KV_HEADS * HEAD_DIM,
                    "self_attn.o_proj": HIDDEN,
                    "mlp.gate_proj": INTERMEDIATE,
                    "mlp.up_proj": INTERMEDIATE,
                    "mlp.down_proj": HIDDEN,
                }
            ),
        },
    ],
    ids=["plain", "llama3-rope", "linear-rope", "tied", "biases"],
)
def test_greedy_tokens_are_those_of_transformers(tmp_path, variant):
    files = change(write_tiny_llama(tmp_path / "m"), **variant)
    expected, gaps = reference_greedy(reference_model(files), PROMPT, 12)
    assert min(gaps) > 1e-4  # no near-tie: equality is meant
    assert greedy(files, 12) == expected


def test_weights_over_several_files(tmp_path):
    folder = write_tiny_llama(tmp_path / "m")
    whole = greedy(resolve(str(folder)), 8)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    save_file({name: weights[name] for name in names[::2]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: weights[name] for name in names[1::2]}, folder / "model-00002-of-00002.safetensors")
    assert greedy(resolve(str(folder)), 8) == whole


def test_a_missing_tensor_is_named(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    files = change(write_tiny_llama(tmp_path / "m"), drop=(name,))
    with pytest.raises(ModelError, match=name):
        load_model(files, torch.float32)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path):
    name = "model.layers.0.self_attn.k_proj.weight"
    files = change(write_tiny_llama(tmp_path / "m"), tensors={name: torch.zeros(8, HIDDEN)})
    with pytest.raises(ModelError, match=rf"{name}.*\[8, 64\].*\[32, 64\]"):
        load_model(files, torch.float32)


def test_weights_that_are_not_floating_point_are_refused(tmp_path):
    name = "model.norm.weight"
    files = change(write_tiny_llama(tmp_path / "m"), tensors={name: torch.ones(HIDDEN, dtype=torch.int8)})
    with pytest.raises(ModelError, match=name):
        load_model(files, torch.float32)


def test_progress_counts_tensors(tiny_model_files):
    told = []
    load_model(tiny_model_files, torch.bfloat16, lambda taken, total: told.append((taken, total)))
    assert told[-1] == (3 + 9 * LAYERS, 3 + 9 * LAYERS)


def test_dtypes_by_name():
    assert choose_dtype("float32") is torch.float32
    assert choose_dtype("bfloat16") is torch.bfloat16
    assert choose_dtype("auto") in (torch.float32, torch.bfloat16)
