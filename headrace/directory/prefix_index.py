"""Which worker holds which block, for the longest-prefix question of every request. Owned by the view.

    block hash ──▶ number of a set of holders ──▶ bit set (an int; a bit for each worker's place)

Blocks of one prefix have the same holders, so there are few different sets, and each is kept once. What is left for
a block is its digest and a number, in flat arrays. Digests are whole: nothing here is approximate.

Block hashes are chained: a worker that holds block k of a prompt but not block k - 1 can use neither. So only
the contiguous run from the first block counts. What a worker holds below its device counts as well, since it comes back
by copy, which costs next to nothing beside computing it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.directory.block_table import BlockTable, Slots, words_of

DEFAULT_MAX_BLOCKS = 1 << 22
_FIRST_LOOKUP = 128  # blocks; then eight times as many each time: a short match looks at few of a long prompt
_SET_BYTES = 200  # in two lists and a dictionary, with three integers

Lengths = NDArray[np.int64]


class Match(NamedTuple):
    """How much of a prompt a worker holds, in blocks from the first on, without a hole."""

    num_blocks: int  # in any tier, assumed ones included
    num_assumed_blocks: int = 0  # of them the last so many were sent there and not reported by the worker yet


class Matches(Mapping[str, Match]):
    """By worker id, for those that hold the first block. Good until the next change of the index.

    The arrays are by place in the index: of a thousand workers, the reader looks at few.
    """

    def __init__(self, places: Mapping[str, int], num_blocks: Lengths) -> None:
        self.num_blocks = num_blocks
        self.num_reported_blocks = num_blocks
        self._places = places

    def assume(self, worker_id: str, num_blocks: int) -> None:
        """The worker has at least so many."""
        if self.num_blocks is self.num_reported_blocks:
            self.num_blocks = self.num_blocks.copy()
        place = self._places[worker_id]
        self.num_blocks[place] = max(num_blocks, self.num_blocks[place])

    def __getitem__(self, worker_id: str) -> Match:
        place = self._places[worker_id]
        length = int(self.num_blocks[place])
        if not length:
            raise KeyError(worker_id)
        return Match(length, length - int(self.num_reported_blocks[place]))

    def __iter__(self) -> Iterator[str]:
        return (worker_id for worker_id, place in self._places.items() if self.num_blocks[place])

    def __len__(self) -> int:
        return int(np.count_nonzero(self.num_blocks))


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
        self._free_places: list[int] = []

    def __len__(self) -> int:
        """Number of different blocks."""
        return len(self._table)

    @property
    def num_bytes(self) -> int:
        return self._table.num_bytes + self._sets.num_bytes

    def blocks(self, worker_id: str) -> set[bytes]:
        """Costs a pass over the index, as `replace` and `forget` do."""
        if not self._num_held[worker_id]:
            return set()
        return set(self._table.digests(self._held(self._places[worker_id])))

    def place(self, worker_id: str) -> int:
        """Of the worker, from now on until it is forgotten: a small number."""
        place = self._places.get(worker_id)
        if place is None:
            place = self._free_places.pop() if self._free_places else len(self._places)
            self._places[worker_id] = place
        return place

    def store(self, worker_id: str, hashes: Iterable[bytes]) -> None:
        """The worker holds these, too."""
        bit = 1 << self.place(worker_id)
        hashes = dict.fromkeys(hashes)
        if not hashes:
            return
        words = words_of(hashes)
        slots = self._table.find(words)
        self._change(worker_id, slots[slots >= 0], set_bits=bit)
        unknown = (slots < 0).nonzero()[0][: self._max_blocks - len(self._table)]
        self.num_dropped += int((slots < 0).sum()) - len(unknown)
        if len(unknown):
            number = self._sets.take(bit, len(unknown))
            self._table.put(words[unknown], np.full(len(unknown), number, np.int32))
            self._count(worker_id, len(unknown))

    def remove(self, worker_id: str, hashes: Iterable[bytes]) -> None:
        """Hashes that the worker does not hold are passed over."""
        if self._num_held[worker_id]:
            slots = self._table.find(words_of(dict.fromkeys(hashes)))
            self._take_out(worker_id, slots[slots >= 0])

    def replace(self, worker_id: str, hashes: Iterable[bytes]) -> None:
        """The worker holds exactly these."""
        hashes = list(hashes)
        if self._num_held[worker_id]:
            slots = self._held(self._places[worker_id])
            self._take_out(worker_id, np.setdiff1d(slots, self._table.find(words_of(hashes))))
        self.store(worker_id, hashes)

    def forget(self, worker_id: str) -> None:
        if self._num_held[worker_id]:
            self._take_out(worker_id, self._held(self._places[worker_id]))
        self._num_held.pop(worker_id, None)
        place = self._places.pop(worker_id, None)
        if place is not None:
            self._free_places.append(place)

    def match(self, hashes: Sequence[bytes]) -> Matches:
        """How many blocks in a row, from the first on, each worker holds."""
        num_places = len(self._places) + len(self._free_places)
        lengths = np.zeros(num_places, np.int64)
        following = (1 << num_places) - 1  # those that hold all blocks so far
        for position, holders in self._runs(hashes):
            lost = following & ~holders
            following &= holders
            if position and lost:
                _note(lengths, lost, position)
            if not following:
                break
        if hashes and following:
            _note(lengths, following, len(hashes))
        return Matches(self._places, lengths)

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
            start, size = start + size, 8 * size

    def _count(self, worker_id: str, num_more: int) -> None:
        self._num_held[worker_id] += num_more
        self.num_entries += num_more

    def _held(self, place: int) -> Slots:
        """Slots of the blocks that the worker at this place holds."""
        slots, numbers = self._table.entries()
        return slots[self._sets.with_bit(place)[numbers]]

    def _take_out(self, worker_id: str, slots: Slots) -> None:
        self._change(worker_id, slots, clear_bits=1 << self._places[worker_id])

    def _change(self, worker_id: str, slots: Slots, *, set_bits: int = 0, clear_bits: int = 0) -> None:
        """Of the holders of the blocks at these slots, all taken and different."""
        if not len(slots):
            return
        numbers, which, counts = np.unique(self._table.values(slots), return_inverse=True, return_counts=True)
        changed = np.zeros(len(numbers), np.int32)
        for i, (number, count) in enumerate(zip(numbers.tolist(), counts.tolist(), strict=True)):
            before = self._sets.bits[number]
            after = (before | set_bits) & ~clear_bits
            self._count(worker_id, count * (after.bit_count() - before.bit_count()))
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


def _note(lengths: Lengths, mask: int, length: int) -> None:
    """Write the length for each bit of the mask."""
    if mask.bit_count() > 16:  # from here on unpacking is faster than one bit at a time
        data = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
        lengths[np.unpackbits(data, bitorder="little").nonzero()[0]] = length
        return
    while mask:
        lowest = mask & -mask
        lengths[lowest.bit_length() - 1] = length
        mask ^= lowest
