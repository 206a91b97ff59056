"""Weights come in checked, by name; the model they make is that of Hugging Face transformers, whatever the config."""

from __future__ import annotations

import json
from dataclasses import replace

import gguf
import numpy as np
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
from headrace.engine.weights.gguf_file import GgufFile
from headrace.engine.weights.load import load_model
from headrace.engine.weights.stored_matrix import StoredMatrix
from headrace.errors import ModelError
from headrace.model_store import resolve
from headrace.sampling_params import SamplingParams
from tests.support.audit import assert_idle_pool
from tests.support.hf_reference import reference_greedy, reference_model
from tests.support.tiny_llama import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    tiny_weights,
    write_tiny_llama,
)

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


def test_eight_bit_weights_are_refused(tmp_path):
    """They are floating-point, but mean nothing without their scales."""
    name = "model.layers.0.mlp.down_proj.weight"
    tensor = torch.zeros(HIDDEN, INTERMEDIATE, dtype=torch.float8_e4m3fn)
    files = change(write_tiny_llama(tmp_path / "m"), tensors={name: tensor})
    with pytest.raises(ModelError, match=rf"{name}.*float8_e4m3fn"):
        load_model(files, torch.float32)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name):
    name = name.replace("model.layers.", "blk.")
    for theirs, ours in GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def interleaved(weight, num_heads):
    """`permute` of llama.cpp's converter."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, quantization=gguf.GGMLQuantizationType.F32, *, drop=(), shapes=None):
    """The tiny model as llama.cpp's converter writes it. `shapes`: other shapes for tensors, by GGUF name."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, tensor in tiny_weights(0).items():
        values = tensor.numpy()
        if ".q_proj" in name or ".k_proj" in name:
            values = interleaved(values, HEADS if ".q_proj" in name else KV_HEADS)
        name = gguf_name(name)
        if name in drop:
            continue
        values = values.reshape((shapes or {}).get(name, values.shape))
        kind = quantization if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def error_after_quantizing(weight, quantization):
    """The largest difference that quantization makes, by the library's own account."""
    back = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), quantization), quantization)
    return float(np.abs(back - weight.numpy()).max())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_tensors_come_back_under_their_names(tmp_path, tiny_model_files, kind):
    quantization = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "m.gguf", quantization)
    file = GgufFile(path, tiny_model_files.config, interleaved=True)
    weights = tiny_weights(0)
    assert len(file) == len(weights)
    for name, weight in weights.items():
        found = file.read(gguf_name(name))
        if isinstance(found, StoredMatrix):
            found = found.dequantize()
        # Rows are quantized one by one, so interleaving them changes nothing.
        tolerance = error_after_quantizing(weight, quantization) if weight.ndim > 1 else 0.0
        torch.testing.assert_close(found.float(), weight, atol=tolerance, rtol=0)


def gguf_files(tiny_model_files, path):
    return replace(tiny_model_files, path=path, format="gguf")


def test_gguf_gives_the_same_model_as_safetensors(tmp_path, tiny_model_files):
    files = gguf_files(tiny_model_files, write_gguf(tmp_path / "m.gguf"))
    assert greedy(files, 12) == greedy(tiny_model_files, 12)


def test_a_tensor_that_a_gguf_lacks_is_named(tmp_path, tiny_model_files):
    files = gguf_files(tiny_model_files, write_gguf(tmp_path / "m.gguf", drop=("blk.1.ffn_up.weight",)))
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight"):
        load_model(files, torch.float32)


@pytest.mark.parametrize("name", ["attn_k", "attn_q", "ffn_up"])
def test_a_wrong_shape_in_a_gguf_is_named(tmp_path, tiny_model_files, name):
    size = {"attn_k": KV_HEADS * HEAD_DIM, "attn_q": HEADS * HEAD_DIM, "ffn_up": INTERMEDIATE}[name]
    shapes = {f"blk.0.{name}.weight": (size * 2, HIDDEN // 2)}
    files = gguf_files(tiny_model_files, write_gguf(tmp_path / "m.gguf", shapes=shapes))
    with pytest.raises(ModelError, match=rf"\[{size * 2}, {HIDDEN // 2}\], expected \[{size}, {HIDDEN}\]"):
        load_model(files, torch.float32)


def test_a_quantization_that_is_not_supported_is_named(tmp_path, tiny_model_files):
    path = write_gguf(tmp_path / "m.gguf")
    name = b"blk.0.ffn_up.weight"
    data = bytearray(path.read_bytes())
    at = data.index(name) + len(name) + 4 + 2 * 8  # number of dimensions, then two of them
    data[at : at + 4] = int(gguf.GGMLQuantizationType.IQ2_XXS).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight.*16.*not supported"):
        load_model(gguf_files(tiny_model_files, path), torch.float32)


def test_rows_that_do_not_fit_their_quantization_are_refused(tmp_path, tiny_model_files):
    path = write_gguf(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    name = b"blk.0.ffn_up.weight"
    data = bytearray(path.read_bytes())
    at = data.index(name) + len(name) + 4
    data[at : at + 8] = (HIDDEN - 8).to_bytes(8, "little")  # no whole number of blocks in a row
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight"):
        load_model(gguf_files(tiny_model_files, path), torch.float32)


def test_dtypes_by_name():
    assert choose_dtype("float32") is torch.float32
    assert choose_dtype("bfloat16") is torch.bfloat16
    assert choose_dtype("auto") in (torch.float32, torch.bfloat16)
