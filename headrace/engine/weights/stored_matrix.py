"""A matrix that stays quantized in memory, block by block as GGUF files have it.

    a row of the matrix      | block: 32 or 256 weights with their scale | block | block | …

Made by the readers of files and by `quantize`; held by `Linear` and `Embedding`, which dequantize what they use, and
taken over by kernels that compute with the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

Kind = Literal["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]

KINDS: dict[Kind, GGMLQuantizationType] = {
    "q8_0": GGMLQuantizationType.Q8_0,
    "q4_0": GGMLQuantizationType.Q4_0,
    "q4_1": GGMLQuantizationType.Q4_1,
    "q5_0": GGMLQuantizationType.Q5_0,
    "q5_1": GGMLQuantizationType.Q5_1,
    "q2_k": GGMLQuantizationType.Q2_K,
    "q3_k": GGMLQuantizationType.Q3_K,
    "q4_k": GGMLQuantizationType.Q4_K,
    "q5_k": GGMLQuantizationType.Q5_K,
    "q6_k": GGMLQuantizationType.Q6_K,
}

_PIECE_WEIGHTS = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class StoredMatrix:
    kind: Kind
    shape: tuple[int, int]  # (out, in)
    blocks: np.ndarray  # uint8 [out, bytes per row]; may be a view of a file that is mapped read-only

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[out, in], computed in fp32."""
        weight = torch.empty(self.shape, dtype=dtype)
        # Piece by piece: of the largest matrices, which are embeddings, fp32 may be several times what is wanted.
        step = max(1, _PIECE_WEIGHTS // self.shape[1])
        for first in range(0, self.shape[0], step):
            values = gguf.quants.dequantize(self.blocks[first : first + step], KINDS[self.kind])
            weight[first : first + step] = torch.from_numpy(values)
        return weight

    def rows(self, ids: torch.Tensor | slice) -> StoredMatrix:
        """Some of the rows, in this order: a copy, of a slice a view."""
        blocks = self.blocks[ids if isinstance(ids, slice) else ids.numpy()]
        return StoredMatrix(self.kind, (len(blocks), self.shape[1]), blocks)

    def columns(self, part: range) -> StoredMatrix | torch.Tensor:
        """Some of the columns: a view where blocks begin and end with them, else dequantized, in fp32."""
        block_weights, block_bytes = gguf.GGML_QUANT_SIZES[KINDS[self.kind]]
        if part.start % block_weights or part.stop % block_weights:
            return self.dequantize()[:, part.start : part.stop]
        first, last = (end // block_weights * block_bytes for end in (part.start, part.stop))
        return StoredMatrix(self.kind, (self.shape[0], len(part)), self.blocks[:, first:last])


Matrix = torch.Tensor | StoredMatrix


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a tensor: of its rows (axis 0), or of its columns (axis 1)."""

    axis: Literal[0, 1]
    part: range

    def of(self, matrix: Matrix) -> Matrix:
        """A view, if it can be."""
        some = slice(self.part.start, self.part.stop)
        if isinstance(matrix, StoredMatrix):
            return matrix.columns(self.part) if self.axis else matrix.rows(some)
        return matrix[:, some] if self.axis else matrix[some]


def joined(parts: Sequence[Matrix]) -> Matrix | tuple[Matrix, ...]:
    """The rows of several matrices one after the other, as one matrix if they are stored alike, else as they are."""
    if len(parts) == 1:
        return parts[0]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(tensors) == len(parts):
        return torch.cat(tensors)
    stored = [part for part in parts if isinstance(part, StoredMatrix)]
    if len(stored) == len(parts) and len({part.kind for part in stored}) == 1:
        blocks = np.concatenate([part.blocks for part in stored])
        return StoredMatrix(stored[0].kind, (len(blocks), stored[0].shape[1]), blocks)
    return tuple(parts)


def quantize(weight: torch.Tensor, kind: Literal["q8_0", "q4_1"]) -> StoredMatrix:
    """Round a matrix [out, in] to the nearest, in groups of 32 along `in`, which must be a multiple of that.

    "q8_0": 8 bits and a scale. "q4_1": 4 bits, a scale and an offset.
    """
    values = weight.float().contiguous().numpy()
    blocks = gguf.quants.quantize(values, KINDS[kind]).reshape(len(values), -1)
    return StoredMatrix(kind, (values.shape[0], values.shape[1]), blocks)
