"""Weights come in checked, by name. That they make the right model, `tests/contract/test_model_families.py` shows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.weights.gguf_file import GgufFile
from headrace.engine.weights.load import load_model
from headrace.engine.weights.stored_matrix import StoredMatrix
from headrace.errors import ModelError
from headrace.model_reader import read_gguf
from headrace.model_store import resolve
from tests.support.small_models import gguf_name, random_model, write_gguf
from tests.support.tiny_llama import HIDDEN, INTERMEDIATE, LAYERS, write_tiny_llama


def change(folder, *, tensors=None, drop=()):
    """Rewrite the weights of a written model; returns its files."""
    weights = {**load_file(folder / "model.safetensors"), **(tensors or {})}
    save_file({k: v for k, v in weights.items() if k not in drop}, folder / "model.safetensors")
    return resolve(str(folder))


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


def test_eight_bit_weights_are_refused(tmp_path):
    """They are floating-point, but mean nothing without their scales."""
    name = "model.layers.0.mlp.down_proj.weight"
    tensor = torch.zeros(HIDDEN, INTERMEDIATE, dtype=torch.float8_e4m3fn)
    files = change(write_tiny_llama(tmp_path / "m"), tensors={name: tensor})
    with pytest.raises(ModelError, match=rf"{name}.*float8_e4m3fn"):
        load_model(files, torch.float32)


@pytest.mark.parametrize("quantization", ["none", "auto", "int8"])
def test_progress_counts_tensors(tiny_model_files, quantization):
    told = []

    def progress(taken, total):
        told.append((taken, total))

    load_model(tiny_model_files, torch.bfloat16, progress, quantization=quantization)
    total = 3 + 9 * LAYERS
    assert told == [(taken, total) for taken in range(1, total + 1)]


@pytest.fixture(scope="module")
def llama():
    return random_model("llama")


def error_after_quantizing(weight, quantization):
    """The largest difference that quantization makes, by the library's own account."""
    back = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), quantization), quantization)
    return float(np.abs(back - weight.numpy()).max())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_tensors_come_back_under_their_names(tmp_path, llama, kind):
    quantization = gguf.GGMLQuantizationType[kind]
    files = write_gguf(llama, tmp_path / "m.gguf", quantization)
    file = GgufFile(files.path, files.config, interleaved=True)
    weights = llama.state_dict()
    assert len(file) == len(weights)
    for name, weight in weights.items():
        found = file.read(gguf_name(name, is_gemma=False))
        if isinstance(found, StoredMatrix):
            found = found.dequantize()
        # Rows are quantized one by one, so interleaving them changes nothing.
        tolerance = error_after_quantizing(weight, quantization) if weight.ndim > 1 else 0.0
        torch.testing.assert_close(found.float(), weight, atol=tolerance, rtol=0)


def test_a_tensor_that_a_gguf_lacks_is_named(tmp_path, llama):
    files = write_gguf(llama, tmp_path / "m.gguf", drop="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"no tensor 'blk\.1\.ffn_up\.weight'"):
        load_model(files, torch.float32)


@pytest.mark.parametrize(("part", "size"), [("attn_k", 32), ("attn_q", 64), ("ffn_up", 96)])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_wrong_shape_in_a_gguf_is_named(tmp_path, llama, part, size, kind):
    name = f"blk.0.{part}.weight"
    quantization = gguf.GGMLQuantizationType[kind]
    files = write_gguf(llama, tmp_path / "m.gguf", quantization, shapes={name: (size * 2, 32)})
    with pytest.raises(ModelError, match=rf"{part}.*\[{size * 2}, 32\], expected \[{size}, 64\]"):
        load_model(files, torch.float32)


def patched(path, offset, data):
    """The file with other bytes behind the name of its tensor `blk.0.ffn_up.weight`."""
    name, content = b"blk.0.ffn_up.weight", bytearray(path.read_bytes())
    at = content.index(name) + len(name) + offset
    content[at : at + len(data)] = data
    path.write_bytes(content)
    return read_gguf(path, "patched")


def test_a_quantization_that_is_not_supported_is_named(tmp_path, llama):
    path = write_gguf(llama, tmp_path / "m.gguf").path
    kind = int(gguf.GGMLQuantizationType.IQ2_XXS).to_bytes(4, "little")
    files = patched(path, 4 + 2 * 8, kind)  # behind the number of dimensions, and two of them
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight.*16.*not supported"):
        load_model(files, torch.float32)


def test_rows_that_do_not_fit_their_quantization_are_refused(tmp_path, llama):
    path = write_gguf(llama, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0).path
    files = patched(path, 4, (56).to_bytes(8, "little"))  # no whole number of blocks in a row
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight.*rows must be multiples of 32"):
        load_model(files, torch.float32)
