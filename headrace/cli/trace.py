"""`headrace bench trace`: a trace in figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from headrace.cli.progress import console, output
from headrace.errors import InvalidRequest

if TYPE_CHECKING:
    from headrace.traces.statistics import Sharing, Spread, Statistics


def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Plain, or compressed by gzip.")],
    max_input: Annotated[
        int | None,
        typer.Option(min=1, help="Leave out prompts of more tokens. Default: none.", show_default=False),
    ] = None,
    session_gap: Annotated[
        float,
        typer.Option(min=0.001, help="Mean seconds between starts of sessions, where times are their own."),
    ] = 60.0,
    seed: Annotated[int, typer.Option(help="Of these starts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON on standard output.")] = False,
) -> None:
    """Figures of a request trace: lengths, arrivals, and what caches can spare of its prompts.

    Reads the formats of Mooncake, Qwen-Bailian, the agentic traces (kv-cache-tester) and Azure, told by their content.
    """
    from headrace.traces.reading import read_trace
    from headrace.traces.statistics import statistics_of

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("reading", total=None)
        found = read_trace(file).with_starts(session_gap, seed)
        if max_input is not None:
            found = found.up_to(max_input)
        if not found.requests:
            raise InvalidRequest("--max-input", max_input, "no prompt of the trace is that short")
        statistics = statistics_of(found, on_stage=lambda stage: progress.update(task, description=stage))
    if as_json:
        typer.echo(json.dumps(asdict(statistics), indent=1))
    else:
        output.print(_report(statistics))


def _report(statistics: Statistics) -> Group:
    parts: list[RenderableType] = [_facts(statistics), _lengths(statistics)]
    if statistics.sharing is not None:
        parts += [_sharing(statistics.sharing), _caches(statistics)]
    return Group(*parts)


def _facts(statistics: Statistics) -> Table:
    table = _pairs(f"{statistics.name} ({statistics.format}, sha256 {statistics.sha256[:12]}…)")
    table.add_row("requests", f"{statistics.requests:,}")
    if statistics.sessions:
        table.add_row("sessions", f"{statistics.sessions:,}")
    table.add_row("input : output tokens", f"{statistics.input_per_output:.1f} : 1")
    arrivals = statistics.arrivals
    if arrivals is not None:
        table.add_row("duration, rate", f"{arrivals.duration_s:,.0f} s, {arrivals.rate:.2f} a second")
        table.add_row("different times", f"{arrivals.distinct_times:,}")
        table.add_row("gaps, CV", f"{arrivals.gap_cv:.2f}")
        for window in arrivals.windows:
            table.add_row(
                f"counts per {window.seconds} s",
                f"CV {window.cv:.2f}, peak {window.peak_over_mean:.1f} times the mean, {window.empty:.0%} empty",
            )
    return table


def _lengths(statistics: Statistics) -> Table:
    spreads = {"input": statistics.input_tokens, "output": statistics.output_tokens}
    return _spreads("Tokens", spreads)


def _spreads(title: str, spreads: dict[str, Spread]) -> Table:
    names = ("mean", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "max")
    table = Table("", title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in names:
        table.add_column(name, justify="right")
    for label, spread in spreads.items():
        table.add_row(label, *(f"{getattr(spread, name):,.0f}" for name in names))
    return table


def _sharing(sharing: Sharing) -> Group:
    table = _pairs("Blocks of prompts")
    rows = {
        "accesses, different, repeats": f"{sharing.accesses:,}, {sharing.distinct:,}, {sharing.repeats:,}",
        "used once": f"{sharing.used_once:.1%} of the blocks",
        "infinite cache spares": f"{sharing.hit_blocks:.2%} of blocks, {sharing.hit_tokens:.2%} of tokens",
        "full blocks only": f"{sharing.hit_full_blocks:.2%} of blocks, {sharing.hit_full_tokens:.2%} of tokens",
        "requests that reuse 50 %, 90 %": f"{sharing.half_reused:.1%}, {sharing.mostly_reused:.1%}",
    }
    for top, share in sharing.hits_on_top.items():
        rows[f"hits on the {top:,} most hit"] = f"{share:.1%}"
    for part, share in sharing.accesses_to_top.items():
        rows[f"accesses to the top {part:.1%}"] = f"{share:.1%}"
    for name, value in rows.items():
        table.add_row(name, value)
    spreads = {"blocks between": sharing.reuse_distance, "seconds between": sharing.reuse_s}
    known = {name: spread for name, spread in spreads.items() if spread is not None}
    return Group(table, _spreads("Reuse", known)) if known else Group(table)


def _caches(statistics: Statistics) -> Table:
    table = Table("", title="One cache, least recently used out", title_justify="left", box=SIMPLE_HEAD)
    for capacity in statistics.lru_hit_tokens:
        table.add_column(f"{capacity:,}", justify="right")
    table.add_row("tokens spared", *(f"{share:.1%}" for share in statistics.lru_hit_tokens.values()))
    return table


def _pairs(title: str) -> Table:
    return Table(show_header=False, title=title, title_justify="left", box=None, padding=(0, 2))
