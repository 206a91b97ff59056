"""Which worker holds which block, for the longest-prefix question of every request. Owned by the view.

    block hash ──▶ bit set of workers (an int; bit = the worker's slot)

Block hashes are chained: a worker that holds block k of a prompt but not block k - 1 can use neither. So only
the contiguous run from the first block counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PrefixIndex:
    """Not thread-safe: used on one event loop."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}  # no entry is 0
        self._blocks: dict[str, set[bytes]] = {}  # by worker id: what to take out when it goes
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}  # the inverse of _slots

    def __len__(self) -> int:
        """Number of different blocks."""
        return len(self._holders)

    def blocks(self, worker_id: str) -> frozenset[bytes]:
        return frozenset(self._blocks.get(worker_id, ()))

    def store(self, worker_id: str, hashes: Iterable[bytes]) -> None:
        bit = 1 << self._slot(worker_id)
        own = self._blocks[worker_id]
        for block in hashes:
            own.add(block)
            self._holders[block] = self._holders.get(block, 0) | bit

    def remove(self, worker_id: str, hashes: Iterable[bytes]) -> None:
        """Hashes that the worker does not hold are passed over."""
        own = self._blocks.get(worker_id)
        if own is None:
            return
        bit = 1 << self._slots[worker_id]
        for block in hashes:
            if block not in own:
                continue
            own.discard(block)
            left = self._holders[block] & ~bit
            if left:
                self._holders[block] = left
            else:
                del self._holders[block]

    def replace(self, worker_id: str, hashes: frozenset[bytes]) -> None:
        """The worker holds exactly these. Costs what differs, beside one pass over the set."""
        own = self.blocks(worker_id)
        self.remove(worker_id, own - hashes)
        self.store(worker_id, hashes - own)

    def forget(self, worker_id: str) -> None:
        self.remove(worker_id, self.blocks(worker_id))
        self._blocks.pop(worker_id, None)
        slot = self._slots.pop(worker_id, None)
        if slot is not None:
            del self._names[slot]

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """For each worker that holds the first block: how many blocks from the first on it holds without a hole.

        One dictionary lookup per hash, and none behind the longest match.
        """
        matched: dict[str, int] = {}
        following = self._holders.get(hashes[0], 0) if hashes else 0
        length = 0
        while following:
            length += 1
            holders = self._holders.get(hashes[length], 0) if length < len(hashes) else 0
            for slot in _bits(following & ~holders):
                matched[self._names[slot]] = length
            following &= holders
        return matched

    def _slot(self, worker_id: str) -> int:
        slot = self._slots.get(worker_id)
        if slot is None:
            slot = next(free for free in range(len(self._names) + 1) if free not in self._names)
            self._slots[worker_id], self._names[slot] = slot, worker_id
            self._blocks[worker_id] = set()
        return slot


def _bits(mask: int) -> Iterable[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
