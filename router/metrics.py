"""The router's figures, for Prometheus. Events are counted here; what is a figure of the moment is read at a scrape."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.directory.view import DirectoryView
from headrace.directory.watcher import Watcher
from router.admission import Admission
from router.tally import Tally

_DECISION_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1)
_TOKENS = (0, 32, 128, 512, 2048, 8192, 32768)


class RouterMetrics:
    """One per router. Used on its event loop; scrapes come on a thread of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.decision_seconds = Histogram(
            "headrace_router_decision_seconds",
            "Block hashes, match and policy of one request",
            buckets=_DECISION_SECONDS,
            registry=self.registry,
        )
        self._predicted = self._counter(
            "predicted_cached_tokens", "Predicted to be found by the prefilling worker"
        )
        self._reported = self._counter(
            "reported_cached_tokens", "Of the same requests, as their workers reported"
        )
        self._missing = self._histogram("missing_cached_tokens", "Predicted and not found, one request")
        self._surplus = self._histogram("surplus_cached_tokens", "Found and not predicted, one request")

    def predicted(self, predicted_tokens: int, reported_tokens: int) -> None:
        """One answered request's cached prompt tokens."""
        self._predicted.inc(predicted_tokens)
        self._reported.inc(reported_tokens)
        self._missing.observe(max(0, predicted_tokens - reported_tokens))
        self._surplus.observe(max(0, reported_tokens - predicted_tokens))

    def show(self, view: DirectoryView, watcher: Watcher, tally: Tally, admission: Admission) -> None:
        """Have these in each scrape."""
        self.registry.register(_RouterCollector(view, watcher, tally, admission))

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"headrace_router_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"headrace_router_{name}", text, buckets=_TOKENS, registry=self.registry)


class _RouterCollector(Collector):
    """Called on the metrics thread: reads plain figures, locks nothing."""

    def __init__(self, view: DirectoryView, watcher: Watcher, tally: Tally, admission: Admission) -> None:
        self._view = view
        self._watcher = watcher
        self._tally = tally
        self._admission = admission

    def collect(self) -> Iterable[Metric]:
        index = self._view.index
        for name, text, value in (
            ("inflight_requests", "Requests being served", self._admission.num_running),
            ("queued_requests", "Requests that wait for a place", self._admission.num_queued),
            ("queued_tokens", "Their prompt tokens", self._admission.num_queued_tokens),
            ("workers", "Workers in the view", len(self._view.workers)),
            ("index_blocks", "Different blocks in the prefix index", len(index)),
            ("index_entries", "Pairs of a block and a worker that holds it", index.num_entries),
            ("index_bytes", "Memory of the prefix index", index.num_bytes),
            ("assumed_blocks", "Sent to workers and not reported by them yet", self._view.num_assumed_blocks),
            (
                "event_lag_seconds",
                "Age of the directory's last event when it came",
                self._watcher.event_lag_s,
            ),
            ("directory_silence_seconds", "Since the directory last answered", self._watcher.silence_s()),
        ):
            yield GaugeMetricFamily(f"headrace_router_{name}", text, value)
        for name, text, value in (
            ("index_dropped_blocks", "Blocks that the full index passed over", index.num_dropped),
            (
                "event_gaps",
                "Times that an event was missing and a worker's blocks were read anew",
                self._view.num_gaps,
            ),
        ):
            yield CounterMetricFamily(f"headrace_router_{name}", text, value)
        yield from self._outcomes()
        refused = CounterMetricFamily(
            "headrace_router_refused_requests", "Refused at admission", labels=["reason"]
        )
        for reason, count in dict(self._admission.refused).items():
            refused.add_metric([reason], count)
        waited = CounterMetricFamily(
            "headrace_router_queue_seconds", "Waited by all that were admitted", self._admission.waited_s
        )
        yield from (refused, waited)

    def _outcomes(self) -> Iterable[Metric]:
        for name, text, counts in (
            ("requests", "Requests that have ended", self._tally.requests),
            ("prompt_tokens", "Their prompt tokens", self._tally.prompt_tokens),
            ("output_tokens", "Their output tokens, of all choices", self._tally.output_tokens),
        ):
            family = CounterMetricFamily(f"headrace_router_{name}", text, labels=["outcome"])
            for outcome, count in dict(counts).items():
                family.add_metric([outcome], count)
            yield family
