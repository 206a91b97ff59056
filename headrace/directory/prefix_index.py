"""Which worker holds which block, for the longest-prefix question of every request. Owned by the view.

    block hash ──▶ number of a set of holders ──▶ bit set (an int; three bits for each worker's place, see `_bits_of`)

Blocks of one prefix have the same holders, so there are few different sets, and each is kept once. What is left for
a block is its digest and a number, in flat arrays. Digests are whole: nothing here is approximate.

Block hashes are chained: a worker that holds block k of a prompt but not block k - 1 can use neither. So only
the contiguous run from the first block counts. What a worker holds below its device counts as well, since it comes back
by copy; how much of the run is on the device is told apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.directory.block_table import BlockTable, Slots, Values, words_of
from headrace.tier import Tier

DEFAULT_MAX_BLOCKS = 1 << 22
_FIRST_LOOKUP = 128  # blocks; then four times as many each time: a short match looks at few of a long prompt
_BITS = 3  # of a worker: holds it, on the device, on disk
_SET_BYTES = 200  # in two lists and a dictionary, with three integers
_HOLDS, _ON_DEVICE, _ON_DISK = 0b001, 0b010, 0b100


class Match(NamedTuple):
    """How much of a prompt a worker holds, in blocks from the first on, without a hole."""

    num_blocks: int  # in any tier, assumed ones included
    num_device_blocks: int  # of them the first so many are on the device
    num_assumed_blocks: int = (
        0  # of `num_blocks` the last so many were sent there and not reported by the worker yet
    )


class PrefixIndex:
    """Not thread-safe: used on one event loop.

    With `max_blocks` different blocks it is full: blocks that are new to it are passed over and counted, holders of
    known ones are still noted, and what workers remove makes room. Matches are then right, and may be too short.
    """

    def __init__(self, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        self.num_dropped = 0  # blocks that found no room, each time
        self.num_looked_up = 0  # hashes, by all matches
        self.num_entries = 0  # pairs of a block and a worker that holds it
        self._max_blocks = max_blocks
        self._table = BlockTable()  # its values are numbers of sets
        self._sets = _HolderSets()
        self._num_held: Counter[str] = Counter()  # blocks by worker id
        self._places: dict[str, int] = {}  # of workers in the bit sets
        self._names: dict[int, str] = {}  # the inverse of _places

    def __len__(self) -> int:
        """Number of different blocks."""
        return len(self._table)

    @property
    def num_bytes(self) -> int:
        return self._table.num_bytes + self._sets.num_bytes

    def blocks(self, worker_id: str) -> dict[bytes, Tier]:
        """Costs a pass over the index, as `replace` and `forget` do."""
        if not self._num_held[worker_id]:
            return {}
        place = self._places[worker_id]
        slots, numbers = self._held(place)
        tiers = {number: _tier(self._sets.bits[number] >> _BITS * place) for number in set(numbers.tolist())}
        return dict(zip(self._table.digests(slots), map(tiers.__getitem__, numbers.tolist()), strict=True))

    def store(self, worker_id: str, blocks: Mapping[bytes, Tier]) -> None:
        """The worker holds these now, each in that tier and in no nearer one."""
        place = self._place(worker_id)
        if not blocks:
            return
        words = words_of(blocks)
        tiers = np.fromiter(blocks.values(), np.uint8, len(blocks))
        slots = self._table.find(words)
        clear = ~_bits_of(place, _HOLDS | _ON_DEVICE | _ON_DISK)
        for tier in set(tiers.tolist()):
            bits = _bits_of(place, _TIER_BITS[tier])
            known = slots[(tiers == tier) & (slots >= 0)]
            self._change(worker_id, known, lambda holders, bits=bits: (holders & clear) | bits)
        unknown = (slots < 0).nonzero()[0][: self._max_blocks - len(self._table)]
        self.num_dropped += int((slots < 0).sum()) - len(unknown)
        numbers = np.zeros(len(unknown), np.int32)
        for tier, count in Counter(tiers[unknown].tolist()).items():
            number = self._sets.take(_bits_of(place, _TIER_BITS[tier]), count)
            numbers[tiers[unknown] == tier] = number
        self._table.put(words[unknown], numbers)
        self._count(worker_id, len(unknown))

    def remove(self, worker_id: str, hashes: Iterable[bytes]) -> None:
        """Hashes that the worker does not hold are passed over."""
        if self._num_held[worker_id]:
            slots = self._table.find(words_of(dict.fromkeys(hashes)))
            self._take_out(worker_id, slots[slots >= 0])

    def replace(self, worker_id: str, blocks: Mapping[bytes, Tier]) -> None:
        """The worker holds exactly these."""
        if self._num_held[worker_id]:
            slots, _ = self._held(self._places[worker_id])
            self._take_out(worker_id, np.setdiff1d(slots, self._table.find(words_of(blocks))))
        self.store(worker_id, blocks)

    def forget(self, worker_id: str) -> None:
        if self._num_held[worker_id]:
            self._take_out(worker_id, self._held(self._places[worker_id])[0])
        self._num_held.pop(worker_id, None)
        place = self._places.pop(worker_id, None)
        if place is not None:
            del self._names[place]

    def match(self, hashes: Sequence[bytes]) -> dict[str, Match]:
        """For each worker that holds the first block."""
        lengths = np.zeros(
            _BITS * (max(self._names, default=0) + 1), np.int64
        )  # by bit: blocks in a row that have it
        following = -1  # bits that all blocks so far have
        for position, holders in self._runs(hashes):
            lost = following & ~holders
            following &= holders
            if position and lost:
                _note(lengths, lost, position)
            if not following:
                break
        if hashes and following:
            _note(lengths, following, len(hashes))
        (places,) = lengths[0::_BITS].nonzero()
        matches = zip(lengths[0::_BITS][places].tolist(), lengths[1::_BITS][places].tolist(), strict=True)
        return {
            self._names[place]: Match(*match) for place, match in zip(places.tolist(), matches, strict=True)
        }

    def _runs(self, hashes: Sequence[bytes]) -> Iterator[tuple[int, int]]:
        """Where the holders change along the prompt: position, and who holds the block there and those behind it."""
        start, size, last = 0, _FIRST_LOOKUP, -1
        while start < len(hashes):
            part = hashes[start : start + size]
            self.num_looked_up += len(part)
            numbers = self._table.values(self._table.find(words_of(part)))
            changes = (numbers[1:] != numbers[:-1]).nonzero()[0] + 1
            for at in (0, *changes.tolist()):
                number = int(numbers[at])
                if number != last:
                    yield start + at, self._sets.bits[number]
                    last = number
            start, size = start + size, 4 * size

    def _place(self, worker_id: str) -> int:
        place = self._places.get(worker_id)
        if place is None:
            place = next(free for free in range(len(self._names) + 1) if free not in self._names)
            self._places[worker_id], self._names[place] = place, worker_id
        return place

    def _count(self, worker_id: str, num_more: int) -> None:
        self._num_held[worker_id] += num_more
        self.num_entries += num_more

    def _held(self, place: int) -> tuple[Slots, Values]:
        """Slots and set numbers of the blocks that the worker at this place holds."""
        slots, numbers = self._table.entries()
        mask = self._sets.with_bit(_BITS * place)[numbers]
        return slots[mask], numbers[mask]

    def _take_out(self, worker_id: str, slots: Slots) -> None:
        clear = ~_bits_of(self._places[worker_id], _HOLDS | _ON_DEVICE | _ON_DISK)
        self._change(worker_id, slots, lambda holders: holders & clear)

    def _change(self, worker_id: str, slots: Slots, change: Callable[[int], int]) -> None:
        """Give the blocks at these slots, all taken and different, the holders that `change` makes of theirs."""
        if not len(slots):
            return
        holds = _bits_of(self._places[worker_id], _HOLDS)
        numbers, which, counts = np.unique(self._table.values(slots), return_inverse=True, return_counts=True)
        changed = np.zeros(len(numbers), np.int32)
        for i, (number, count) in enumerate(zip(numbers.tolist(), counts.tolist(), strict=True)):
            before = self._sets.bits[number]
            after = change(before)
            self._count(worker_id, count * (bool(after & holds) - bool(before & holds)))
            changed[i] = self._sets.take(after, count) if after else 0
            self._sets.give_back(number, count)
        values = changed[which]
        self._table.set(slots[values != 0], values[values != 0])
        self._table.free(slots[values == 0])


class _HolderSets:
    """Bit sets by number, each once, counted by the blocks that have it. Number 0 is the empty set, and stays."""

    def __init__(self) -> None:
        self.num_bytes = 0  # about
        self.bits: list[int] = [0]
        self._uses: list[int] = [0]
        self._numbers: dict[int, int] = {}
        self._free: list[int] = []

    def take(self, bits: int, count: int) -> int:
        """The number of the set, for so many more blocks."""
        number = self._numbers.get(bits)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.bits[number], self._uses[number] = bits, 0
            else:
                number = len(self.bits)
                self.bits.append(bits)
                self._uses.append(0)
            self._numbers[bits] = number
            self.num_bytes += _SET_BYTES + bits.bit_length() // 8
        self._uses[number] += count
        return number

    def give_back(self, number: int, count: int) -> None:
        """So many blocks fewer have it."""
        self._uses[number] -= count
        if not self._uses[number]:
            bits = self.bits[number]
            del self._numbers[bits]
            self.num_bytes -= _SET_BYTES + bits.bit_length() // 8
            self.bits[number] = 0
            self._free.append(number)

    def with_bit(self, bit: int) -> NDArray[np.bool_]:
        """By number: whether the set has it."""
        return np.fromiter((bits >> bit & 1 for bits in self.bits), np.bool_, len(self.bits))


_TIER_BITS = {Tier.DEVICE: _HOLDS | _ON_DEVICE, Tier.HOST: _HOLDS, Tier.DISK: _HOLDS | _ON_DISK}


def _bits_of(place: int, bits: int) -> int:
    return bits << _BITS * place


def _tier(bits: int) -> Tier:
    if bits & _ON_DEVICE:
        return Tier.DEVICE
    return Tier.DISK if bits & _ON_DISK else Tier.HOST


def _note(lengths: NDArray[np.int64], mask: int, length: int) -> None:
    """Write the length for each bit of the mask."""
    if mask.bit_count() > 16:  # from here on unpacking is faster than one bit at a time
        data = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
        lengths[np.unpackbits(data, bitorder="little").nonzero()[0]] = length
        return
    while mask:
        lowest = mask & -mask
        lengths[lowest.bit_length() - 1] = length
        mask ^= lowest
