"""A summary in the terminal, in the order in which vLLM prints its own; below it what vLLM does not have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.bench.serve.comparison import compare, differences
from headrace.bench.serve.results import Run

Json = dict[str, Any]

METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "tbt10": "Slowest tenth of gaps",
    "e2el": "End to end",
}
_SLACK = 0.01  # what chance makes equal, and answers that were not planned
_COLUMNS = ("mean", "median", "p90", "p95", "p99")


def summary_table(summary: Json) -> RenderableType:
    facts = Table(show_header=False, box=None, padding=(0, 2))
    facts.add_column()
    facts.add_column(justify="right")
    for name, value in _facts(summary):
        facts.add_row(name, value)
    notes = [Text(note, style="bold red") for note in notes_on(summary)]
    title = Text(f"{summary['label']}, {summary['backend']}", style="bold")
    return Group(title, facts, _latencies(summary), *notes)


def notes_on(summary: Json) -> list[str]:
    """What a reader must know before believing the figures."""
    notes: list[str] = []
    if summary["client"]["reason"]:
        notes.append(summary["client"]["reason"])
    if summary["timeline"]["saturated"]:
        notes.append(
            "saturated: requests piled up all the while, so latencies depend on how long the run was"
        )
    cache = summary["cache"]
    if (cache["hit_rate_tokens"] or 0.0) > cache["bound_infinite"] + _SLACK:
        notes.append(
            "caches knew prompts of this run from before it: take another --seed, or start the server anew"
        )
    if summary["cut_short"]:
        notes.append(
            f"{summary['cut_short']:,} answers are shorter than asked for: is ignore_eos not kept there?"
        )
    if summary["errors"]:
        notes += [f"{count:,} × {error}" for error, count in summary["errors"].items()]
    return notes


def sweep_table(sweep: Json) -> RenderableType:
    table = Table(title="Rates", title_justify="left", box=SIMPLE_HEAD)
    for name in ("rate", "good answers", "95 %", "goodput/s", "TTFT p50 ms", "p95", "ITL p50 ms", "p95", ""):
        table.add_column(name, justify="right")
    for run in sweep["runs"]:
        low, high = run["interval"] or (run["attainment"],) * 2
        latencies = ("median_ttft_ms", "p95_ttft_ms", "median_itl_ms", "p95_itl_ms")
        table.add_row(
            *(f"{run['rate']:.3g}", f"{run['attainment']:.1%}", f"{low:.0%} to {high:.0%}"),
            f"{run['request_goodput']:.3g}",
            *(_shown(run[name], ",.1f") for name in latencies),
            "meets it" if run["is_met"] else "client late" if not run["valid"] else "",
        )
    return Group(table, Text(verdict(sweep), style="bold"))


def comparison_table(runs: Sequence[Run]) -> RenderableType:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("")
    for number, run in enumerate(runs):
        table.add_column(run.name, justify="right")
        if number:
            table.add_column("ratio", justify="right")
    for line in compare(runs):
        row = [line.name, _shown(line.cells[0].value, line.how)]
        for cell in line.cells[1:]:
            ratio = "-" if cell.ratio is None else f"× {cell.ratio:.2f}"
            tone = ("green" if cell.is_better else "red") if cell.is_clear else ""
            row += [_shown(cell.value, line.how), f"[{tone}]{ratio}[/]" if tone else ratio]
        table.add_row(*row)
    notes = [Text(note, style="bold red") for note in differences(runs)]
    return Group(table, Text("Coloured where the 95 % intervals do not overlap.", style="dim"), *notes)


def verdict(sweep: Json) -> str:
    highest = sweep["highest_rate"]
    share = f"{sweep['attainment']:.0%} of the answers are good"
    if highest is None:
        return f"at none of these rates {share}"
    return f"highest rate at which {share}: {highest:.3g}" + (
        " or more" if sweep["is_upper_bound_met"] else ""
    )


def _facts(summary: Json) -> Iterator[tuple[str, str]]:
    counts = f"{summary['completed']:,} of {summary['num_prompts']:,}"
    missed = [
        f"{summary[name]:,} {name.replace('_', ' ')}"
        for name in ("rejected", "failed", "timeouts", "not_sent")
        if summary[name]
    ]
    yield "Complete answers", ", ".join([counts, *missed])
    yield "Duration", f"{summary['duration']:.1f} s"
    rate = summary["request_rate"]
    yield "Requests/s asked, answered", f"{_shown(rate, '.3g')}, {summary['request_throughput']:.3g}"
    yield "Prompt and output tokens", f"{summary['total_input_tokens']:,}, {summary['total_output_tokens']:,}"
    yield (
        "Output and all tokens/s",
        f"{summary['output_throughput']:,.1f}, {summary['total_token_throughput']:,.1f}",
    )
    if len(summary["slo"]) > 1:
        yield "Good answers", f"{summary['slo']['attainment']:.1%}, {summary['request_goodput']:.3g}/s"
    yield from _cache(summary["cache"])
    if summary["routing"].get("decode_max_over_mean"):
        routing = summary["routing"]
        shown = [
            f"{role} {_shown(routing.get(f'{role}_max_over_mean'), '.2f')}" for role in ("prefill", "decode")
        ]
        yield "Busiest worker over the mean", ", ".join(shown)
    if summary["cost"]:
        yield "Cost of a million output tokens", _shown(summary["cost"]["per_million_output_tokens"], ",.3f")
    client = summary["client"]
    yield (
        "Client's own lateness p99, max",
        f"{max(client['lateness_ms']['p99'], client['stall_ms']['p99']):.1f}, "
        f"{max(client['lateness_ms']['max'], client['stall_ms']['max']):.1f} ms",
    )


def _cache(cache: Json) -> Iterator[tuple[str, str]]:
    told = cache["hit_rate_tokens"]
    found = "not told" if told is None else f"{told:.1%}"
    yield "Cached prompt tokens", f"{found} of {cache['bound_infinite']:.1%} that could be"


def _latencies(summary: Json) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("ms, from when it was due")
    for name in (*_COLUMNS, "95 % of p99"):
        table.add_column(name, justify="right")
    for key, name in METRICS.items():
        if f"mean_{key}_ms" not in summary:
            continue
        interval = summary["intervals"].get(f"p99_{key}_ms")
        table.add_row(
            name,
            *(_shown(summary[f"{column}_{key}_ms"], ",.1f") for column in _COLUMNS),
            f"{interval[0]:,.0f} to {interval[1]:,.0f}" if interval else "-",
        )
    return table


def _shown(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)
