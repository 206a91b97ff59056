"""What became of each request. Latency counts from the moment it was due, so waiting in the client is part of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.bench.serve.answers import Answer, Status
from headrace.bench.serve.workload import Turn


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A line of requests.jsonl. Moments are seconds from the start of the run, None where it did not come to that."""

    request_id: str
    conversation: int
    turn: int
    scheduled_s: float  # due
    woken_s: float  # when the client took it up
    sent_s: float  # later, where the number of requests at once is limited
    end_s: float
    first_token_s: float | None
    prompt_tokens: int
    output_tokens: int
    wanted_tokens: int
    expected_cached_tokens: int  # by a cache that never evicts
    cached_tokens: int | None  # as the server says
    status: Status
    error: str
    finish_reason: str | None
    num_messages: int  # that brought tokens
    itls_ms: list[float]  # a gap for each token but the first; 0 for what comes with another token
    server: dict[str, float | str] = field(default_factory=dict[str, float | str])

    @classmethod
    def of(
        cls, answer: Answer, turn: Turn, moments: Moments, place: tuple[str, int, int], expected_cached: int
    ) -> RequestRecord:
        """`place`: id, number of the conversation, turn."""
        counted = sum(num_tokens for _, num_tokens in answer.arrivals)
        return cls(
            *place,
            scheduled_s=moments.due_s - moments.start_s,
            woken_s=moments.woken_s - moments.start_s,
            sent_s=answer.sent_s - moments.start_s,
            end_s=answer.end_s - moments.start_s,
            first_token_s=answer.arrivals[0][0] - moments.start_s if answer.arrivals else None,
            prompt_tokens=turn.input_tokens if answer.prompt_tokens is None else answer.prompt_tokens,
            output_tokens=counted if answer.output_tokens is None else answer.output_tokens,
            wanted_tokens=turn.output_tokens,
            expected_cached_tokens=expected_cached,
            cached_tokens=answer.cached_tokens,
            status=answer.status,
            error=answer.error,
            finish_reason=answer.finish_reason,
            num_messages=len(answer.arrivals),
            itls_ms=_gaps_ms(answer.arrivals),
            server=answer.server,
        )

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"

    @property
    def ttft_ms(self) -> float:
        """inf: no token came."""
        return _ms(self.scheduled_s, self.first_token_s)

    @property
    def ttft_from_sent_ms(self) -> float:
        return _ms(self.sent_s, self.first_token_s)

    @property
    def e2el_ms(self) -> float:
        return _ms(self.scheduled_s, self.end_s if self.is_ok else None)

    @property
    def tpot_ms(self) -> float | None:
        """None: fewer than two tokens came."""
        if self.first_token_s is None or self.output_tokens < 2:
            return None
        return sum(self.itls_ms) / (self.output_tokens - 1)

    @property
    def tbt10_ms(self) -> float | None:
        """Mean of the slowest tenth of the gaps, as Mooncake counts."""
        if not self.itls_ms:
            return None
        slowest = sorted(self.itls_ms)[-max(1, len(self.itls_ms) // 10) :]
        return sum(slowest) / len(slowest)

    @property
    def lateness_ms(self) -> float:
        """Of the client itself."""
        return 1000 * (self.woken_s - self.scheduled_s)

    def json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Moments:
    """On the clock."""

    start_s: float
    due_s: float
    woken_s: float


def _gaps_ms(arrivals: Iterable[tuple[float, int]]) -> list[float]:
    gaps: list[float] = []
    before: float | None = None
    for at_s, num_tokens in arrivals:
        gaps += [] if before is None else [1000 * (at_s - before)]
        gaps += [0.0] * (num_tokens - 1)
        before = at_s
    return gaps


def _ms(from_s: float, to_s: float | None) -> float:
    return float("inf") if to_s is None else 1000 * (to_s - from_s)
