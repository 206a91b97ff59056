"""Stored blocks of GGUF files as values, scales and minima: what the kernels keep of a quantized matrix.

Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gguf
import numpy as np

from headrace.engine.weights.stored_matrix import StoredMatrix


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """weight = scale * (value - zero) + minimum, where zero is 128 (8 bits), 8 (4 bits), or 0 (4 bits with minima)."""

    values: np.ndarray  # uint8 [rows, columns]
    scales: np.ndarray  # float16 [rows, columns / group]
    minima: np.ndarray | None  # float16, as scales
    bits: int  # 4 or 8
    group: int  # 16 or 32


def quantized(matrix: StoredMatrix) -> QuantizedMatrix:
    """The same numbers. Products of scales ("k" kinds) are rounded to fp16. Raises KeyError for a kind not in
    `READERS`.
    """
    rows = len(matrix.blocks)
    values, scales, minima, bits = READERS[matrix.kind](
        matrix.blocks.reshape(-1, gguf.GGML_QUANT_SIZES[_TYPES[matrix.kind]][1])
    )
    values = values.reshape(rows, -1)
    scales = scales.astype(np.float16).reshape(rows, -1)
    if minima is not None:
        minima = minima.astype(np.float16).reshape(rows, -1)
    return QuantizedMatrix(values, scales, minima, bits, values.shape[1] // scales.shape[1])


def stacked(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Rows of several matrices one after the other, all in the widest form that one of them needs."""
    bits, group = max(part.bits for part in parts), min(part.group for part in parts)
    has_minima = any(part.minima is not None for part in parts)
    same = [_widened(part, bits, group, has_minima=has_minima) for part in parts]
    minima = np.concatenate([part.minima for part in same if part.minima is not None]) if has_minima else None
    return replace(
        same[0],
        values=np.concatenate([part.values for part in same]),
        scales=np.concatenate([part.scales for part in same]),
        minima=minima,
    )


def _widened(part: QuantizedMatrix, bits: int, group: int, *, has_minima: bool) -> QuantizedMatrix:
    repeats = part.group // group
    scales = np.repeat(part.scales, repeats, axis=1)
    minima = None if part.minima is None else np.repeat(part.minima, repeats, axis=1)
    values = part.values
    if bits > part.bits:
        values = values + np.uint8(128 if minima is not None else 128 - 8)
    if has_minima and minima is None:
        # 4 bits with minima count from 0, without from -8.
        minima = np.zeros_like(scales) if bits == 8 else (scales * np.float16(-8))
    return QuantizedMatrix(values, scales, minima, bits, group)


# Each takes blocks [n, bytes]; gives values [n, weights], scales and minima [n, weights / group], bits.
_Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None, int]


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    return blocks[:, at : at + 2].copy().view(np.float16)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[n, bytes] -> [n, 2 * bytes]: all low halves, then all high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    bits = blocks[:, at : at + 4].copy().view(np.uint32)
    return ((bits >> np.arange(32, dtype=np.uint32)) & 1).astype(np.uint8) << 4


def _q8_0(blocks: np.ndarray) -> _Parts:
    return blocks[:, 2:] ^ 128, _halves(blocks, 0), None, 8


def _q4_0(blocks: np.ndarray) -> _Parts:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0), None, 4


def _q4_1(blocks: np.ndarray) -> _Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2), 4


def _q5_0(blocks: np.ndarray) -> _Parts:
    return (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)) + 112, _halves(blocks, 0), None, 8


def _q5_1(blocks: np.ndarray) -> _Parts:
    values = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)) + 128
    return values, _halves(blocks, 0), _halves(blocks, 2), 8


def _scales_of_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of the 8 groups of a q4_k or q5_k block, fp32."""
    scale, minimum = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    scales = _halves(blocks, 0).astype(np.float32) * scale.astype(np.float32)
    minima = _halves(blocks, 2).astype(np.float32) * minimum.astype(np.float32)
    return scales, -minima


def _q4_k(blocks: np.ndarray) -> _Parts:
    packed = blocks[:, 16:].reshape(-1, 32)
    return _nibbles(packed).reshape(len(blocks), -1), *_scales_of_k(blocks), 4


def _q5_k(blocks: np.ndarray) -> _Parts:
    low = _nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(len(blocks), 8, 32)
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    values = (low | high << 4) + 128
    return values.reshape(len(blocks), -1), *_scales_of_k(blocks), 8


def _q6_k(blocks: np.ndarray) -> _Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).reshape(len(blocks), 2, 4, 32)
    bits = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32)
    high = (bits >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]) & 3
    values = (low | high << 4).reshape(len(blocks), -1) + (128 - 32)
    scales = blocks[:, 192:208].copy().view(np.int8).astype(np.float32)
    return values, _halves(blocks, 208).astype(np.float32) * scales, None, 8


READERS: dict[str, Callable[[np.ndarray], _Parts]] = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}
_TYPES: dict[str, Any] = {kind: gguf.GGMLQuantizationType[kind.upper()] for kind in READERS}
