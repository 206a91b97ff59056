"""What is known of the way to a peer, by READ: how much came, how fast, and what went wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

# What was read before counts half after so many bytes.
_HALF_LIFE_BYTES = 64 << 20


class FailureReason(StrEnum):
    POST = "post"  # the transport did not take the READ
    READ = "read"  # it ended without its bytes: the peer is lost, or the network
    DISCONNECTED = "disconnected"  # we tore the peer down meanwhile
    CLOSED = "closed"  # our own transport ended
    UNEXPECTED = "unexpected"  # the transport raised what it should not


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
    def bytes_per_s(self) -> float | None:
        """None before the first READ."""
        return self._bytes / self._seconds if self._seconds > 0 else None


@dataclass(slots=True)
class LinkStats:
    """READs from one peer since the first handshake, probes not counted except in `rate`. Written by the transfer
    thread, read by anybody.
    """

    reads: int = 0  # ended, failed ones included
    bytes: int = 0
    seconds: float = 0.0
    descriptors: int = 0  # of READs that succeeded
    failures: Counter[FailureReason] = field(default_factory=Counter[FailureReason])
    rate: Rate = field(default_factory=Rate)
