"""What of a rank's memory its peers may read: the device's pool, then the host's slots."""

from __future__ import annotations

from headrace.engine.kv_cache import KvCache
from headrace.engine.kv_memory import KvMemory
from kv_transfer.transport import BlockRegion


def kv_regions(cache: KvCache, memory: KvMemory) -> list[BlockRegion]:
    pool = BlockRegion(cache.address, cache.num_blocks, cache.block_bytes, num_scratch=1)
    if not memory.num_host_blocks:
        return [pool]
    return [pool, BlockRegion(memory.host_address, memory.num_host_blocks, cache.block_bytes)]
