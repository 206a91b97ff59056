"""The memory that holds KV: one tensor, allocated at start, read and written by attention, exchanged block by block.

    [num_blocks, layers, 2 (key, value), kv_heads, block_size, row]

Block-major: all layers of a block are contiguous, so a block is one piece of memory, at `address + id * block_bytes`.
A row is one head's key or value of one token: head_dim numbers in the dtype that is computed with, or quantized:

    "fp8"   head_dim bytes: e4m3, saturating at 448
    "int8"  head_dim bytes, then their scale in fp32: the largest magnitude / 127

So a block carries all that it takes to read it. Behind the last block lies one more that is in no pool: scratch, for
measuring the way to other caches. Letters in tensor names: T tokens, K KV heads, D head dimension, C
positions of n blocks (n * block_size).
"""

from __future__ import annotations

import math

import torch

from headrace.config import EngineSettings
from headrace.engine.native.packing import huge_pages
from headrace.engine.shard import WHOLE, Shard
from headrace.errors import InvalidRequest
from headrace.model_config import ModelConfig

_MIN_BLOCKS = 2
_FP8_LIMIT = 448.0
_SCALE_BYTES = 4


class KvCache:
    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size_tokens: int,
        dtype: torch.dtype,
        quantization: str = "none",
        shard: Shard = WHOLE,
    ) -> None:
        """`dtype` is what attention computes with; `quantization` is "none", "int8" or "fp8"."""
        self.heads = shard.kv_heads(config.num_kv_heads)  # that are here …
        self.num_all_heads = config.num_kv_heads  # … of so many
        self.holds_copies = shard.holds_copies(config.num_kv_heads)
        config = shard.config(config)
        stored, width = _row(config.head_dim, dtype, quantization)
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size_tokens, width)
        # Page-aligned zeros, handed out on first touch or by `KvMemory.populate`. In large pages, which the kernel
        # finds faster when a peer reads them: that makes a READ 1.7 times as fast.
        num_values, scratch = math.prod(shape), math.prod(shape[1:])
        memory = huge_pages((num_values + scratch) * stored.itemsize)
        self.tensor = torch.frombuffer(memory, dtype=stored, count=num_values).view(shape)
        self.dtype = dtype
        self.quantization = quantization
        self.head_dim = config.head_dim
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self.block_bytes = self.tensor[0].nbytes
        self.row_bytes = width * stored.itemsize
        self.address = self.tensor.data_ptr()
        self.dtype_name = str(dtype).removeprefix("torch.") if quantization == "none" else quantization

    @classmethod
    def for_model(
        cls, config: ModelConfig, settings: EngineSettings, dtype: torch.dtype, shard: Shard = WHOLE
    ) -> KvCache:
        """As many blocks as the settings say, or as their memory holds. Raises InvalidRequest for too few.

        `config` is of the whole model, and the settings' memory that of all ranks together.
        """
        stored, width = _row(config.head_dim, dtype, settings.kv_quantization)
        rows_per_token = config.num_layers * 2 * len(shard.kv_heads(config.num_kv_heads)) * shard.size
        block_bytes = rows_per_token * settings.block_size_tokens * width * stored.itemsize
        num_blocks = settings.num_blocks or settings.kv_memory_bytes // block_bytes
        if num_blocks < _MIN_BLOCKS:
            raise InvalidRequest(
                "engine.num_blocks" if settings.num_blocks else "engine.kv_memory_bytes",
                settings.num_blocks or settings.kv_memory_bytes,
                f"must give at least {_MIN_BLOCKS} blocks of {block_bytes} bytes",
            )
        return cls(config, num_blocks, settings.block_size_tokens, dtype, settings.kv_quantization, shard)

    def write(
        self,
        layer: int,
        block_ids_T: torch.Tensor,
        offsets_T: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
    ) -> None:
        """Put each token's key and value at its offset in its block."""
        rows = self._encoded(torch.stack((k_TKD, v_TKD), dim=1))
        self.tensor[:, layer][block_ids_T, :, :, offsets_T] = rows

    def gather(self, layer: int, block_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Keys and values [2, K, C, D] of the blocks, in their order: a copy, into `out` where given."""
        blocks = self.tensor[:, layer].permute(1, 2, 0, 3, 4)  # [2, K, num_blocks, block_size, row]
        if self.quantization != "none":
            values = self._decoded(torch.index_select(blocks, 2, block_ids)).flatten(2, 3)
            return values if out is None else out.copy_(values)
        if out is not None:
            out = out.unflatten(2, (len(block_ids), -1))
        return torch.index_select(blocks, 2, block_ids, out=out).flatten(2, 3)

    def _encoded(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] in the dtype that is computed with -> [..., row]."""
        if self.quantization == "none":
            return x
        wide = x.float()
        if self.quantization == "fp8":
            return wide.clamp(-_FP8_LIMIT, _FP8_LIMIT).to(torch.float8_e4m3fn).view(torch.uint8)
        largest = wide.abs().amax(-1, keepdim=True)
        inverse = torch.where(largest > 0, 127.0 / largest, torch.zeros_like(largest))
        values = (wide * inverse).round().to(torch.int8)
        return torch.cat((values, (largest / 127.0).view(torch.int8)), dim=-1)

    def _decoded(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., row] -> [..., D] in the dtype that is computed with."""
        if self.quantization == "fp8":
            return rows.view(torch.float8_e4m3fn).float().to(self.dtype)
        scale = rows[..., self.head_dim :].contiguous().view(torch.float32)
        return (rows[..., : self.head_dim].float() * scale).to(self.dtype)


def _row(head_dim: int, dtype: torch.dtype, quantization: str) -> tuple[torch.dtype, int]:
    """In which type a row is stored, and how many of them it has."""
    if quantization == "int8":
        return torch.int8, head_dim + _SCALE_BYTES
    if quantization == "fp8":
        return torch.uint8, head_dim
    return dtype, head_dim
