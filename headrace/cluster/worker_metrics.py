"""A worker's figures of the moment, collected when Prometheus asks. Events are counted in kv_transfer.metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.engine.block_pool import PoolAudit
from headrace.engine.engine import EngineLoad
from kv_transfer.peers import Peers

# By the field of EngineLoad: what it is called outside, and what it says.
_GAUGES = {
    "running": ("headrace_running", "Sequences that run"),
    "waiting": ("headrace_waiting", "Sequences that wait"),
    "waiting_tokens": ("headrace_waiting_tokens", "Known tokens still to be computed here"),
    "free_blocks": ("headrace_kv_free_blocks", "KV blocks that hold nothing"),
    "cached_blocks": ("headrace_kv_cached_blocks", "KV blocks kept for later prompts"),
    "quarantined_blocks": (
        "headrace_kv_quarantined_blocks",
        "KV blocks given up that a READ may still write",
    ),
    "holds": ("headrace_kv_leases", "Leases that readers elsewhere have on blocks here"),
    "prefill_tokens_per_s": ("headrace_prefill_tokens_per_second", "Measured rate of prefill"),
}
_COUNTERS = {
    "steps": ("headrace_steps", "Times the model ran"),
    "prefill_tokens": ("headrace_prefill_tokens", "Tokens prefilled"),
    "output_tokens": ("headrace_output_tokens", "Tokens drawn"),
    "cached_tokens": ("headrace_cached_tokens", "Prompt tokens found in the cache"),
    "preemptions": ("headrace_preemptions", "Sequences computed again for lack of blocks"),
    "expired_holds": ("headrace_kv_expired_leases", "Leases that ended by their deadline"),
}
_TIER_GAUGES = {"blocks": "Blocks that can be found by name", "bytes": "Their bytes"}
_TIER_COUNTERS = {
    "hits": "Blocks that a sequence took from here",
    "stores": "Blocks stored",
    "evictions": "Blocks evicted",
    "dropped": "Blocks that found no room",
    "checksum_failures": "Blocks that were damaged or gone; never used",
}
_STATES = ("free", "active", "cached", "held", "filling", "quarantined")


class WorkerCollector(Collector):
    """Called on the metrics thread: reads plain figures, locks nothing."""

    def __init__(
        self, load: Callable[[], EngineLoad], audit: Callable[[], PoolAudit | None], peers: Peers
    ) -> None:
        """`audit()` is the last one that was made when idle: walking the pool is for idle moments."""
        self._load = load
        self._audit = audit
        self._peers = peers

    def collect(self) -> Iterable[Metric]:
        load = self._load()
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, getattr(load, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, getattr(load, field))
        yield from _tiers(load)
        yield from _audited(self._audit())
        yield from _links(self._peers)


def _links(peers: Peers) -> Iterable[Metric]:
    bandwidth = GaugeMetricFamily(
        "headrace_kv_link_bytes_per_second", "Measured, of READs from a peer", labels=["peer"]
    )
    connected = GaugeMetricFamily(
        "headrace_kv_peers", "Connected peers by what carries the bytes", labels=["transport", "device"]
    )
    carriers: Counter[tuple[str, str]] = Counter()
    for peer in peers.statuses():
        if peer.connected:
            bandwidth.add_metric([peer.worker_id], peer.bytes_per_s)
            carriers[peer.transport, peer.device] += 1
    for carrier, count in carriers.items():
        connected.add_metric(carrier, count)
    yield from (bandwidth, connected)


def _audited(audit: PoolAudit | None) -> Iterable[Metric]:
    blocks = GaugeMetricFamily("headrace_kv_blocks", "Blocks by state, at the last audit", labels=["state"])
    for state in _STATES if audit is not None else ():
        blocks.add_metric([state], getattr(audit, state))
    problems = len(audit.problems) if audit is not None else 0
    yield blocks
    yield GaugeMetricFamily("headrace_kv_audit_problems", "What did not add up at the last audit", problems)


def _tiers(load: EngineLoad) -> Iterable[Metric]:
    families = [(name, GaugeMetricFamily, text) for name, text in _TIER_GAUGES.items()]
    families += [(name, CounterMetricFamily, text) for name, text in _TIER_COUNTERS.items()]
    for name, kind, text in families:
        family = kind(f"headrace_kv_tier_{name}", text, labels=["tier"])
        for stats in load.tiers:
            family.add_metric([stats.tier.name.lower()], getattr(stats, name))
        yield family
