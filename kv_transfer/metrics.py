"""What the exchange of KV blocks counts, for Prometheus. One object per worker."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# From a block over shared memory to a long prompt over a slow network.
_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)


class Failure(StrEnum):
    """Why KV that was to be read did not become usable."""

    TRANSFER = "transfer"  # the transport said so, or the peer's connection ended
    TIMEOUT = "timeout"
    CHECKSUM = "checksum"
    LEASE_OVER = "lease_over"
    STALE = "stale"  # a block was recycled while it was read
    NO_PROGRESS = "no_progress"  # the peer went silent before its blocks were there
    REFUSED = "refused"  # the peer answered with an error


class Refusal(StrEnum):
    """Why a reader's reference to blocks of ours was refused."""

    INCARNATION = "incarnation"
    UNKNOWN_LEASE = "unknown_lease"  # never made, consumed, or expired
    OTHER_READER = "other_reader"
    GENERATION = "generation"


class PrefixDecision(StrEnum):
    """How a prefix that another worker holds became ours, or why it did not."""

    FETCH = "fetch"
    COMPUTE = "compute"  # predicted to be cheaper
    NO_ROOM = "no_room"
    GONE = "gone"  # not there any more
    FAILED = "failed"


class KvMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.read_bytes = Counter(
            "headrace_kv_read_bytes", "Bytes of KV read from a peer", ["peer"], registry=registry
        )
        self.read_blocks = Counter(
            "headrace_kv_read_blocks", "Blocks read from a peer", ["peer"], registry=registry
        )
        self.read_descriptors = Counter(
            "headrace_kv_read_descriptors",
            "Pieces of memory read from a peer: one a block, more across different tensor parallelism",
            ["peer"],
            registry=registry,
        )
        self.read_seconds = Histogram(
            "headrace_kv_read_seconds",
            "One READ, from posting to the last byte",
            buckets=_SECONDS,
            registry=registry,
        )
        self.failures = _counter("failures", "READs and hand-offs that gave no KV", Failure, registry)
        self.refusals = _counter("refused_references", "References to our blocks refused", Refusal, registry)
        self.prefix_decisions = _counter(
            "prefix_decisions",
            "Prefixes that another worker was named as a source of",
            PrefixDecision,
            registry,
            label="decision",
        )
        self.refused_peers = Gauge(
            "headrace_kv_refused_peers",
            "Workers that blocks can not be exchanged with, by the field that differs",
            ["field"],
            registry=registry,
        )


def _counter(
    name: str, text: str, kinds: Iterable[str], registry: CollectorRegistry, label: str = "reason"
) -> Counter:
    """Each of its kinds is there from the start, at 0."""
    counter = Counter(f"headrace_kv_{name}", text, [label], registry=registry)
    for kind in kinds:
        counter.labels(kind)
    return counter
