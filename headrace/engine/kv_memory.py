"""All memory of a worker that holds KV blocks: the cache that attention reads, and an arena on the host for the blocks
that it evicts. Block ids go on from the one to the other.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from functools import reduce
from operator import xor

import structlog
import torch
import xxhash

from headrace.engine.kv_cache import KvCache
from headrace.engine.native.packing import huge_pages

log = structlog.get_logger()

_POPULATE_BYTES = 64 << 20  # at a time
_MADV_POPULATE_WRITE = 23  # linux/mman.h; Python 3.11 does not name it


class KvMemory:
    """Implements `BlockMemory`. The arena holds as many blocks as fit `host_memory_bytes`."""

    def __init__(self, cache: KvCache, host_memory_bytes: int) -> None:
        self.block_bytes = cache.block_bytes
        self.num_host_blocks = host_memory_bytes // cache.block_bytes
        self._device = cache.tensor.view(cache.num_blocks, -1).view(torch.uint8)
        self._host = _arena(self.num_host_blocks, cache.block_bytes, pinned=cache.tensor.is_cuda)
        self._holds_copies = cache.holds_copies
        num_planes = 2 * cache.tensor.shape[1]
        self._places = [plane * cache.num_all_heads + h for plane in range(num_planes) for h in cache.heads]
        self.host_address = self._host.data_ptr() if self.num_host_blocks else 0

    def populate(self) -> None:
        """Have the system hand out every page before its first use, on a thread that yields to all others.

        A READ into pages that nobody has touched takes ten times as long; in a virtual machine they come at 0.4 GB/s.
        """
        if not self._device.is_cuda:
            threading.Thread(target=self._populate, name="populate", daemon=True).start()

    def _populate(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for arena in (self._device, self._host):
            for start in range(0, arena.nbytes, _POPULATE_BYTES):
                _populate(arena.data_ptr() + start, min(_POPULATE_BYTES, arena.nbytes - start))

    def copy(self, source_id: int, target_id: int) -> None:
        self._block(target_id).copy_(self._block(source_id))

    def read(self, block_id: int) -> bytes:
        return self._block(block_id).cpu().numpy().tobytes()

    def write(self, block_id: int, data: bytearray) -> None:
        self._block(block_id).copy_(torch.frombuffer(data, dtype=torch.uint8))

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """Of each block's bytes: the xxh3-64 of every head's keys and of its values in a layer, each seeded with its
        place in the model, and all of them combined by exclusive or. So those of a worker's ranks, combined again, are
        the same whatever the number of ranks. A copy of another rank's heads counts nothing.

        May be called from any thread; the caller sees to it that nobody writes.
        """
        if self._holds_copies:
            return [0] * len(block_ids)
        return [self._checksum(self._block(block_id).cpu().numpy().data) for block_id in block_ids]

    def _checksum(self, data: memoryview) -> int:
        size = len(data) // len(self._places)
        pieces = enumerate(self._places)
        return reduce(
            xor, (xxhash.xxh3_64_intdigest(data[i * size : (i + 1) * size], place) for i, place in pieces)
        )

    def _block(self, block_id: int) -> torch.Tensor:
        """Its bytes [block_bytes], shared."""
        num_device = len(self._device)
        return self._device[block_id] if block_id < num_device else self._host[block_id - num_device]


def _arena(num_blocks: int, block_bytes: int, *, pinned: bool) -> torch.Tensor:
    """[num_blocks, block_bytes] in bytes."""
    if pinned or not num_blocks:
        return torch.empty((num_blocks, block_bytes), dtype=torch.uint8, pin_memory=pinned)
    memory = huge_pages(num_blocks * block_bytes)  # as in `kv_cache.py`
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, block_bytes)


def _populate(address: int, num_bytes: int) -> None:
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t(address + num_bytes - start)
    if num_bytes and libc.madvise(ctypes.c_void_p(start), size, _MADV_POPULATE_WRITE) != 0:
        # Linux before 5.14: pages come on first touch.
        log.debug("KV memory not populated", reason=os.strerror(ctypes.get_errno()))
