"""A packed matrix gives back the rows it was made of, whatever its kind, size and order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.engine.native.packing import PackedMatrix, interleaved
from headrace.engine.native.quantized import READERS
from headrace.engine.weights.stored_matrix import KINDS, StoredMatrix
from tests.support.random_matrices import dense_matrix, stored_matrix

DTYPES = (torch.float32, torch.bfloat16)
SIZES = [(1, 1), (31, 33), (32, 32), (33, 64), (70, 95)]


@pytest.fixture(autouse=True)
def _forced(instruction_set: str) -> None: ...


def rows_of(packed: PackedMatrix, num_rows: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([packed.row(index) for index in range(num_rows)]))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Each weight to fp16 rounding of the largest one in its row."""
    bound = expected.abs().amax(1, keepdim=True) * 2.0**-9
    assert ((found - expected).abs() <= bound).all()
    assert expected.abs().mean() > 10 * bound.mean()  # the comparison means something


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_dense_rows_come_back_bit_for_bit(dtype, rows, columns):
    weight = dense_matrix(rows, columns, dtype)
    packed = PackedMatrix(weight, dtype)
    assert torch.equal(rows_of(packed, rows), weight.float())
    padded = -(-rows // 32) * 32 * -(-columns // 32) * 32
    assert packed.num_bytes == padded * dtype.itemsize


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("rows", [1, 33, 70])
def test_quantized_rows_are_those_of_gguf(kind, rows, dtype):
    matrix = stored_matrix(kind, rows, 512)
    packed = PackedMatrix(matrix, dtype)
    assert_close(rows_of(packed, rows), matrix.dequantize())
    bits = 8 * packed.num_bytes / (-(-rows // 32) * 32 * 512)
    assert bits < (10 if "8" in kind or "5" in kind or "6" in kind else 6)  # it is not kept in another form


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(READERS)))
def test_other_kinds_are_dequantized(kind, dtype):
    matrix = stored_matrix(kind, 33, 256)
    assert torch.equal(rows_of(PackedMatrix(matrix, dtype), 33), matrix.dequantize(dtype).float())


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
def test_columns_that_end_within_a_record_of_two_steps(kind):
    matrix = stored_matrix(kind, 3, 96)
    assert_close(rows_of(PackedMatrix(matrix, torch.float32), 3), matrix.dequantize())


@pytest.mark.parametrize("kind", ["f32", "bf16", *READERS])
def test_rows_come_in_the_order_asked_for(kind):
    """And are zeros where none is, in the bias too."""
    order = np.array([*range(40, 3, -3), -1, -1, 7, 7, *range(8), -1])
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    weight = dense_matrix(41, 256, dtype) if kind in ("f32", "bf16") else stored_matrix(kind, 41, 256)
    dense = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
    before = dense.clone()
    bias = torch.arange(1.0, 42.0)
    packed = PackedMatrix(weight, dtype, bias, order)
    found = rows_of(packed, len(order))
    assert not found[order < 0].any()
    assert_close(found[order >= 0], dense.float()[order[order >= 0]])
    padded = packed._bias
    assert padded is not None
    assert len(padded) == 32
    assert padded[: len(order)].tolist() == [0 if i < 0 else i + 1 for i in order]
    assert not padded[len(order) :].any()
    again = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
    assert torch.equal(before, again)  # the file's own memory is left as it was


MIXES = [
    ("q4_k", "q4_k", "q6_k"),  # what Q4_K_M makes of queries, keys and values
    ("q4_0", "q4_1"),
    ("q8_0", "q4_0", "q5_1"),
    ("q8_0", "f32"),
    ("bf16", "f32"),
    ("q2_k", "q4_k"),
]


@pytest.mark.parametrize("order", [None, np.array([0, -1, 34, 20, 66, 1])], ids=["as they are", "in order"])
@pytest.mark.parametrize("kinds", MIXES, ids=" ".join)
def test_parts_of_unlike_kinds_are_one_matrix(kinds, order):
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16}
    parts = [
        dense_matrix(33, 256, dtypes[kind], seed) if kind in dtypes else stored_matrix(kind, 33, 256, seed)
        for seed, kind in enumerate(kinds)
    ]
    dense = torch.cat([p.dequantize() if isinstance(p, StoredMatrix) else p.float() for p in parts])
    order = np.minimum(order, len(dense) - 1) if order is not None else None
    packed = PackedMatrix(tuple(parts), torch.float32, order=order)
    expected = dense if order is None else dense[np.maximum(order, 0)]
    found = rows_of(packed, len(expected))
    here = slice(None) if order is None else order >= 0
    assert_close(found[here], expected[here])
    assert order is None or not found[order < 0].any()


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0", "q4_1", "q6_k"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_matrices_of_several_pieces(kind, shuffled):
    rows = 2 * 4096 + 33
    dtype = torch.float32 if kind == "f32" else torch.bfloat16
    columns = 256 if kind == "q6_k" else 32
    weight = dense_matrix(rows, columns, dtype) if "f" in kind else stored_matrix(kind, rows, columns)
    order = np.random.default_rng(0).permutation(rows) if shuffled else None
    packed = PackedMatrix(weight, dtype, order=order)
    dense = weight.float() if isinstance(weight, torch.Tensor) else weight.dequantize()
    assert packed.struct.rows == rows
    assert_close(rows_of(packed, rows), dense if order is None else dense[order])


@pytest.mark.parametrize("size", [1, 16, 31, 40])
def test_interleaving_puts_together_what_is_multiplied(size):
    order = interleaved(size)
    panels = order.reshape(-1, 2, 16)
    gate, up = panels[:, 0].ravel(), panels[:, 1].ravel()
    assert gate[:size].tolist() == list(range(size))
    assert up[:size].tolist() == list(range(size, 2 * size))
    assert (gate[size:] == -1).all()
    assert (up[size:] == -1).all()
