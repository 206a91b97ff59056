"""Quantized matrices: every kind against a decoder written out from ggml's block layouts, weight by weight."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from headrace.engine.layers.embedding import Embedding
from headrace.engine.layers.linear import Linear
from headrace.engine.weights.gguf_file import GgufFile
from headrace.engine.weights.load import load_model
from headrace.engine.weights.stored_matrix import KINDS, StoredMatrix, joined, quantize
from headrace.model_config import ModelConfig
from tests.support.small_models import random_model, write_folder, write_gguf

ROWS = 5


def half(block: bytes, offset: int) -> float:
    return struct.unpack_from("<e", block, offset)[0]


# Each of these is the comment or loop of ggml (ggml-common.h, dequantize_row_* in ggml-quants.c) in plain Python.
def q8_0(b: bytes) -> list[float]:
    return [half(b, 0) * q for q in struct.unpack_from("<32b", b, 2)]


def nibbles(b: bytes) -> list[int]:
    """Of 16 bytes: the low halves, then the high ones."""
    return [byte & 15 for byte in b] + [byte >> 4 for byte in b]


def q4_0(b: bytes) -> list[float]:
    return [half(b, 0) * (q - 8) for q in nibbles(b[2:18])]


def q4_1(b: bytes) -> list[float]:
    return [half(b, 0) * q + half(b, 2) for q in nibbles(b[4:20])]


def fifth_bits(b: bytes) -> list[int]:
    (bits,) = struct.unpack("<I", b)
    return [((bits >> i) & 1) << 4 for i in range(32)]


def q5_0(b: bytes) -> list[float]:
    return [half(b, 0) * ((q | h) - 16) for q, h in zip(nibbles(b[6:22]), fifth_bits(b[2:6]), strict=True)]


def q5_1(b: bytes) -> list[float]:
    quants = zip(nibbles(b[8:24]), fifth_bits(b[4:8]), strict=True)
    return [half(b, 0) * (q | h) + half(b, 2) for q, h in quants]


def scale_and_min(j: int, q: bytes) -> tuple[int, int]:
    """`get_scale_min_k4`: eight scales and minima of six bits in twelve bytes."""
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | (q[j - 4] >> 6 << 4), (q[j + 4] >> 4) | (q[j] >> 6 << 4)


def q4_k(b: bytes) -> list[float]:
    d, dmin, scales, qs = half(b, 0), half(b, 2), b[4:16], b[16:144]
    values = []
    for group in range(8):
        scale, minimum = scale_and_min(group, scales)
        for byte in qs[group // 2 * 32 : group // 2 * 32 + 32]:
            values.append(d * scale * (byte >> 4 if group % 2 else byte & 15) - dmin * minimum)
    return values


def q5_k(b: bytes) -> list[float]:
    d, dmin, scales, high, qs = half(b, 0), half(b, 2), b[4:16], b[16:48], b[48:176]
    values = []
    for group in range(8):
        scale, minimum = scale_and_min(group, scales)
        for i, byte in enumerate(qs[group // 2 * 32 : group // 2 * 32 + 32]):
            quant = (byte >> 4 if group % 2 else byte & 15) + (16 if high[i] >> group & 1 else 0)
            values.append(d * scale * quant - dmin * minimum)
    return values


def q6_k(b: bytes) -> list[float]:
    low, high, scales, d = b[:128], b[128:192], struct.unpack_from("<16b", b, 192), half(b, 208)
    values = [0.0] * 256
    for n in range(2):
        for i in range(32):
            for part in range(4):
                byte = low[64 * n + i + 32 * (part % 2)]
                quant = (byte & 15 if part < 2 else byte >> 4) | (high[32 * n + i] >> 2 * part & 3) << 4
                values[128 * n + 32 * part + i] = d * scales[8 * n + 2 * part + i // 16] * (quant - 32)
    return values


DECODERS = {
    "q8_0": (q8_0, (0,)),  # the decoder, and where a block has its scales in half precision
    "q4_0": (q4_0, (0,)),
    "q4_1": (q4_1, (0, 2)),
    "q5_0": (q5_0, (0,)),
    "q5_1": (q5_1, (0, 2)),
    "q4_k": (q4_k, (0, 2)),
    "q5_k": (q5_k, (0, 2)),
    "q6_k": (q6_k, (208,)),
}


def random_blocks(kind: str, rows: int = ROWS, num_weights: int = 512) -> np.ndarray:
    """Bytes [rows, …] of random weights, with scales of both signs."""
    block_weights, block_bytes = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (rows, num_weights // block_weights, block_bytes), np.uint8)
    for at in DECODERS[kind][1]:
        scales = rng.normal(0, 0.02, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[:, :, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def written_out(kind: str, blocks: np.ndarray) -> torch.Tensor:
    block_bytes = gguf.GGML_QUANT_SIZES[KINDS[kind]][1]
    decode = DECODERS[kind][0]
    return torch.tensor(
        [
            [
                w
                for at in range(0, len(row), block_bytes)
                for w in decode(row[at : at + block_bytes].tobytes())
            ]
            for row in blocks
        ]
    )


def stored(kind: str, rows: int = ROWS, num_weights: int = 512) -> StoredMatrix:
    return StoredMatrix(kind, (rows, num_weights), random_blocks(kind, rows, num_weights))


@pytest.mark.parametrize("kind", DECODERS)
def test_blocks_mean_what_ggml_says(kind):
    matrix = stored(kind)
    found = matrix.dequantize()
    assert (found.dtype, tuple(found.shape)) == (torch.float32, matrix.shape)
    torch.testing.assert_close(found, written_out(kind, matrix.blocks), atol=0, rtol=1e-6)


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("part", ["ffn_down", "attn_q"])
def test_gguf_keeps_what_is_quantized_as_it_is(tmp_path, kind, part):
    """Of queries and keys the rows are put back in order, and nothing else."""
    blocks = random_blocks(kind, rows=8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor(f"blk.0.{part}.weight", blocks, raw_dtype=KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = ModelConfig("llama", 1, 512, 8, 2, 2, 4, 8, 8, 1e4, 1e-5, tie_word_embeddings=True)
    matrix = GgufFile(Path(tmp_path / "m.gguf"), config, interleaved=True).read(f"blk.0.{part}.weight")
    assert (matrix.kind, matrix.shape) == (kind, (8, 512))
    order = [0, 2, 1, 3, 4, 6, 5, 7] if part == "attn_q" else list(range(8))
    assert np.array_equal(matrix.blocks, blocks[order])


def test_rows_of_one_kind_become_one_matrix_and_others_stay_apart():
    a, b, c = stored("q4_k"), stored("q4_k", rows=3), stored("q6_k")
    together = joined([a, b])
    assert isinstance(together, StoredMatrix)
    assert together.shape == (8, 512)
    assert torch.equal(together.dequantize(), torch.cat((a.dequantize(), b.dequantize())))
    assert joined([a, b, c]) == (a, b, c)
    assert joined([c]) is c
    dense = torch.zeros(2, 512)
    assert joined([a, dense]) == (a, dense)
    assert torch.equal(joined([dense, dense + 1]), torch.cat((dense, dense + 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_compute_with_the_weights_that_are_stored(dtype):
    parts = (stored("q4_k"), stored("q6_k"), torch.randn(3, 512).to(dtype))
    dense = torch.cat([(p.dequantize() if isinstance(p, StoredMatrix) else p).to(dtype) for p in parts])
    x, bias = torch.randn(4, 512).to(dtype), torch.randn(13).to(dtype)
    assert torch.equal(Linear(parts, bias)(x), Linear(dense, bias)(x))
    ids = torch.tensor([3, 0, 3])
    rows = Embedding(parts[0], dtype, 2.0)(ids)
    assert torch.equal(rows, parts[0].dequantize().to(dtype)[ids] * 2)


@pytest.mark.parametrize(("kind", "num_steps"), [("q8_0", 254), ("q4_1", 15)])
def test_rounding_goes_to_the_nearest(kind, num_steps):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 96, generator=generator) * torch.logspace(-3, 1, 40)[:, None]
    weight[7] = 0.0
    matrix = quantize(weight, kind)
    assert (matrix.kind, matrix.shape) == (kind, (40, 96))
    groups = weight.unflatten(1, (3, 32))
    lowest, highest = groups.amin(-1), groups.amax(-1)
    if kind == "q8_0":
        highest = groups.abs().amax(-1)
        lowest = -highest
    # Half a step, and what rounding scale and offset to half precision adds.
    bound = (highest - lowest) / num_steps * 0.5 + groups.abs().amax(-1) * 2**-10 + 1e-7
    error = (matrix.dequantize() - weight).unflatten(1, (3, 32)).abs().amax(-1)
    assert (error <= bound).all()
    assert not matrix.dequantize()[7].any()


@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
def test_rounding_what_is_round_already_changes_nothing(kind):
    once = quantize(torch.randn(4, 64, generator=torch.Generator().manual_seed(1)), kind).dequantize()
    twice = quantize(once, kind).dequantize()
    torch.testing.assert_close(twice, once, atol=0, rtol=1e-3)  # a scale can move by its last bit


def kinds(model) -> dict[str, set[str]]:
    """What the model's matrices are, by field."""

    def kind(weight) -> set[str]:
        parts = weight if isinstance(weight, tuple) else (weight,)
        return {part.kind if isinstance(part, StoredMatrix) else str(part.dtype) for part in parts}

    fields = ("qkv", "output", "gate_up", "down")
    found = {
        name: set().union(*(kind(getattr(layer, name).weight) for layer in model.layers)) for name in fields
    }
    return found | {"embedding": kind(model.embedding.weight), "head": kind(model.head.weight)}


MATRICES = ("qkv", "output", "gate_up", "down")


def is_mapped(path: Path, address: int) -> bool:
    """Whether the address lies in a mapping of the file."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [entry[0].split("-") for entry in maps if entry[-1] == str(path)]
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_file_is_kept_as_it_is_or_not(tmp_path, name):
    files = write_gguf(random_model(name), tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q5_0)
    dense, kept = (load_model(files, torch.bfloat16, quantization=form) for form in ("none", "auto"))
    assert set().union(*kinds(dense).values()) == {"torch.bfloat16"}
    assert set().union(*kinds(kept).values()) == {"q5_0"}
    assert is_mapped(files.path, kept.layers[0].down.weight.blocks.ctypes.data)
    for ours, theirs in zip(kept.layers, dense.layers, strict=True):
        for field in MATRICES:
            found = getattr(ours, field).dense(torch.bfloat16)
            assert torch.equal(found, getattr(theirs, field).weight), field
    ids = torch.tensor([5, 1, 5])
    assert torch.equal(kept.embedding(ids), dense.embedding(ids))


@pytest.mark.parametrize(("quantization", "kind"), [("int8", "q8_0"), ("int4", "q4_1")])
def test_any_model_can_be_rounded(tmp_path, quantization, kind):
    files = write_folder(random_model("qwen2"), tmp_path / "m")
    found = kinds(load_model(files, torch.bfloat16, quantization=quantization))
    assert found == {**{name: {kind} for name in MATRICES}, "embedding": {"q8_0"}, "head": {"q8_0"}}


def test_rows_that_do_not_divide_into_groups_stay_as_they_are(tmp_path):
    model = random_model("llama, wide heads, tied")
    files = write_folder(model, tmp_path / "m")
    assert kinds(load_model(files, torch.float32, quantization="int8"))["output"] == {"q8_0"}
    narrow = random_model("llama, narrow")
    files = write_folder(narrow, tmp_path / "n")
    found = kinds(load_model(files, torch.float32, quantization="int8"))
    assert (found["output"], found["down"]) == ({"torch.float32"}, {"q8_0"})


def test_weights_in_safetensors_are_mapped_and_not_copied(tmp_path):
    """As far as they are in the dtype that is wanted, and are not put together with others."""
    files = write_folder(random_model("llama"), tmp_path / "m")
    model = load_model(files, torch.float32)
    assert is_mapped(files.path / "model.safetensors", model.layers[0].down.weight.data_ptr())


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("BF16", torch.bfloat16)])
def test_weights_in_gguf_are_mapped_and_not_copied(tmp_path, kind, dtype):
    files = write_gguf(random_model("llama"), tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind])
    assert is_mapped(files.path, load_model(files, dtype).layers[0].down.weight.data_ptr())
