"""What is known of the way to a peer, by READ: how much came, how fast, and what went wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

# A READ of so many bytes has half of the weight in the rate, all before it together the other half.
_HALF_WEIGHT_BYTES = 64 << 20


class FailureReason(StrEnum):
    POST = "post"  # the transport did not take the READ
    READ = "read"  # it ended without its bytes: the peer is lost, or the network
    DISCONNECTED = "disconnected"  # we tore the peer down meanwhile
    CLOSED = "closed"  # our own transport ended
    UNEXPECTED = "unexpected"  # the transport raised what it should not
    # Of the caller, who counts them by `TransferThread.count_failure`.
    TIMEOUT = "timeout"
    CHECKSUM = "checksum"
    LEASE = "lease"


class Rate:
    """Bytes per second, exponentially weighted by bytes: a READ of b bytes in t seconds weighs w = 1 - 2^(-b / 64 MiB).

        value = sum / weight        sum ← (1 - w) * sum + w * b/t        weight ← (1 - w) * weight + w

    So a small READ, which tells of latency more than of bandwidth, gives a first figure and moves a later one little.
    """

    __slots__ = ("_sum", "_weight")

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        if num_bytes <= 0 or seconds <= 0:
            return
        w = 1.0 - 2.0 ** (-num_bytes / _HALF_WEIGHT_BYTES)
        self._sum += w * (num_bytes / seconds - self._sum)
        self._weight += w * (1.0 - self._weight)

    @property
    def bytes_per_s(self) -> float | None:
        """None before the first READ."""
        return self._sum / self._weight if self._weight > 0 else None


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
