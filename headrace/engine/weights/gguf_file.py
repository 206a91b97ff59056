"""Weights of a GGUF file of the Llama architecture, dequantized tensor by tensor."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import torch

from headrace import gguf_metadata
from headrace.errors import ModelError
from headrace.gguf_metadata import GgufTensor
from headrace.model_config import ModelConfig

_PART = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


class GgufFile:
    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._metadata = gguf_metadata.read(path)
        # A plain view: every slice of a memmap object costs as much as a small computation.
        self._data = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        self._config = config

    def __contains__(self, name: str) -> bool:
        return _gguf_name(name) in self._metadata.tensors

    def __len__(self) -> int:
        return len(self._metadata.tensors)

    def read(self, name: str) -> torch.Tensor:
        tensor = torch.from_numpy(self._dequantized(self._metadata.tensors[_gguf_name(name)]))
        if ".q_proj." in name:
            return _in_halves(tensor, self._config.num_heads)
        if ".k_proj." in name:
            return _in_halves(tensor, self._config.num_kv_heads)
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


def _gguf_name(name: str) -> str:
    in_layer = _IN_LAYER.fullmatch(name)
    if in_layer is None:
        return _TOP[name]
    layer, part, kind = in_layer.groups()
    return f"blk.{layer}.{_PART[part]}.{kind}"


def _in_halves(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp turns neighbouring rows as a pair, Hugging Face rows half a head apart: its converter interleaves them
    (`permute` in llama.cpp's convert_hf_to_gguf.py), and this puts them back.
    """
    if tensor.shape[0] % (2 * num_heads):
        return tensor  # of a wrong shape: whoever takes it says so
    return tensor.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
