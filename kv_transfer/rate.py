"""How fast blocks come from a peer."""

from __future__ import annotations

# What was read before counts half after so many bytes.
_HALF_LIFE_BYTES = 64 << 20


class Rate:
    """Bytes over seconds of the READs so far, older ones counting less: half after each 64 MiB.

    Not the mean of the READs' rates: what is asked for is how long the next bytes take.
    """

    __slots__ = ("_bytes", "_seconds")

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        if num_bytes <= 0 or seconds <= 0:
            return
        kept = 2.0 ** (-num_bytes / _HALF_LIFE_BYTES)
        self._bytes = kept * self._bytes + num_bytes
        self._seconds = kept * self._seconds + seconds

    @property
    def bytes_per_s(self) -> float:
        """0 before the first READ."""
        return self._bytes / self._seconds if self._seconds > 0 else 0.0
