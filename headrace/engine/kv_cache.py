"""The memory that holds KV: one tensor, allocated at start, read and written by attention, exchanged block by block.

    [num_blocks, layers, 2 (key, value), kv_heads, block_size, head_dim]

Block-major: all layers of a block are contiguous, so a block is one piece of memory, at `address + id * block_bytes`.
"""

from __future__ import annotations

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
        self.tensor = torch.zeros(shape, dtype=dtype)  # touched here, so that no request pays for page faults
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

    def keys_and_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one layer, each [num_blocks, kv_heads, block_size, head_dim]."""
        return self.tensor[:, layer, 0], self.tensor[:, layer, 1]

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """xxh3-64 of each block's bytes. May be called from any thread; the caller sees to it that nobody writes."""
        flat = self.tensor.view(self.num_blocks, -1).view(torch.uint8).numpy()
        return [xxhash.xxh3_64_intdigest(flat[block_id]) for block_id in block_ids]
