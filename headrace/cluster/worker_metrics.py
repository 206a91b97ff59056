"""A worker's figures of the moment, collected when Prometheus asks. Events are counted in kv_transfer.metrics.

What vLLM has a name for has vLLM's name and its label `model_name`; all else is `headrace_…`. Requests as clients see
them are the router's to tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.engine.block_pool import PoolAudit
from headrace.engine.engine import EngineLoad
from headrace.engine.parallel.ranks import Ranks
from headrace.telemetry import WorkerTelemetry
from kv_transfer.peers import Peers

# By the field of EngineLoad: what it is called outside, and what it says.
_GAUGES = {
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
    "expired_holds": ("headrace_kv_expired_leases", "Leases that ended by their deadline"),
}
_VLLM_GAUGES = {
    "running": ("vllm:num_requests_running", "Sequences that run"),
    "waiting": ("vllm:num_requests_waiting", "Sequences that wait"),
}
_VLLM_COUNTERS = {
    "queries": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache"),
    "cached_tokens": ("vllm:prefix_cache_hits", "Of these, found there"),
    "preemptions": ("vllm:num_preemptions", "Sequences computed again for lack of blocks"),
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


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """What each scrape reads. `audit()` is the last one that was made when idle: walking the pool is for idle
    moments.
    """

    model_name: str
    block_size_tokens: int
    num_blocks: int
    load: Callable[[], EngineLoad]
    audit: Callable[[], PoolAudit | None]
    progress_age_s: Callable[[], float]
    ready: Callable[[], bool]
    peers: Peers
    telemetry: WorkerTelemetry
    ranks: Ranks | None = None  # the others, where there are any


class WorkerCollector(Collector):
    """Called on the metrics thread: reads plain figures, locks nothing."""

    def __init__(self, figures: WorkerFigures) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        figures = self._figures
        load = figures.load()
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, getattr(load, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, getattr(load, field))
        yield GaugeMetricFamily("headrace_worker_ready", "1: requests may be sent here", figures.ready())
        yield GaugeMetricFamily(
            "headrace_engine_progress_age_seconds",
            "Since the engine last went round: it does so when idle, too",
            figures.progress_age_s(),
        )
        yield from self._of_vllm(load)
        yield from _times(figures.telemetry)
        yield from _tiers(load)
        yield from _audited(figures.audit())
        yield from _links(figures.peers)
        if figures.ranks is not None:
            yield from _ranks(figures.ranks)

    def _of_vllm(self, load: EngineLoad) -> Iterator[Metric]:
        figures = self._figures
        labels, values = ["model_name"], [figures.model_name]
        used = figures.num_blocks - load.free_blocks - load.cached_blocks
        gauges = [(name, text, getattr(load, field)) for field, (name, text) in _VLLM_GAUGES.items()]
        gauges.append(
            ("vllm:kv_cache_usage_perc", "Used by requests, 1: all of it", used / figures.num_blocks)
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            gauge.add_metric(values, value)
            yield gauge
        for field, (name, text) in _VLLM_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            counter.add_metric(values, getattr(load, field))
            yield counter
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "1", labels=[*labels, "block_size", "num_gpu_blocks"]
        )
        info.add_metric([*values, str(figures.block_size_tokens), str(figures.num_blocks)], 1)
        yield info


def _times(telemetry: WorkerTelemetry) -> Iterator[Metric]:
    phases = HistogramMetricFamily(
        "headrace_worker_phase_seconds", "What was done here for a request", labels=["phase"]
    )
    for phase, distribution in telemetry.phases.items():
        phases.add_metric([phase], distribution.buckets(), distribution.sum)
    inter_token = telemetry.inter_token
    yield phases
    yield HistogramMetricFamily(
        "headrace_worker_inter_token_seconds",
        "From token to token, each at its request's mean",
        inter_token.buckets(),
        inter_token.sum,
    )


def _ranks(ranks: Ranks) -> Iterator[Metric]:
    yield GaugeMetricFamily("headrace_ranks", "Processes that compute each step together", ranks.size)
    yield CounterMetricFamily(
        "headrace_rank_messages", "What each other rank was told: steps, copies of blocks", ranks.num_messages
    )
    yield CounterMetricFamily("headrace_rank_message_bytes", "Bytes of these", ranks.sent_bytes)


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
