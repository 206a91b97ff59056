"""Matrices of random weights, dense or as GGUF stores them, and what their weights are."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from headrace.engine.weights.stored_matrix import KINDS, Kind, StoredMatrix

# Where a kind's block has fp16 numbers: all else may be any bytes.
_HALVES: dict[Kind, tuple[int, ...]] = {
    "q8_0": (0,),
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
}


def dense_matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stored_matrix(kind: Kind, rows: int, columns: int, seed: int = 0) -> StoredMatrix:
    """Random bytes: every value, scale and minimum that the kind can have, the weights about as large as 1."""
    weights, num_bytes = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    random = np.random.default_rng(seed)
    blocks = random.integers(256, size=(rows * columns // weights, num_bytes), dtype=np.uint8)
    for at in _HALVES[kind]:
        halves = random.uniform(-1, 1, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
    blocks = blocks.reshape(rows, -1)
    size = np.abs(gguf.quants.dequantize(blocks, KINDS[kind])).mean()
    parts = blocks.reshape(-1, num_bytes)
    for at in _HALVES[kind]:
        halves = parts[:, at : at + 2].copy().view(np.float16) / size
        parts[:, at : at + 2] = halves.astype(np.float16).view(np.uint8)
    return StoredMatrix(kind, (rows, columns), blocks)
