"""Weights of a GGUF file, dequantized tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch

from headrace import gguf_metadata
from headrace.engine.weights.tensor_names import GGUF
from headrace.errors import ModelError
from headrace.gguf_metadata import GgufTensor
from headrace.model_config import ModelConfig


class GgufFile:
    def __init__(self, path: Path, config: ModelConfig, *, interleaved: bool) -> None:
        """`interleaved`: the two halves of each query and key head are, in these files."""
        self._metadata = gguf_metadata.read(path)
        # A plain view: every slice of a memmap object costs as much as a small computation.
        self._data = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        self._num_heads = (
            {".attn_q.": config.num_heads, ".attn_k.": config.num_kv_heads} if interleaved else {}
        )

    def stored_name(self, name: str) -> str:
        return GGUF.of(name)

    def __contains__(self, stored_name: str) -> bool:
        return stored_name in self._metadata.tensors

    def __len__(self) -> int:
        return len(self._metadata.tensors)

    def read(self, stored_name: str) -> torch.Tensor:
        tensor = torch.from_numpy(self._dequantized(self._metadata.tensors[stored_name]))
        for part, num_heads in self._num_heads.items():
            if part in stored_name:
                return _in_halves(tensor, num_heads)
        return tensor

    def _dequantized(self, tensor: GgufTensor) -> np.ndarray:
        """fp32, with the slowest dimension first."""
        if not tensor.num_bytes:
            raise ModelError(
                f"tensor {tensor.name!r} has quantization type {tensor.type_id}, which is not supported"
            )
        raw = self._data[tensor.offset : tensor.offset + tensor.num_bytes]
        try:
            rows = raw.reshape(*reversed(tensor.shape[1:]), -1)
            values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(tensor.type_id))
        except ValueError as error:
            raise ModelError(
                f"tensor {tensor.name!r} of shape {list(reversed(tensor.shape))} does not fit its quantization: {error}"
            ) from None
        return np.array(values, dtype=np.float32)  # its own copy: the file is mapped read-only


def _in_halves(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp turns neighbouring rows as a pair, Hugging Face rows half a head apart: its converter interleaves them
    (`permute` in llama.cpp's convert_hf_to_gguf.py), and this puts them back.
    """
    if tensor.shape[0] % (2 * num_heads):
        return tensor  # of a wrong shape: whoever takes it says so
    return tensor.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
