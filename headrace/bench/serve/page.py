"""Results as one page of HTML that needs nothing else, and its figures as PNG. Needs the extra `report`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from matplotlib.figure import Figure

from headrace.bench.serve import plots
from headrace.bench.serve.comparison import compare, differences
from headrace.bench.serve.results import Run
from headrace.bench.serve.table import METRICS, notes_on, verdict
from headrace.errors import InvalidRequest

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Picture:
    name: str  # of its file
    caption: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    tone: str = ""  # better or worse


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    subtitle: str
    notes: Sequence[str]
    tiles: Sequence[tuple[str, str]]
    tables: Sequence[Table]
    pictures: Sequence[Picture]
    sources: Sequence[tuple[str, str]]  # name, text

    def html(self) -> str:
        template = files("headrace.bench.serve").joinpath("page.html").read_text()
        figures = [{"svg": _inline(picture.figure), "caption": picture.caption} for picture in self.pictures]
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "pictures"}
        return Environment(autoescape=True).from_string(template).render(**fields, figures=figures)

    def write(self, path: Path) -> None:
        """The page, and its figures in a folder `plots` beside it. Raises InvalidRequest."""
        try:
            folder = path.parent / "plots"
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(self.html())
            for picture in self.pictures:
                (folder / f"{picture.name}.png").write_bytes(plots.png(picture.figure))
        except OSError as error:
            raise InvalidRequest("--out", str(path), f"it can not be written: {error.strerror}") from None


def run_page(run: Run) -> Page:
    summary = run.summary
    return Page(
        f"{run.name} under load",
        _about(summary),
        notes_on(summary),
        _tiles(summary),
        [_latencies(summary), *_phases(summary["pd"])],
        _pictures([run]),
        [("Everything in figures (summary.json)", _source(summary))],
    )


def comparison_page(runs: Sequence[Run]) -> Page:
    return Page(
        " · ".join(run.name for run in runs),
        f"each beside {runs[0].name}; {_about(runs[0].summary)}",
        [*differences(runs), *(f"{run.name}: {note}" for run in runs for note in notes_on(run.summary))],
        (),
        [_side_by_side(runs)],
        _pictures(runs),
        [(run.name, _source(run.summary)) for run in runs],
    )


def sweep_page(sweep: Json) -> Page:
    machine = sweep["machine"]
    columns = (
        "rate",
        "good answers",
        "95 %",
        "goodput/s",
        "TTFT p50 ms",
        "TTFT p95",
        "ITL p50 ms",
        "ITL p95",
        "output tokens/s",
        "",
    )
    rows = [
        [
            *(_number(run["rate"], ".3g"), _number(run["attainment"], ".1%")),
            Cell(f"{run['interval'][0]:.0%} to {run['interval'][1]:.0%}" if run["interval"] else ""),
            _number(run["request_goodput"], ".3g"),
            *(
                _number(run[name], ",.1f")
                for name in ("median_ttft_ms", "p95_ttft_ms", "median_itl_ms", "p95_itl_ms")
            ),
            _number(run["output_throughput"], ",.1f"),
            Cell("meets it", "better")
            if run["is_met"]
            else Cell("" if run["valid"] else "client late", "worse"),
        ]
        for run in sweep["runs"]
    ]
    picture = Picture(
        "rates", "The bars span 95 %; the grey line is where every answer would be good.", plots.rates(sweep)
    )
    return Page(
        f"{sweep['label']}: {verdict(sweep)}",
        f"{sweep['backend']}, {sweep['model_id']}, seed {sweep['seed']}; {machine['processor']}, {sweep['date']}",
        (),
        (),
        [Table("Rates", columns, rows)],
        [picture],
        [("Everything in figures (sweep.json)", _source(sweep))],
    )


def _pictures(runs: Sequence[Run]) -> list[Picture]:
    parts: list[tuple[str, Callable[[Sequence[Run]], Figure], str]] = [
        (
            "latency",
            plots.latency_cdfs,
            "From when a request was due. Gaps are those of all answers; tokens of one message have none.",
        ),
        (
            "over_time",
            plots.over_time,
            "A number under way that grows all the while means that the rate can not be kept up.",
        ),
        ("ttft_by_prompt", plots.ttft_by_prompt, "A dot is a request."),
    ]
    if any(record.cached_tokens is not None for run in runs for record in run.complete):
        parts.append(
            (
                "cache",
                plots.cache_hits,
                "Dashed: a cache that never evicts, which knows each prompt as soon as it is asked.",
            )
        )
    if len(runs) == 1:
        parts.append(("lanes", plots.lanes, "A bar is a request, from when it was due."))
    if not any(run.complete for run in runs):
        return []
    return [Picture(name, caption, plot(runs)) for name, plot, caption in parts]


def _about(summary: Json) -> str:
    machine = summary["machine"]
    workload = ", ".join(f"{name} {value}" for name, value in summary.get("workload", {}).items() if value)
    return (
        f"{summary['backend']} at {summary['endpoint']}, {summary['model_id']}; {workload}; seed {summary['seed']};"
        f" {machine['processor']}, {machine['cores']} cores, Headrace {machine['headrace']}, {summary['date']}"
    )


def _tiles(summary: Json) -> list[tuple[str, str]]:
    cache, slo = summary["cache"], summary["slo"]
    found = [("complete answers", f"{summary['completed']:,} of {summary['num_prompts']:,}")]
    if len(slo) > 1:
        limits = ", ".join(
            f"{name.removesuffix('_ms').upper()} ≤ {limit:g} ms"
            for name, limit in slo.items()
            if name.endswith("_ms")
        )
        found.append((f"good: {limits}", f"{slo['attainment']:.1%}"))
    found += [
        ("requests a second, answered", f"{summary['request_throughput']:.3g}"),
        ("output tokens a second", f"{summary['output_throughput']:,.1f}"),
        ("TTFT p50, from when due", _number(summary.get("median_ttft_ms"), ",.0f").text + " ms"),
        ("ITL p50", _number(summary.get("median_itl_ms"), ",.1f").text + " ms"),
    ]
    if cache["hit_rate_tokens"] is not None:
        found.append(
            (
                f"prompt tokens cached, of {cache['bound_infinite']:.0%} possible",
                f"{cache['hit_rate_tokens']:.1%}",
            )
        )
    if summary["cost"]:
        found.append(
            ("a million output tokens", _number(summary["cost"]["per_million_output_tokens"], ",.3f").text)
        )
    return found


def _latencies(summary: Json) -> Table:
    columns = ("mean", "median", "p90", "p95", "p99")
    rows: list[list[Cell]] = []
    for key, name in METRICS.items():
        if f"mean_{key}_ms" in summary:
            interval = summary["intervals"].get(f"p95_{key}_ms")
            spread = f"{interval[0]:,.0f} to {interval[1]:,.0f}" if interval else "-"
            rows.append(
                [
                    Cell(name),
                    *(_number(summary[f"{column}_{key}_ms"], ",.1f") for column in columns),
                    Cell(spread),
                ]
            )
    return Table(
        "Latency, ms", ("", *columns, "p95, with 95 %"), rows, f"Intervals: {summary['intervals']['method']}."
    )


def _phases(phases: Json) -> list[Table]:
    names = {
        "queue_ms": "waiting in the router",
        "worker_queue_ms": "waiting at a worker",
        "prefill_ms": "prefill",
        "kv_transfer_ms": "KV transfer, sum of reads",
        "decode_ms": "decode",
    }
    columns = ("mean", "p50", "p95", "p99")
    rows = [
        [Cell(name), *(_number(phases[key][column], ",.1f") for column in columns)]
        for key, name in names.items()
        if key in phases
    ]
    return [Table("Where the server says the time went, ms", ("", *columns), rows)] if rows else []


def _side_by_side(runs: Sequence[Run]) -> Table:
    rows: list[list[Cell]] = []
    for line in compare(runs):
        row = [Cell(line.name), _number(line.cells[0].value, line.how)]
        for cell in line.cells[1:]:
            row.append(_number(cell.value, line.how))
            tone = ("better" if cell.is_better else "worse") if cell.is_clear else ""
            row.append(Cell("-" if cell.ratio is None else f"× {cell.ratio:.2f}", tone))
        rows.append(row)
    columns = ["", runs[0].name, *(name for run in runs[1:] for name in (run.name, "ratio"))]
    return Table("Side by side", columns, rows, "Coloured where the 95 % intervals do not overlap.")


def _number(value: float | None, how: str) -> Cell:
    return Cell("-" if value is None else format(value, how))


def _source(content: Json) -> str:
    return json.dumps({name: value for name, value in content.items() if name != "timeline"}, indent=1)


def _inline(figure: Figure) -> Markup:
    """With the page's colours."""
    text = plots.svg(figure)
    return Markup(text.replace(plots.INK, "var(--ink)").replace(plots.GRID, "var(--rule)"))
