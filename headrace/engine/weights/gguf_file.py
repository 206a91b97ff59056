"""Weights of a GGUF file, as they are stored: views of the file, which is memory-mapped."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

from headrace import gguf_metadata
from headrace.engine.weights.stored_matrix import KINDS, Cut, Kind, Matrix, StoredMatrix
from headrace.engine.weights.tensor_names import GGUF
from headrace.errors import ModelError
from headrace.gguf_metadata import GgufTensor
from headrace.model_config import ModelConfig

_STORED_KINDS: dict[GGMLQuantizationType, Kind] = {type_: kind for kind, type_ in KINDS.items()}
_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class GgufFile:
    def __init__(self, path: Path, config: ModelConfig, *, interleaved: bool) -> None:
        """`interleaved`: the two halves of each query and key head are, in these files."""
        self._metadata = gguf_metadata.read(path)
        # Private, so that it could be written to: torch takes no other memory. And a plain view, since every slice of a
        # memmap object costs as much as a small computation.
        self._data = np.memmap(path, dtype=np.uint8, mode="c").view(np.ndarray)
        self._head_dim = config.head_dim
        self._interleaved = (".attn_q.", ".attn_k.") if interleaved else ()

    def stored_name(self, name: str) -> str:
        return GGUF.of(name)

    def __contains__(self, stored_name: str) -> bool:
        return stored_name in self._metadata.tensors

    def __len__(self) -> int:
        return len(self._metadata.tensors)

    def shape(self, stored_name: str) -> tuple[int, ...]:
        return self._checked(stored_name).shape[::-1]  # the slowest dimension first

    def read(self, stored_name: str, cut: Cut | None = None) -> Matrix:
        """A `cut` of interleaved heads is one of whole heads."""
        matrix = self._stored(self._checked(stored_name))
        if cut is not None:
            matrix = cut.of(matrix)
        is_interleaved = any(part in stored_name for part in self._interleaved)
        return _in_halves(matrix, self._head_dim) if is_interleaved else matrix

    def _checked(self, stored_name: str) -> GgufTensor:
        tensor = self._metadata.tensors[stored_name]
        if not tensor.num_bytes:
            raise ModelError(
                f"tensor {tensor.name!r} has quantization type {tensor.type_id}, which is not supported"
            )
        kind = GGMLQuantizationType(tensor.type_id)
        block_weights, _ = gguf.GGML_QUANT_SIZES[kind]
        if tensor.shape[0] % block_weights:
            raise ModelError(
                f"tensor {tensor.name!r} of shape {list(tensor.shape[::-1])} does not fit its quantization {kind.name}:"
                f" rows must be multiples of {block_weights}"
            )
        return tensor

    def _stored(self, tensor: GgufTensor) -> Matrix:
        raw = self._data[tensor.offset : tensor.offset + tensor.num_bytes]
        kind = GGMLQuantizationType(tensor.type_id)
        shape = tensor.shape[::-1]
        block_weights, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if kind in _FLOATS:
            return torch.from_numpy(raw).view(_FLOATS[kind]).reshape(shape)
        rows = raw.reshape(-1, shape[-1] // block_weights * block_bytes)
        matrix = StoredMatrix(_STORED_KINDS[kind], (len(rows), shape[-1]), rows)
        return matrix if len(shape) == 2 else matrix.dequantize().reshape(shape)


def _in_halves(matrix: Matrix, head_dim: int) -> Matrix:
    """llama.cpp turns neighbouring rows as a pair, Hugging Face rows half a head apart: its converter interleaves them
    (`permute` in llama.cpp's convert_hf_to_gguf.py), and this puts them back.
    """
    order = torch.arange(matrix.shape[0]).unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten()
    return matrix.rows(order) if isinstance(matrix, StoredMatrix) else matrix[order]
