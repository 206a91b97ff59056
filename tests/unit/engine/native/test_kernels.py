"""Products of a matrix and the rows of a step: right for every kind, and a row's bits depend on nothing but the row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.engine.native import library
from headrace.engine.native.packing import PackedMatrix
from headrace.engine.native.quantized import READERS
from headrace.engine.native.threads import Team
from headrace.engine.weights.stored_matrix import StoredMatrix
from tests.support.random_matrices import dense_matrix, stored_matrix

OUTPUTS = 70  # the last panel is not full
ROWS = (1, 2, 3, 7, 16, 33)
MOST_ROWS = 300  # more than go through the panels together
KINDS = ("dense", "dense, odd", *READERS)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _forced(instruction_set: str) -> None: ...


def make_weight(kind: str, dtype: torch.dtype) -> torch.Tensor | StoredMatrix:
    if kind in READERS:
        # Of 32 inputs each: more than are dequantized at a time (8 times 32), and no multiple of that where it can be.
        return stored_matrix(kind, OUTPUTS, 768 if "k" in kind else 416)
    return dense_matrix(OUTPUTS, 95 if "odd" in kind else 416, dtype)


def inputs(columns: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Padded with zeros to a multiple of 32, as the kernels want them."""
    a = torch.zeros(num_rows, -(-columns // 32) * 32, dtype=dtype)
    a[:, :columns] = dense_matrix(num_rows, columns, seed=1)
    return a


def product(packed: PackedMatrix, a: torch.Tensor, team: Team) -> torch.Tensor:
    kernels: Any = library.load()
    out = torch.full((len(a) + 1, packed.struct.rows), 12345.0)
    is_f32 = a.dtype == torch.float32
    assert kernels.product(packed.struct, a.data_ptr(), len(a), is_f32, out.data_ptr(), team.handle) == 0
    assert (out[len(a)] == 12345.0).all()  # nothing is written behind the last row
    return out[: len(a)]


def dense_of(weight: torch.Tensor | StoredMatrix) -> torch.Tensor:
    return weight.dequantize() if isinstance(weight, StoredMatrix) else weight.float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_torch(kind, dtype):
    """In bf16, of weights and inputs rounded to it."""
    weight = make_weight(kind, dtype)
    dense = dense_of(weight)
    packed, team = PackedMatrix(weight, dtype), Team(1)
    columns = dense.shape[1]
    # By what rounds: fp32 sums alone (one after the other, without fused operations), each scale to fp16, or each
    # weight to bf16.
    rounding = 2.0**-18 if "dense" in kind else 2.0**-10 if dtype == torch.float32 else 2.0**-7
    for num_rows in ROWS:
        a = inputs(columns, num_rows, dtype)
        found = product(packed, a, team).double()
        expected = a[:, :columns].double() @ dense.double().T
        assert expected.std() > 5  # the comparison means something
        torch.testing.assert_close(found, expected, atol=rounding * columns**0.5 * 3, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_batch_and_on_any_number_of_threads(kind, dtype):
    weight = make_weight(kind, dtype)
    packed, one, two = PackedMatrix(weight, dtype), Team(1), Team(2)
    a = inputs(dense_of(weight).shape[1], MOST_ROWS, dtype)
    expected = product(packed, a, one)
    assert torch.equal(product(packed, a, two), expected)
    for row in (0, 1, 2, 31, 32, 127, 255, 256, MOST_ROWS - 1):
        assert torch.equal(product(packed, a[row : row + 1], one)[0], expected[row]), row
    for num_rows in (*ROWS, 129):
        for team in (one, two):
            assert torch.equal(product(packed, a[-num_rows:], team), expected[-num_rows:]), num_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dense", "q8_0", "q4_k"])
def test_bias_is_added_once(kind, dtype):
    weight, bias = make_weight(kind, dtype), dense_matrix(1, OUTPUTS, seed=2)[0]
    a = inputs(dense_of(weight).shape[1], 5, dtype)
    without = product(PackedMatrix(weight, dtype), a, Team(1))
    found = product(PackedMatrix(weight, dtype, bias), a, Team(1))
    torch.testing.assert_close(found, without + bias, atol=1e-5, rtol=1e-6)
