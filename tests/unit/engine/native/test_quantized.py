"""Stored blocks taken apart are the weights that gguf reads from them; stacked ones still are."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.engine.native.quantized import READERS, QuantizedMatrix, quantized, stacked
from tests.support.random_matrices import stored_matrix

ROWS, COLUMNS = 5, 512
HALF = 2.0**-11  # the relative error of rounding to fp16
FORMS = {  # bits, group, has minima
    "q8_0": (8, 32, False),
    "q4_0": (4, 32, False),
    "q4_1": (4, 32, True),
    "q5_0": (8, 32, False),
    "q5_1": (8, 32, True),
    "q4_k": (4, 32, True),
    "q5_k": (8, 32, True),
    "q6_k": (8, 16, False),
}


def terms(matrix: QuantizedMatrix) -> tuple[np.ndarray, np.ndarray]:
    """What a weight is the sum of: scaled value, minimum."""
    zero = 128 if matrix.bits == 8 else 0 if matrix.minima is not None else 8
    scales = matrix.scales.astype(np.float64).repeat(matrix.group, axis=1)
    minima = np.zeros_like(matrix.scales) if matrix.minima is None else matrix.minima
    scaled = scales * (matrix.values.astype(np.float64) - zero)
    return scaled, minima.astype(np.float64).repeat(matrix.group, axis=1)


def assert_same(found: QuantizedMatrix, expected: np.ndarray) -> None:
    scaled, minima = terms(found)
    bound = HALF * (np.abs(scaled) + np.abs(minima)) + 1e-6
    assert (np.abs(scaled + minima - expected) <= bound).all()


def test_all_kinds_that_the_kernels_compute_with_are_here():
    assert set(FORMS) == set(READERS)


@pytest.mark.parametrize("kind", READERS)
def test_weights_are_those_of_gguf(kind):
    matrix = stored_matrix(kind, ROWS, COLUMNS)
    found = quantized(matrix)
    assert (found.bits, found.group, found.minima is not None) == FORMS[kind]
    assert found.values.max() < 2**found.bits
    assert_same(found, matrix.dequantize().numpy())


def test_a_kind_without_reader_is_refused():
    with pytest.raises(KeyError):
        quantized(stored_matrix("q3_k", 1, 256))


@pytest.mark.parametrize("second", READERS)
@pytest.mark.parametrize("first", READERS)
def test_stacked_matrices_keep_their_weights(first, second):
    parts = [stored_matrix(kind, ROWS, COLUMNS, seed) for seed, kind in enumerate((first, second))]
    found = stacked([quantized(part) for part in parts])
    forms = [FORMS[first], FORMS[second]]
    assert found.bits == max(bits for bits, _, _ in forms)
    assert found.group == min(group for _, group, _ in forms)
    assert_same(found, np.concatenate([part.dequantize().numpy() for part in parts]))
