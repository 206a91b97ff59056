"""Two or more runs side by side, each beside the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.bench.serve.results import Run

Json = dict[str, Any]
Better = Literal["lower", "higher"]

# Key, name, format, which direction is better.
FIGURES: tuple[tuple[str, str, str, Better], ...] = (
    ("slo.attainment", "good answers of those offered", ".1%", "higher"),
    ("request_goodput", "good answers/s", ".3f", "higher"),
    ("request_throughput", "answers/s", ".3f", "higher"),
    ("output_throughput", "output tokens/s", ",.1f", "higher"),
    ("median_ttft_ms", "TTFT p50 ms", ",.1f", "lower"),
    ("mean_ttft_ms", "TTFT mean ms", ",.1f", "lower"),
    ("p95_ttft_ms", "TTFT p95 ms", ",.1f", "lower"),
    ("p99_ttft_ms", "TTFT p99 ms", ",.1f", "lower"),
    ("median_itl_ms", "ITL p50 ms", ",.1f", "lower"),
    ("p95_itl_ms", "ITL p95 ms", ",.1f", "lower"),
    ("p99_itl_ms", "ITL p99 ms", ",.1f", "lower"),
    ("median_tpot_ms", "TPOT p50 ms", ",.1f", "lower"),
    ("p95_e2el_ms", "end to end p95 ms", ",.1f", "lower"),
    ("cache.hit_rate_tokens", "prompt tokens cached", ".1%", "higher"),
    ("cost.per_million_output_tokens", "cost of a million output tokens", ",.3f", "lower"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    value: float | None
    ratio: float | None  # to the first run's
    is_clear: bool  # neither interval contains the other's value
    is_better: bool


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    how: str  # to format values
    cells: tuple[Cell, ...]


def compare(runs: Sequence[Run]) -> list[Line]:
    """A line for each figure that some run has."""
    lines: list[Line] = []
    for key, name, how, better in FIGURES:
        cells = tuple(_cell(key, run.summary, runs[0].summary, better) for run in runs)
        if any(cell.value is not None for cell in cells):
            lines.append(Line(name, how, cells))
    return lines


def differences(runs: Sequence[Run]) -> list[str]:
    """What makes the runs less than comparable."""
    found: list[str] = []
    for key, name in (
        ("schedule_sha256", "schedules"),
        ("model_id", "models"),
        ("backend", "protocols"),
        ("slo", "objectives"),
        ("seed", "seeds"),
    ):
        shown = [_limits(run.summary[key]) for run in runs]
        if any(one != shown[0] for one in shown):
            found.append(f"they differ in their {name}")
    return found


def _limits(value: Any) -> Any:
    """Of an objective without what was attained."""
    return (
        {name: limit for name, limit in value.items() if name.endswith("_ms")}
        if isinstance(value, dict)
        else value
    )


def _cell(key: str, summary: Json, base: Json, better: Better) -> Cell:
    value, reference = _value(summary, key), _value(base, key)
    ratio = value / reference if value is not None and reference else None
    is_better = ratio is not None and (ratio < 1 if better == "lower" else ratio > 1)
    return Cell(value, ratio, _are_apart(key, summary, base), is_better)


def _value(summary: Json, key: str) -> float | None:
    found: Any = summary
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _are_apart(key: str, one: Json, other: Json) -> bool:
    """Their intervals do not overlap."""
    name = key.removeprefix("slo.").replace("median_", "p50_")
    first, second = one["intervals"].get(name), other["intervals"].get(name)
    return bool(first and second and (first[1] < second[0] or second[1] < first[0]))
