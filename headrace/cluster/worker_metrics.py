"""A worker's figures of the moment, collected when Prometheus asks. Events are counted in kv_transfer.metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.engine.block_pool import PoolAudit
from headrace.engine.engine import EngineLoad
from kv_transfer.peers import Peers

_STATES = ("free", "active", "cached", "held", "filling", "quarantined")


class WorkerCollector(Collector):
    """Called on the metrics thread: reads plain figures, locks nothing."""

    def __init__(
        self, load: Callable[[], EngineLoad], audit: Callable[[], PoolAudit | None], peers: Peers
    ) -> None:
        self._load = load
        self._audit = audit
        self._peers = peers

    def collect(self) -> Iterable[Metric]:
        load = self._load()
        yield GaugeMetricFamily("headrace_running", "Sequences that run", load.running)
        yield GaugeMetricFamily("headrace_waiting", "Sequences that wait", load.waiting)
        yield GaugeMetricFamily(
            "headrace_waiting_tokens", "Known tokens to be computed here", load.waiting_tokens
        )
        yield CounterMetricFamily("headrace_steps", "Times the model ran", load.steps)
        yield CounterMetricFamily("headrace_prefill_tokens", "Tokens prefilled", load.prefill_tokens)
        yield CounterMetricFamily("headrace_output_tokens", "Tokens drawn", load.output_tokens)
        yield CounterMetricFamily(
            "headrace_cached_tokens", "Prompt tokens found in the cache", load.cached_tokens
        )
        yield CounterMetricFamily(
            "headrace_preemptions", "Sequences computed again for lack of blocks", load.preemptions
        )
        yield GaugeMetricFamily(
            "headrace_prefill_tokens_per_second", "Measured rate of prefill", load.prefill_tokens_per_s
        )
        yield CounterMetricFamily(
            "headrace_kv_expired_leases", "Holds that ended by their deadline", load.expired_holds
        )
        yield from self._blocks()
        yield from _tiers(load)
        yield from self._peers_now()

    def _peers_now(self) -> Iterable[Metric]:
        bandwidth = GaugeMetricFamily(
            "headrace_kv_link_bytes_per_second", "Measured, of READs from a peer", labels=["peer"]
        )
        peers = GaugeMetricFamily(
            "headrace_kv_peers", "Connected peers by what carries the bytes", labels=["transport", "device"]
        )
        carriers: Counter[tuple[str, str]] = Counter()
        for peer in self._peers.statuses():
            if peer.connected:
                bandwidth.add_metric([peer.worker_id], peer.bytes_per_s)
                carriers[peer.transport, peer.device] += 1
        for carrier, count in carriers.items():
            peers.add_metric(carrier, count)
        yield from (bandwidth, peers)

    def _blocks(self) -> Iterable[Metric]:
        """From the last audit: walking the pool is for idle moments."""
        audit = self._audit()
        blocks = GaugeMetricFamily(
            "headrace_kv_blocks", "Blocks by state, at the last audit", labels=["state"]
        )
        if audit is not None:
            for state in _STATES:
                blocks.add_metric([state], getattr(audit, state))
        yield blocks
        yield GaugeMetricFamily(
            "headrace_kv_audit_problems",
            "What did not add up at the last audit",
            len(audit.problems) if audit else 0,
        )


_TIER_GAUGES = {"blocks": "Blocks that can be found by name", "bytes": "Their bytes"}
_TIER_COUNTERS = {
    "hits": "Blocks that a sequence took from here",
    "stores": "Blocks stored",
    "evictions": "Blocks evicted",
    "dropped": "Blocks that found no room",
    "checksum_failures": "Blocks that were damaged or gone; never used",
}


def _tiers(load: EngineLoad) -> Iterable[Metric]:
    families = [(name, GaugeMetricFamily, text) for name, text in _TIER_GAUGES.items()]
    families += [(name, CounterMetricFamily, text) for name, text in _TIER_COUNTERS.items()]
    for name, kind, text in families:
        family = kind(f"headrace_kv_tier_{name}", text, labels=["tier"])
        for stats in load.tiers:
            family.add_metric([stats.tier.name.lower()], getattr(stats, name))
        yield family
