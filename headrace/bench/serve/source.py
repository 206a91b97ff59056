"""Where plans come from: drawn from distributions, or replayed from a trace. Either can be had at any rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from headrace.bench.serve.arrivals import Arrivals
from headrace.bench.serve.replay import Replay
from headrace.bench.serve.workload import Conversation, Plan, Shape, at_times
from headrace.errors import InvalidRequest
from headrace.traces.trace import Trace

Json = dict[str, Any]


class Source(Protocol):
    def plan(self, rate: float | None, max_tokens: int | None) -> tuple[Plan, Json]:
        """And what the summary says of it. `rate`: in place of the source's own; of a trace a factor. Raises
        InvalidRequest, also where a request can not fit `max_tokens`.
        """
        ...

    def warm_up(self, count: int, max_tokens: int | None) -> Plan:
        """So many first requests."""
        ...


@dataclass(frozen=True, slots=True)
class Drawn:
    """`count` conversations, or those of `duration_s`. `concurrency`: a closed loop, which knows no rate."""

    shape: Shape
    arrivals: Arrivals
    seed: int
    count: int
    duration_s: float | None = None
    concurrency: int | None = None

    def plan(self, rate: float | None, max_tokens: int | None) -> tuple[Plan, Json]:
        arrivals = replace(self.arrivals, rate=rate or self.arrivals.rate)
        if self.concurrency:
            plan = Plan(tuple(self.shape.conversations(self.count, self.seed)), self.concurrency)
        else:
            times = (
                arrivals.within(self.duration_s, self.seed)
                if self.duration_s
                else arrivals.first(self.count, self.seed)
            )
            if not len(times):
                raise InvalidRequest("--duration", self.duration_s, "is over before the first request is due")
            plan = at_times(self.shape.conversations(len(times), self.seed), times.tolist())
        _check(plan.conversations, max_tokens)
        return plan, self._facts(arrivals)

    def warm_up(self, count: int, max_tokens: int | None) -> Plan:
        conversations = self.shape.conversations(count, self.seed)
        _check(conversations, max_tokens)
        return Plan(tuple(_first_turns(conversations)))

    def _facts(self, arrivals: Arrivals) -> Json:
        kind = "closed" if self.concurrency else arrivals.kind
        return {
            "request_rate": None if self.concurrency else arrivals.rate,
            "burstiness": arrivals.burstiness if kind == "gamma" else None,
            "workload": {"arrival": kind, **self.shape.facts()},
        }


@dataclass(frozen=True, slots=True)
class Replayed:
    trace: Trace
    replay: Replay
    seed: int

    def plan(self, rate: float | None, max_tokens: int | None) -> tuple[Plan, Json]:
        replay = replace(self.replay, time_scale=rate or self.replay.time_scale)
        plan, left_out = replay.plan(self.trace, max_tokens, self.seed)
        return plan, {
            "request_rate": len(plan.conversations) / plan.duration_s if plan.duration_s else None,
            "burstiness": None,
            "workload": {
                "arrival": "trace",
                "trace": self.trace.name,
                "format": self.trace.format,
                "sha256": self.trace.sha256,
                "time_scale": replay.time_scale,
                "length_scale": str(replay.length_scale),
                "dejitter": replay.dejitter,
                "left_out": left_out,
            },
        }

    def warm_up(self, count: int, max_tokens: int | None) -> Plan:
        plan, _ = replace(self.replay, max_requests=count).plan(self.trace, max_tokens, self.seed)
        return Plan(tuple(_first_turns(plan.conversations)))


def _first_turns(conversations: Sequence[Conversation]) -> list[Conversation]:
    return [Conversation(conversation.turns[:1]) for conversation in conversations]


def _check(conversations: Sequence[Conversation], max_tokens: int | None) -> None:
    turns = [turn for conversation in conversations for turn in conversation.turns]
    longest = max((turn.input_tokens + turn.output_tokens for turn in turns), default=0)
    if max_tokens is not None and longest > max_tokens:
        raise InvalidRequest(
            "--input-tokens",
            f"{longest} tokens",
            f"prompt and answer together have at most {max_tokens} here",
        )
