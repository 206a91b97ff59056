"""What recent answers say of the fleet and of each worker. Pure functions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from router.console.state import Hits, Latency, Transfers
from router.recent import Answered

RATE_S = 10.0


@dataclass(slots=True)
class Figures:
    """Of one worker, or of all."""

    ttfts_s: list[float] = field(default_factory=list)
    itls_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    reported_tokens: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    lately_sent_bytes: int = 0  # within the last RATE_S
    lately_received_bytes: int = 0
    failures: int = 0

    @property
    def ttft(self) -> Latency:
        return latency(self.ttfts_s)

    @property
    def itl(self) -> Latency:
        return latency(self.itls_s)

    @property
    def hits(self) -> Hits:
        return Hits(self.prompt_tokens, self.predicted_tokens, self.reported_tokens)

    @property
    def transfers(self) -> Transfers:
        return Transfers(
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            sent_bytes_per_s=self.lately_sent_bytes / RATE_S,
            received_bytes_per_s=self.lately_received_bytes / RATE_S,
            failures=self.failures,
        )

    def prefilled(self, answered: Answered) -> None:
        self.ttfts_s.append(answered.ttft_s)
        if answered.cached_tokens is not None:
            self.prompt_tokens += answered.prompt_tokens
            self.predicted_tokens += answered.predicted_tokens
            self.reported_tokens += answered.cached_tokens

    def decoded(self, answered: Answered) -> None:
        if answered.itl_s is not None:
            self.itls_s.append(answered.itl_s)


def of_all(answers: Iterable[Answered]) -> Figures:
    figures = Figures()
    for answered in answers:
        figures.prefilled(answered)
        figures.decoded(answered)
    return figures


def by_worker(answers: Iterable[Answered], now_s: float) -> defaultdict[str, Figures]:
    """By worker id."""
    figures: defaultdict[str, Figures] = defaultdict(Figures)
    for answered in answers:
        owner, reader = figures[answered.prefill_worker], figures[answered.decode_worker]
        owner.prefilled(answered)
        reader.decoded(answered)
        owner.sent_bytes += answered.bytes_moved
        reader.received_bytes += answered.bytes_moved
        if now_s - answered.at_s <= RATE_S:
            owner.lately_sent_bytes += answered.bytes_moved
            reader.lately_received_bytes += answered.bytes_moved
        for worker_id in answered.failed_workers:
            figures[worker_id].failures += 1
    return figures


def latency(seconds: list[float]) -> Latency:
    if not seconds:
        return Latency()
    ordered = sorted(seconds)
    return Latency(len(ordered), _percentile(ordered, 0.5), _percentile(ordered, 0.95))


def _percentile(ordered: list[float], fraction: float) -> float:
    """The least value that so large a part does not exceed."""
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]
