"""When an answer was good: each limit of the objective holds for it. What failed or was refused never is."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.bench.serve.records import RequestRecord
from headrace.errors import InvalidRequest

METRICS = ("ttft", "tpot", "tbt10", "e2el")


@dataclass(frozen=True, slots=True)
class Objective:
    """`limits_ms` by metric. Without limits every complete answer is good."""

    limits_ms: dict[str, float]

    @classmethod
    def parse(cls, option: str, text: str) -> Objective:
        """`ttft:2000,tpot:100`. Raises InvalidRequest."""
        limits_ms: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, number = part.strip().partition(":")
            try:
                limit_ms = float(number)
            except ValueError:
                limit_ms = 0.0
            if name not in METRICS or not 0 < limit_ms < float("inf"):
                raise InvalidRequest(
                    option, part, f"must be METRIC:MS, with a metric of {', '.join(METRICS)}"
                )
            limits_ms[name] = limit_ms
        return cls(limits_ms)

    def is_met(self, record: RequestRecord) -> bool:
        return record.is_ok and all(self.meets(record, name) for name in self.limits_ms)

    def meets(self, record: RequestRecord, name: str) -> bool:
        """A metric that the answer is too short for is met."""
        value: float | None = getattr(record, f"{name}_ms")
        return record.is_ok and (value is None or value <= self.limits_ms[name])
