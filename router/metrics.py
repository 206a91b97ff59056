"""What the router counts for Prometheus as it happens. What is a figure of the moment, `router.collectors` reads."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

_DECISION_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1)
_TOKENS = (0, 32, 128, 512, 2048, 8192, 32768)


class RouterMetrics:
    """One per router. Used on its event loop; scrapes come on a thread of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
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

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"headrace_router_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"headrace_router_{name}", text, buckets=_TOKENS, registry=self.registry)
