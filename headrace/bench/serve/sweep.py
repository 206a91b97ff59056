"""The highest rate at which enough answers are good, found by bisection on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidRequest

SCHEMA = "headrace.bench.sweep/1"
_QUOTED = ("median_ttft_ms", "p95_ttft_ms", "median_itl_ms", "p95_itl_ms", "output_throughput", "duration")

Json = dict[str, Any]
MeasureAt = Callable[[float], Awaitable[Json]]  # a summary


@dataclass(frozen=True, slots=True)
class Bounds:
    """Rates between which the highest one is looked for, and how good is good enough."""

    low: float
    high: float
    attainment: float  # share of what was offered that must be good
    resolution: float = 1.1  # ends when the two nearest rates differ by this factor

    @classmethod
    def parse(cls, option: str, text: str, attainment: float) -> Bounds:
        """`LOW:HIGH`. Raises InvalidRequest."""
        try:
            low, high = map(float, text.split(":"))
        except ValueError:
            low = high = 0.0
        if not 0 < low < high < math.inf:
            raise InvalidRequest(option, text, "must be LOW:HIGH, two rates above 0")
        if not 0 < attainment <= 1:
            raise InvalidRequest("--attainment", attainment, "must be above 0 and at most 1")
        return cls(low, high, attainment)


@dataclass(frozen=True, slots=True)
class Probe:
    rate: float
    attainment: float
    goodput: float
    is_met: bool
    summary: Json


async def highest_rate(
    bounds: Bounds, measure_at: MeasureAt, on_probe: Callable[[list[Probe]], None] = lambda _: None
) -> list[Probe]:
    """All probes in the order in which they were made. `on_probe` gets those so far, after each.

    A run whose client lagged counts as missed: nobody knows what its server did.
    """
    probes: list[Probe] = []

    async def is_met(rate: float) -> bool:
        summary = await measure_at(rate)
        attained: float = summary["slo"]["attainment"]
        met = attained >= bounds.attainment and summary["client"]["valid"]
        probes.append(Probe(rate, attained, summary["request_goodput"], met, summary))
        on_probe(probes)
        return met

    low, high = bounds.low, bounds.high
    if not await is_met(low) or await is_met(high):
        return probes
    while high / low > bounds.resolution:
        middle = math.sqrt(low * high)
        if await is_met(middle):
            low = middle
        else:
            high = middle
    return probes


def sweep_json(bounds: Bounds, probes: list[Probe]) -> Json:
    """`runs` by rate, without their timelines; those are in the runs' own folders. `highest_rate` None: none."""
    highest = max((probe.rate for probe in probes if probe.is_met), default=None)
    runs = [
        {
            "rate": probe.rate,
            "is_met": probe.is_met,
            "attainment": probe.attainment,
            "request_goodput": probe.goodput,
            "interval": probe.summary["intervals"].get("attainment"),
            "valid": probe.summary["client"]["valid"],
            "saturated": probe.summary["timeline"]["saturated"],
            **{name: probe.summary.get(name) for name in _QUOTED},
        }
        for probe in sorted(probes, key=lambda probe: probe.rate)
    ]
    first = probes[0].summary
    return {
        "schema": SCHEMA,
        **{name: first.get(name) for name in ("label", "backend", "model_id", "date", "seed", "machine")},
        "workload": first.get("workload"),
        "attainment": bounds.attainment,
        "highest_rate": highest,
        "is_upper_bound_met": highest == bounds.high,
        "runs": runs,
    }
