"""What this process has sent to workers and they have not reported yet: a prompt counts as cached where it was sent.

Without it a burst of equal prompts is scattered before the first event arrives. An assumption lives for one to two
`ttl_s`, or until it is forgotten. Two generations make that cheap: news go into the young one; after `ttl_s`, or when
it is full, it becomes the old one, and the one that was old is dropped whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.clock import Clock

DEFAULT_TTL_S = 5.0
MAX_BLOCKS = 1 << 17  # of a generation: about 20 MB with their digests

Holder = tuple[str, str]  # worker id and incarnation


class AssumedContent:
    """Used on one event loop."""

    def __init__(self, ttl_s: float, clock: Clock, max_blocks: int = MAX_BLOCKS) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._max_blocks = max_blocks
        self._young, self._old = _Generation(), _Generation()
        self._turns_at = clock.now() + ttl_s

    def __len__(self) -> int:
        """Number of blocks, those in both generations twice."""
        return len(self._young.holders) + len(self._old.holders)

    def add(self, holder: Holder, hashes: Sequence[bytes]) -> None:
        """It was sent the prompt with these blocks, from the first on. Of one that is too long the first ones count."""
        self._turn()
        hashes = hashes[: self._max_blocks]
        if len(self._young.holders) + len(hashes) > self._max_blocks:
            self._young, self._old = _Generation(), self._young
        self._young.add(holder, hashes)

    def remove(self, holder: Holder, hashes: Iterable[bytes]) -> None:
        """It does not have these, whichever request was assumed to bring them."""
        hashes = list(hashes)
        for generation in (self._young, self._old):
            generation.remove(holder, hashes)

    def drop(self, holder: Holder) -> None:
        """It is gone."""
        for generation in (self._young, self._old):
            generation.drop(holder)

    def runs(self, hashes: Sequence[bytes]) -> dict[Holder, int]:
        """How many of these, from the first on, each is assumed to have; those with none are left out."""
        self._turn()
        lengths = self._old.runs(hashes)
        for holder, length in self._young.runs(hashes).items():
            lengths[holder] = max(length, lengths.get(holder, 0))
        return lengths

    def _turn(self) -> None:
        now = self._clock.now()
        if now < self._turns_at:
            return
        both = now >= self._turns_at + self._ttl_s
        self._young, self._old = _Generation(), _Generation() if both else self._young
        self._turns_at = now + self._ttl_s


class _Generation:
    """A bit for each worker. If none was removed, whoever has a block's bit has those of the blocks before it."""

    def __init__(self) -> None:
        self.holders: dict[bytes, int] = {}  # bits by block hash
        self._places: dict[Holder, int] = {}
        self._names: list[Holder | None] = []  # by place. None: gone, and its bits mean nothing

    def add(self, holder: Holder, hashes: Sequence[bytes]) -> None:
        if holder not in self._places:
            self._places[holder] = len(self._names)
            self._names.append(holder)
        bit, holders = 1 << self._places[holder], self.holders
        for block in hashes:
            holders[block] = holders.get(block, 0) | bit

    def remove(self, holder: Holder, hashes: Sequence[bytes]) -> None:
        if holder not in self._places:
            return
        bit = 1 << self._places[holder]
        for block in hashes:
            holders = self.holders.get(block, 0)
            if holders & bit:
                self.holders[block] = holders ^ bit

    def drop(self, holder: Holder) -> None:
        place = self._places.pop(holder, None)
        if place is not None:
            self._names[place] = None

    def runs(self, hashes: Sequence[bytes]) -> dict[Holder, int]:
        """By bisection for where workers are lost. Exact if no block was removed, else it may miss a hole."""
        lengths: dict[Holder, int] = {}
        following = self.holders.get(hashes[0], 0) if hashes else 0
        length = 0
        while following:
            length = self._end_of(following, hashes, length + 1)
            holders = self.holders.get(hashes[length], 0) if length < len(hashes) else 0
            lost, following = following & ~holders, following & holders
            while lost:
                lowest = lost & -lost
                name = self._names[lowest.bit_length() - 1]
                if name is not None:
                    lengths[name] = length
                lost ^= lowest
        return lengths

    def _end_of(self, bits: int, hashes: Sequence[bytes], low: int) -> int:
        """The first position from `low` on whose block lacks one of these bits."""
        high = len(hashes)
        while low < high:
            middle = (low + high) // 2
            if bits & ~self.holders.get(hashes[middle], 0):
                high = middle
            else:
                low = middle + 1
        return low
