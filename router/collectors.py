"""The router's figures as a scrape by Prometheus finds them.

What vLLM has a name for has vLLM's name and its label `model_name`, so that dashboards made for vLLM show it: requests
as clients see them here, engines at the workers. No figure is told by both. All else is `headrace_router_…`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.directory.view import DirectoryView
from headrace.directory.watcher import Watcher
from headrace.telemetry import Distribution
from router.admission import Admission, Refusal
from router.breakers import Breakers
from router.ledger import Ledger
from router.readiness import Readiness
from router.sessions import Sessions
from router.tally import FINISHED_REASONS, Tally

_BREAKER = {"closed": 0, "half-open": 1, "open": 2}

# By the field of Tally: vLLM's name, and what it says.
_TIMES = {
    "ttft": ("time_to_first_token_seconds", "From arrival to the first token, as clients see it"),
    "inter_token": (
        "inter_token_latency_seconds",
        "From token to token; the tokens of one message share the time since the one before",
    ),
    "per_output_token": ("request_time_per_output_token_seconds", "A request's mean, at its decode worker"),
    "e2e": ("e2e_request_latency_seconds", "From arrival to the last token"),
    "queue": ("request_queue_time_seconds", "From arrival until a worker computes the prompt"),
    "prefill": ("request_prefill_time_seconds", "Until the first token, from when the prompt is computed"),
    "decode": ("request_decode_time_seconds", "From the first token to the last"),
    "inference": ("request_inference_time_seconds", "From when the prompt is computed to the last token"),
    "prompt_lengths": ("request_prompt_tokens", "Tokens of a request's prompt"),
    "output_lengths": ("request_generation_tokens", "Tokens of a request's answers"),
}


@dataclass(frozen=True, slots=True)
class Sources:
    """Whose figures each scrape reads."""

    model_name: str
    view: DirectoryView
    watcher: Watcher
    tally: Tally
    admission: Admission
    ledger: Ledger
    breakers: Breakers
    sessions: Sessions
    readiness: Readiness


def register(registry: CollectorRegistry, sources: Sources) -> None:
    """Have these in each scrape."""
    registry.register(_RouterCollector(sources))
    registry.register(_RequestCollector(sources.model_name, sources.tally))


class _RequestCollector(Collector):
    """Requests as clients see them, in vLLM's words. Called on the metrics thread: locks nothing."""

    def __init__(self, model_name: str, tally: Tally) -> None:
        self._labels = [model_name]
        self._tally = tally

    def collect(self) -> Iterator[Metric]:
        tally = self._tally
        for field, (name, text) in _TIMES.items():
            distribution: Distribution = getattr(tally, field)
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            family.add_metric(self._labels, distribution.buckets(), distribution.sum)
            yield family
        for name, text, count in (
            ("prompt_tokens", "Tokens of prompts", _total(tally.prompt_tokens)),
            ("prompt_tokens_cached", "Of those of answered requests, found in a cache", tally.cached_tokens),
            ("generation_tokens", "Tokens of answers", _total(tally.output_tokens)),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            family.add_metric(self._labels, count)
            yield family
        finished = CounterMetricFamily(
            "vllm:request_success", "Requests that have ended", labels=["model_name", "finished_reason"]
        )
        for reason in FINISHED_REASONS:
            finished.add_metric([*self._labels, reason], tally.finished[reason])
        yield finished


class _RouterCollector(Collector):
    """Called on the metrics thread: reads plain figures, locks nothing."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        yield from self._moment()
        yield from self._counts()
        yield from self._outcomes()
        yield from self._workers()

    def _moment(self) -> Iterator[Metric]:
        sources, index = self._sources, self._sources.view.index
        for name, text, value in (
            ("inflight_requests", "Requests being served", sources.admission.num_running),
            ("queued_requests", "Requests that wait for a place", sources.admission.num_queued),
            ("queued_tokens", "Their prompt tokens", sources.admission.num_queued_tokens),
            ("streams", "Requests at decode workers", sources.sessions.num_streams),
            ("workers", "Workers in the view", len(sources.view.workers)),
            ("index_blocks", "Different blocks in the prefix index", len(index)),
            ("index_entries", "Pairs of a block and a worker that holds it", index.num_entries),
            ("index_bytes", "Memory of the prefix index", index.num_bytes),
            (
                "assumed_blocks",
                "Sent to workers and not reported by them yet",
                sources.view.num_assumed_blocks,
            ),
            (
                "event_lag_seconds",
                "Age of the directory's last event when it came",
                sources.watcher.event_lag_s,
            ),
            ("directory_silence_seconds", "Since the directory last answered", sources.watcher.silence_s()),
            ("ready", "1: a request that came now would be answered", sources.readiness.ready),
            ("progress_age_seconds", "Since the last message of a worker", sources.readiness.progress_age_s),
        ):
            yield GaugeMetricFamily(f"headrace_router_{name}", text, value)

    def _counts(self) -> Iterator[Metric]:
        sources = self._sources
        for name, text, value in (
            (
                "index_dropped_blocks",
                "Blocks that the full index passed over",
                sources.view.index.num_dropped,
            ),
            (
                "event_gaps",
                "Times that an event was missing and a worker's blocks were read anew",
                sources.view.num_gaps,
            ),
            ("queue_seconds", "Waited by all that were admitted", sources.admission.waited_s),
            ("redispatches", "Requests sent to another decode worker", sources.tally.redispatches),
        ):
            yield CounterMetricFamily(f"headrace_router_{name}", text, value)
        refused = CounterMetricFamily(
            "headrace_router_refused_requests", "Refused at admission", labels=["reason"]
        )
        for reason in Refusal:
            refused.add_metric([reason], sources.admission.refused[reason])
        tests = CounterMetricFamily(
            "headrace_router_self_tests", "Answers that the router asked for itself", labels=["result"]
        )
        for result in ("ok", "failed"):
            tests.add_metric([result], sources.readiness.self_tests[result])
        yield from (refused, tests)

    def _outcomes(self) -> Iterator[Metric]:
        tally = self._sources.tally
        for name, text, counts in (
            ("requests", "Requests that have ended", tally.requests),
            ("prompt_tokens", "Their prompt tokens", tally.prompt_tokens),
            ("output_tokens", "Their output tokens, of all choices", tally.output_tokens),
        ):
            family = CounterMetricFamily(f"headrace_router_{name}", text, labels=["outcome"])
            for outcome, count in dict(counts).items():
                family.add_metric([outcome], count)
            yield family
        phases = HistogramMetricFamily(
            "headrace_router_phase_seconds", "Where an answered request's time went", labels=["phase"]
        )
        for phase, distribution in tally.phases.items():
            phases.add_metric([phase], distribution.buckets(), distribution.sum)
        yield phases

    def _workers(self) -> Iterator[Metric]:
        """What each was sent and has not finished."""
        ledger, breakers = self._sources.ledger, self._sources.breakers
        rows = [
            (record, ledger.of(record.incarnation)) for record in list(self._sources.view.workers.values())
        ]
        for name, text, values in (
            (
                "pending_prefill_seconds",
                "To be prefilled, as predicted when it was sent",
                [a.pending_prefill_s for _, a in rows],
            ),
            (
                "pending_prefill_tokens",
                "Their tokens",
                [a.pending_prefill_tokens for _, a in rows],
            ),
            ("active_sequences", "To be decoded", [a.active_sequences for _, a in rows]),
            ("active_tokens", "In their contexts", [a.active_tokens for _, a in rows]),
            (
                "breaker_state",
                "0: closed, 1: half-open, 2: open, it gets nothing",
                [_BREAKER[breakers.state(record.incarnation)] for record, _ in rows],
            ),
        ):
            family = GaugeMetricFamily(f"headrace_router_worker_{name}", text, labels=["worker", "role"])
            for (record, _), value in zip(rows, values, strict=True):
                family.add_metric([record.worker_id, record.role], value)
            yield family


def _total(counts: dict[str, int]) -> int:
    return sum(dict(counts).values())
