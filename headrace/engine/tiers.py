"""What the block pool needs from the memory and the files that hold cached blocks below the device.

    device pool ──evicted──▶ host slots ──evicted──▶ files
         ◀──────── copied back when a sequence needs them ────────

A block that comes back stays below as well: when the device evicts it again there is nothing to copy, and whoever reads
the slot at that moment is not disturbed. Implementations: `kv_memory.py` and `disk_tier.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.tier import Tier


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier now (blocks, bytes) and since the start (the rest)."""

    tier: Tier
    blocks: int  # that can be found by name
    bytes: int
    hits: int  # blocks that a sequence took from here
    stores: int
    evictions: int
    dropped: int = 0  # blocks that found no room and were not stored
    checksum_failures: int = 0  # blocks that were not as they had been written, or gone; never used


class BlockMemory(Protocol):
    """Blocks by their numbers: the device's from 0 on, then the host's. Called on the engine's thread. The pool calls
    it for blocks that nobody writes, and whose target nobody reads.
    """

    block_bytes: int
    num_host_blocks: int

    def copy(self, source_id: int, target_id: int) -> None:
        """Complete when it returns."""
        ...

    def read(self, block_id: int) -> bytes: ...

    def write(self, block_id: int, data: bytearray) -> None:
        """`data` has `block_bytes` bytes."""
        ...


class BlockFiles(Protocol):
    """Blocks by their hashes, outside memory. Called on the engine's thread; raises nothing."""

    def __contains__(self, digest: bytes) -> bool: ...

    def digests(self) -> list[bytes]:
        """All that it has."""
        ...

    def put(self, digest: bytes, data: bytes) -> None:
        """Store what is not there yet, or leave it if that can not be done at once."""
        ...

    def take(self, digest: bytes) -> bytearray | None:
        """Its bytes, exactly as they were put; None where it is not there or damaged. It stays stored."""
        ...

    def touch(self, digest: bytes) -> None:
        """It was used just now, elsewhere."""
        ...

    def clear(self) -> None: ...

    def drain_lost(self) -> list[bytes]:
        """Digests that went without a `clear` since the last call."""
        ...

    def stats(self) -> TierStats: ...
