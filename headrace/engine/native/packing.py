"""Matrices in the order in which the kernels read them (src/layout.h). Called when a model is loaded.

Quantized matrices stay quantized: 8 or 4 bits for a weight, with fp16 scales (and minima) of 16 or 32 weights.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headrace.engine.native import library
from headrace.engine.native.library import Matrix

PANEL_ROWS = 32


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """weight = scale * (value - zero) + minimum, where zero is 128 (8 bits), 8 (4 bits), or 0 (4 bits with minima)."""

    values: np.ndarray  # uint8 [rows, columns]
    scales: np.ndarray  # float16 [rows, columns / group]
    minima: np.ndarray | None  # float16, as scales
    bits: int  # 4 or 8
    group: int  # 16 or 32


class PackedMatrix:
    """Holds the memory that `struct` points into."""

    def __init__(
        self,
        weight: torch.Tensor | QuantizedMatrix,
        bias: torch.Tensor | None = None,
        order: np.ndarray | None = None,
    ) -> None:
        """`weight` is [rows, columns] in fp32 or bf16, or quantized. Row i of the result is row `order[i]`, and zeros
        where that is -1.
        """
        kernels: Any = library.load()
        if order is not None:
            weight = _reordered(weight, order)
            bias = None if bias is None else _taken(bias, order)
        self._bias = None if bias is None else _padded_bias(bias)
        if isinstance(weight, torch.Tensor):
            kind = library.F32 if weight.dtype == torch.float32 else library.BF16
            self.struct = Matrix(kind, *weight.shape, 32, 0, None, None)
        else:
            kind = library.INT8 if weight.bits == 8 else library.INT4
            has_minima = weight.minima is not None
            self.struct = Matrix(kind, *weight.values.shape, weight.group, has_minima, None, None)
        self.num_bytes: int = kernels.packed_bytes(self.struct)
        self._memory = _huge_pages(self.num_bytes)
        self.struct.data = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if self._bias is not None:
            self.struct.bias = self._bias.ctypes.data
        self._fill(kernels, weight)

    def _fill(self, kernels: Any, weight: torch.Tensor | QuantizedMatrix) -> None:
        to = self.struct.data
        if isinstance(weight, torch.Tensor):
            pack = kernels.pack_f32 if weight.dtype == torch.float32 else kernels.pack_bf16
            pack(self.struct, weight.contiguous().data_ptr(), to)
            return
        values, scales = np.ascontiguousarray(weight.values), np.ascontiguousarray(weight.scales)
        minima = None if weight.minima is None else np.ascontiguousarray(weight.minima)
        pointer = None if minima is None else minima.ctypes.data
        kernels.pack_quantized(self.struct, values.ctypes.data, scales.ctypes.data, pointer, to)

    def row(self, index: int) -> np.ndarray:
        """One row as the kernels see it, fp32."""
        out = np.empty(self.struct.columns, dtype=np.float32)
        kernels: Any = library.load()
        kernels.unpack_row(self.struct, index, out.ctypes.data)
        return out


def interleaved(size: int) -> np.ndarray:
    """The order of a gate's and an up projection's `size` rows each, stacked: 16 of the one, 16 of the other, in turn, so
    that one panel has what belongs together. Short by a part of 16, each is filled up with -1.
    """
    rows = np.arange(-(-size // 16) * 16).reshape(-1, 16)
    gate = np.where(rows < size, rows, -1)
    up = np.where(rows < size, rows + size, -1)
    return np.concatenate((gate, up), axis=1).ravel()


def _reordered(weight: torch.Tensor | QuantizedMatrix, order: np.ndarray) -> torch.Tensor | QuantizedMatrix:
    if isinstance(weight, torch.Tensor):
        return _taken(weight, order)
    rows = np.maximum(order, 0)
    scales, minima = weight.scales[rows], None if weight.minima is None else weight.minima[rows]
    scales[order < 0] = 0.0
    if minima is not None:
        minima[order < 0] = 0.0
    return replace(weight, values=weight.values[rows], scales=scales, minima=minima)


def _taken(tensor: torch.Tensor, order: np.ndarray) -> torch.Tensor:
    taken = tensor[torch.from_numpy(np.maximum(order, 0))]
    taken[torch.from_numpy(order < 0)] = 0
    return taken


def _padded_bias(bias: torch.Tensor) -> np.ndarray:
    padded = np.zeros(-(-len(bias) // PANEL_ROWS) * PANEL_ROWS, dtype=np.float32)
    padded[: len(bias)] = bias.float().numpy()
    return padded


def _huge_pages(num_bytes: int) -> mmap.mmap:
    """Memory of zeros, in pages of 2 MiB where the system has them: reading weights then misses no translation."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
