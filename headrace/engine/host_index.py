"""Which slots of host memory hold which block, and which of those goes first. Used by the block pool only.

The counterpart of `prefix_tree.py` for the host: without links, since the device evicts the end of a prefix before its
beginning, so that the least recently used slot is an end, too.
"""

from __future__ import annotations

from collections import OrderedDict


class HostIndex:
    """Every operation takes constant time."""

    def __init__(self) -> None:
        self._slots: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def find(self, digest: bytes) -> int | None:
        return self._slots.get(digest)

    def insert(self, digest: bytes, block_id: int) -> None:
        """Name a slot, which is idle and the most recently used one."""
        assert digest not in self._slots
        self._slots[digest] = block_id
        self._idle[digest] = None

    def mark_used(self, digest: bytes) -> None:
        """An idle slot is read."""
        del self._idle[digest]

    def mark_idle(self, digest: bytes) -> None:
        """Nobody reads it any more: it is the most recently used idle one."""
        assert digest not in self._idle
        self._idle[digest] = None

    def touch(self, digest: bytes) -> None:
        """Was used just now, elsewhere."""
        if digest in self._idle:
            self._idle.move_to_end(digest)

    def evict(self) -> tuple[int, bytes]:
        """Remove the idle slot that was not used for longest; its block id and digest. Needs `num_idle` over 0."""
        digest, _ = self._idle.popitem(last=False)
        return self._slots.pop(digest), digest

    def block_names(self) -> dict[int, bytes]:
        """Digest by block id."""
        return {block_id: digest for digest, block_id in self._slots.items()}
