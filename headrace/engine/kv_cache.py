"""The memory that holds KV: one tensor, allocated at start, read and written by attention, exchanged block by block.

    [num_blocks, layers, 2 (key, value), kv_heads, block_size, head_dim]

Block-major: all layers of a block are contiguous, so a block is one piece of memory, at `address + id * block_bytes`.
Letters in tensor names: T tokens, K KV heads, D head dimension, C positions of n blocks (n * block_size).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
import xxhash

from headrace.config import EngineSettings
from headrace.errors import InvalidRequest
from headrace.model_config import ModelConfig

_MIN_BLOCKS = 2


class KvCache:
    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size_tokens: int, dtype: torch.dtype
    ) -> None:
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size_tokens, config.head_dim)
        # Pages of zeros that the system hands out on first touch: page-aligned, and no start-up time per gigabyte.
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self.block_bytes = self.tensor[0].nbytes
        self.address = self.tensor.data_ptr()
        self.dtype_name = str(dtype).removeprefix("torch.")

    @classmethod
    def for_model(cls, config: ModelConfig, settings: EngineSettings, dtype: torch.dtype) -> KvCache:
        """As many blocks as the settings say, or as their memory holds. Raises InvalidRequest for too few."""
        values_per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim
        block_bytes = values_per_token * settings.block_size_tokens * dtype.itemsize
        num_blocks = settings.num_blocks or settings.kv_memory_bytes // block_bytes
        if num_blocks < _MIN_BLOCKS:
            raise InvalidRequest(
                "engine.num_blocks" if settings.num_blocks else "engine.kv_memory_bytes",
                settings.num_blocks or settings.kv_memory_bytes,
                f"must give at least {_MIN_BLOCKS} blocks of {block_bytes} bytes",
            )
        return cls(config, num_blocks, settings.block_size_tokens, dtype)

    def write(
        self,
        layer: int,
        block_ids_T: torch.Tensor,
        offsets_T: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
    ) -> None:
        """Put each token's key and value at its offset in its block."""
        self.tensor[:, layer][block_ids_T, :, :, offsets_T] = torch.stack((k_TKD, v_TKD), dim=1)

    def gather(self, layer: int, block_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Keys and values [2, K, C, D] of the blocks, in their order: a copy, into `out` where given."""
        blocks = self.tensor[:, layer].permute(1, 2, 0, 3, 4)  # [2, K, num_blocks, block_size, D]
        if out is not None:
            out = out.unflatten(2, (len(block_ids), -1))
        return torch.index_select(blocks, 2, block_ids, out=out).flatten(2, 3)

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """xxh3-64 of each block's bytes. May be called from any thread; the caller sees to it that nobody writes."""
        flat = self.tensor.view(self.num_blocks, -1).view(torch.uint8).numpy()
        return [xxhash.xxh3_64_intdigest(flat[block_id]) for block_id in block_ids]
