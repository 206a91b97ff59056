"""A table from block hash to a small number, in flat arrays: 20.25 bytes a slot, whole digests, batches at a time.

    digest ─▶ home bucket ─▶ 8 slots (one cache line of low words) ── full ─▶ next bucket ─▶ …

Each bucket counts the digests that did not find room in it and went on; 0 ends a search. So a removed digest leaves
nothing behind, and the table never has to be cleaned. It doubles when `_MAX_FILL` of the slots are taken.
A Python dict with digests as keys takes three to six times as much.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headrace.block_hash import DIGEST_BYTES

Words = NDArray[np.uint64]  # [n, 2]: low and high word of each digest
Slots = NDArray[np.int64]
Values = NDArray[np.int32]

_BUCKET_SLOTS = 8
_BYTE_NUMBERS = np.uint64(
    sum(byte << 8 * (7 - byte) for byte in range(8))
)  # times 256**b: b is the highest byte
_FIRST_BUCKETS = 1 << 7
_MAX_FILL = 0.7
_GROWTH_PIECE = 1 << 14
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # spreads whatever regularity digests might have over the top bits


def words_of(digests: Iterable[bytes]) -> Words:
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)


class BlockTable:
    """Values are over 0; 0 means that the digest is not here. Slots are good until the next `put`."""

    def __init__(self) -> None:
        self._num = 0
        self._allocate(_FIRST_BUCKETS)

    def __len__(self) -> int:
        return self._num

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self._low, self._high, self._values, self._overflows))

    def find(self, words: Words) -> Slots:
        """The slot of each digest, -1 where it is not here."""
        slots = np.full(len(words), -1, dtype=np.int64)
        buckets = self._homes(words)
        low, high = words[:, 0], words[:, 1]
        asked = None  # all; later the positions in `words` that are still sought
        while len(buckets):
            # `take`: of rows it is six times as fast as brackets.
            same = self._low.take(buckets, axis=0) == low[:, None]
            rows = same.view("<u8")[:, 0]  # a byte for each slot
            likely = rows != 0
            first = rows & (~rows + np.uint64(1))  # its lowest byte that is set, alone
            found = buckets * _BUCKET_SLOTS + ((first * _BYTE_NUMBERS) >> np.uint64(56)).astype(np.int64)
            hit = likely & (self._values.take(found) != 0) & (self._high.take(found) == high)
            (doubtful,) = (likely & ~hit).nonzero()
            if len(doubtful):
                self._find_twins(doubtful, same, hit, found, high)
            slots[hit if asked is None else asked[hit]] = found[hit]
            (missed,) = (~hit).nonzero()
            on = missed[self._overflows[buckets[missed]] != 0]
            asked = on if asked is None else asked[on]
            buckets, low, high = (buckets[on] + 1) & self._mask, low[on], high[on]
        return slots

    def values(self, slots: Slots) -> Values:
        """0 for slot -1."""
        return np.where(slots < 0, np.int32(0), self._values.take(slots))

    def set(self, slots: Slots, values: Values) -> None:
        """Values over 0, at slots that are taken. To remove a digest, `free` its slot."""
        self._values[slots] = values

    def free(self, slots: Slots) -> None:
        """Take digests out. The slots are taken and all different."""
        self._num -= len(slots)
        self._values[slots] = 0
        at = slots // _BUCKET_SLOTS
        passed = self._homes(np.stack((self._low.reshape(-1)[slots], self._high[slots]), axis=1))
        while len(passed):
            on = passed != at
            passed, at = passed[on], at[on]
            np.subtract.at(self._overflows, passed, 1)
            passed = (passed + 1) & self._mask

    def put(self, words: Words, values: Values) -> None:
        """Take in digests that are all different and not here, with values over 0."""
        self._num += len(words)
        if self._num > _MAX_FILL * len(self._values):
            self._grow()
        self._place(words, values)

    def entries(self) -> tuple[Slots, Values]:
        """All that is here, in no order."""
        (slots,) = self._values.nonzero()
        return slots, self._values[slots]

    def digests(self, slots: Slots) -> list[bytes]:
        joined = np.stack((self._low.reshape(-1)[slots], self._high[slots]), axis=1).tobytes()
        return [joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES)]

    def _find_twins(
        self,
        rows: Slots,
        same: NDArray[np.bool_],
        hit: NDArray[np.bool_],
        found: Slots,
        high: NDArray[np.uint64],
    ) -> None:
        """The first slot with an equal low word was freed, or has another high word: try the others."""
        for row in rows.tolist():
            bucket_start = found[row] - found[row] % _BUCKET_SLOTS
            for slot in (bucket_start + same[row].nonzero()[0]).tolist():
                if self._values[slot] and self._high[slot] == high[row]:
                    hit[row], found[row] = True, slot

    def _place(self, words: Words, values: Values) -> None:
        """Round by round: those with the same bucket take its free slots in turn, the others go on to the next one."""
        buckets = self._homes(words)
        while len(words):
            order = buckets.argsort(kind="stable")
            buckets, words, values = buckets[order], words[order], values[order]
            rank = np.arange(len(buckets)) - np.searchsorted(buckets, buckets)
            free = self._values.reshape(-1, _BUCKET_SLOTS)[buckets] == 0
            nth = free & (free.cumsum(axis=1) == rank[:, None] + 1)
            fits = nth.any(axis=1)
            slots = buckets[fits] * _BUCKET_SLOTS + nth[fits].argmax(axis=1)
            self._low.reshape(-1)[slots], self._high[slots] = words[fits, 0], words[fits, 1]
            self._values[slots] = values[fits]
            on = ~fits
            np.add.at(self._overflows, buckets[on], 1)
            buckets, words, values = (buckets[on] + 1) & self._mask, words[on], values[on]

    def _homes(self, words: Words) -> Slots:
        return (((words[:, 0] ^ words[:, 1]) * _GOLDEN) >> self._shift).astype(np.int64)

    def _grow(self) -> None:
        slots, values = self.entries()
        words = np.stack((self._low.reshape(-1)[slots], self._high[slots]), axis=1)
        num_buckets = len(self._low)
        while self._num > _MAX_FILL * num_buckets * _BUCKET_SLOTS:
            num_buckets *= 2
        self._allocate(num_buckets)
        for start in range(0, len(words), _GROWTH_PIECE):  # in pieces: what it takes meanwhile stays small
            piece = slice(start, start + _GROWTH_PIECE)
            self._place(words[piece], values[piece])

    def _allocate(self, num_buckets: int) -> None:
        num_slots = num_buckets * _BUCKET_SLOTS
        self._mask = num_buckets - 1
        self._shift = np.uint64(64 - self._mask.bit_length())
        self._low: Words = np.zeros((num_buckets, _BUCKET_SLOTS), dtype=np.uint64)
        self._high: Words = np.zeros(num_slots, dtype=np.uint64)
        self._values: Values = np.zeros(num_slots, dtype=np.int32)
        self._overflows: NDArray[np.uint16] = np.zeros(num_buckets, dtype=np.uint16)
