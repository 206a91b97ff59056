"""Which worker holds which block, for the longest-prefix question of every request. Owned by the view.

    block hash ──▶ bit set of workers (an int; two bits for each worker's slot: holds it, holds it on the device)

Block hashes are chained: a worker that holds block k of a prompt but not block k - 1 can use neither. So only
the contiguous run from the first block counts. What a worker holds below its device counts as well, since it comes back
by copy; how much of the run is on the device is told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.tier import Tier


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt a worker holds, in blocks from the first on, without a hole."""

    num_blocks: int  # in any tier
    num_device_blocks: int  # of them the first so many are on the device


class PrefixIndex:
    """Not thread-safe: used on one event loop."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}  # no entry is 0
        self._blocks: dict[str, dict[bytes, Tier]] = {}  # by worker id: what to take out when it goes
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}  # the inverse of _slots

    def __len__(self) -> int:
        """Number of different blocks."""
        return len(self._holders)

    def blocks(self, worker_id: str) -> dict[bytes, Tier]:
        return dict(self._blocks.get(worker_id, {}))

    def store(self, worker_id: str, blocks: Mapping[bytes, Tier]) -> None:
        """The worker holds these now, each in that tier and in no nearer one."""
        slot = self._slot(worker_id)
        own = self._blocks[worker_id]
        for block, tier in blocks.items():
            own[block] = tier
            others = self._holders.get(block, 0) & ~_bits_of(slot, Tier.DEVICE)
            self._holders[block] = others | _bits_of(slot, tier)

    def remove(self, worker_id: str, hashes: Iterable[bytes]) -> None:
        """Hashes that the worker does not hold are passed over."""
        own = self._blocks.get(worker_id)
        if own is None:
            return
        bits = _bits_of(self._slots[worker_id], Tier.DEVICE)
        for block in hashes:
            if own.pop(block, None) is None:
                continue
            left = self._holders[block] & ~bits
            if left:
                self._holders[block] = left
            else:
                del self._holders[block]

    def replace(self, worker_id: str, blocks: Mapping[bytes, Tier]) -> None:
        """The worker holds exactly these. Costs what differs, beside one pass over them."""
        own = self.blocks(worker_id)
        self.remove(worker_id, own.keys() - blocks.keys())
        self.store(worker_id, {block: tier for block, tier in blocks.items() if own.get(block) is not tier})

    def forget(self, worker_id: str) -> None:
        self.remove(worker_id, self.blocks(worker_id))
        self._blocks.pop(worker_id, None)
        slot = self._slots.pop(worker_id, None)
        if slot is not None:
            del self._names[slot]

    def match(self, hashes: Sequence[bytes]) -> dict[str, Match]:
        """For each worker that holds the first block. One lookup per hash, none behind the longest match."""
        lengths: dict[int, int] = {}  # by bit: in how many blocks from the first on it is set
        following = self._holders.get(hashes[0], 0) if hashes else 0
        length = 0
        while following:
            length += 1
            holders = self._holders.get(hashes[length], 0) if length < len(hashes) else 0
            for bit in _bits(following & ~holders):
                lengths[bit] = length
            following &= holders
        return {
            self._names[bit // 2]: Match(length, lengths.get(bit + 1, 0))
            for bit, length in lengths.items()
            if bit % 2 == 0
        }

    def _slot(self, worker_id: str) -> int:
        slot = self._slots.get(worker_id)
        if slot is None:
            slot = next(free for free in range(len(self._names) + 1) if free not in self._names)
            self._slots[worker_id], self._names[slot] = slot, worker_id
            self._blocks[worker_id] = {}
        return slot


def _bits_of(slot: int, tier: Tier) -> int:
    """Of a worker that holds a block in that tier."""
    return (0b11 if tier is Tier.DEVICE else 0b01) << 2 * slot


def _bits(mask: int) -> Iterable[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
