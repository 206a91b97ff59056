"""Matrices in the order in which the kernels read them (src/layout.h). Called when a model is loaded.

Quantized matrices stay quantized: 8 or 4 bits for a weight, with fp16 scales (and minima) of 16 or 32 weights.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headrace.engine.native import library
from headrace.engine.native.quantized import READERS, QuantizedMatrix, quantized, stacked
from headrace.engine.weights.stored_matrix import Matrix, StoredMatrix

_PANEL_ROWS = 32
_PIECE_ROWS = 4096  # packed at a time: bounds the memory that unpacked values take

Weight = Matrix | tuple[Matrix, ...]
# What is packed: dense [rows, columns] in fp32 or bf16, or quantized.
Packable = torch.Tensor | QuantizedMatrix


class PackedMatrix:
    """Holds the memory that `struct` points into."""

    def __init__(
        self,
        weight: Weight | QuantizedMatrix,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        order: np.ndarray | None = None,
    ) -> None:
        """`dtype` (fp32 or bf16) is that of what is not quantized. Row i of the result is row `order[i]` of the weight
        and bias, and zeros where that is -1.
        """
        kernels: Any = library.load()
        pieces = _pieces(weight, dtype, order)
        num_rows, first = next(pieces)
        self.struct = _struct(first, num_rows)
        self.num_bytes: int = kernels.packed_bytes(self.struct)
        self._memory = huge_pages(self.num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.struct.data = address
        self._bias = None if bias is None else _padded(bias if order is None else _taken(bias, order))
        if self._bias is not None:
            self.struct.bias = self._bias.ctypes.data
        _pack(kernels, first, address)
        for _, piece in pieces:
            address += kernels.packed_bytes(_struct(first, _PIECE_ROWS))
            _pack(kernels, piece, address)

    def row(self, index: int) -> np.ndarray:
        """One row as the kernels see it, fp32."""
        out = np.empty(self.struct.columns, dtype=np.float32)
        kernels: Any = library.load()
        kernels.unpack_row(self.struct, index, out.ctypes.data)
        return out


def interleaved(size: int) -> np.ndarray:
    """The order of a gate's and an up projection's `size` rows each, stacked: 16 of the one, 16 of the other, in turn.
    One panel then has what belongs together. Short by a part of 16, each is filled up with -1.
    """
    rows = np.arange(-(-size // 16) * 16).reshape(-1, 16)
    gate = np.where(rows < size, rows, -1)
    up = np.where(rows < size, rows + size, -1)
    return np.concatenate((gate, up), axis=1).ravel()


def _pieces(
    weight: Weight | QuantizedMatrix, dtype: torch.dtype, order: np.ndarray | None
) -> Iterator[tuple[int, Packable]]:
    """The whole number of rows, and the next of them."""
    if isinstance(weight, tuple):
        weight = _joined(weight, dtype)
    if isinstance(weight, StoredMatrix) and weight.kind not in READERS:
        weight = weight.dequantize(dtype)
    if order is None:
        rows = len(weight.values) if isinstance(weight, QuantizedMatrix) else weight.shape[0]
        order = np.arange(rows)
    for first in range(0, len(order), _PIECE_ROWS):
        yield len(order), _rows(weight, dtype, order[first : first + _PIECE_ROWS])


def _joined(parts: tuple[Matrix, ...], dtype: torch.dtype) -> torch.Tensor | QuantizedMatrix:
    stored = [part for part in parts if isinstance(part, StoredMatrix) and part.kind in READERS]
    if len(stored) == len(parts):
        return stacked([quantized(part) for part in stored])
    return torch.cat([p.dequantize(dtype) if isinstance(p, StoredMatrix) else p.to(dtype) for p in parts])


def _rows(weight: Matrix | QuantizedMatrix, dtype: torch.dtype, order: np.ndarray) -> Packable:
    if isinstance(weight, torch.Tensor):
        return _taken(weight, order).to(dtype)
    taken = np.maximum(order, 0)
    if isinstance(weight, StoredMatrix):
        piece = quantized(weight.rows(torch.from_numpy(taken)))
    else:
        minima = None if weight.minima is None else weight.minima[taken]
        piece = replace(weight, values=weight.values[taken], scales=weight.scales[taken], minima=minima)
    piece.scales[order < 0] = 0.0
    if piece.minima is not None:
        piece.minima[order < 0] = 0.0
    return piece


def _taken(tensor: torch.Tensor, order: np.ndarray) -> torch.Tensor:
    taken = tensor[torch.from_numpy(np.maximum(order, 0))]
    taken[torch.from_numpy(order < 0)] = 0
    return taken


def _struct(piece: Packable, num_rows: int) -> library.Matrix:
    if isinstance(piece, torch.Tensor):
        kind = library.F32 if piece.dtype == torch.float32 else library.BF16
        return library.Matrix(kind, num_rows, piece.shape[1], 32, 0, None, None)
    kind = library.INT8 if piece.bits == 8 else library.INT4
    columns, has_minima = piece.values.shape[1], piece.minima is not None
    return library.Matrix(kind, num_rows, columns, piece.group, has_minima, None, None)


def _pack(kernels: Any, piece: Packable, address: int) -> None:
    if isinstance(piece, torch.Tensor):
        pack = kernels.pack_f32 if piece.dtype == torch.float32 else kernels.pack_bf16
        piece = piece.contiguous()
        pack(_struct(piece, len(piece)), piece.data_ptr(), address)
        return
    values, scales = np.ascontiguousarray(piece.values), np.ascontiguousarray(piece.scales)
    minima = None if piece.minima is None else np.ascontiguousarray(piece.minima)
    pointer = None if minima is None else minima.ctypes.data
    struct = _struct(piece, len(values))
    kernels.pack_quantized(struct, values.ctypes.data, scales.ctypes.data, pointer, address)


def _padded(bias: torch.Tensor) -> np.ndarray:
    padded = np.zeros(-(-len(bias) // _PANEL_ROWS) * _PANEL_ROWS, dtype=np.float32)
    padded[: len(bias)] = bias.float().numpy()
    return padded


def huge_pages(num_bytes: int) -> mmap.mmap:
    """Memory of zeros, in pages of 2 MiB where the system has them: reading weights then misses no translation."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
