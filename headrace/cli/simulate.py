"""`headrace simulate`: policies on a trace, in virtual time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from headrace.cli.progress import console, output
from headrace.errors import InvalidRequest
from headrace.simulate.settings import FleetSettings, Sight

if TYPE_CHECKING:
    from headrace.simulate.result import Row
    from headrace.simulate.schemes import Scheme
    from headrace.traces.trace import Trace

_INTERRUPTED = 130
_DEFAULTS = FleetSettings()


def simulate(
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="As `headrace bench trace` reads them.", show_default=False)
    ],
    policy: Annotated[
        str, typer.Option(metavar="LIST", help="Names with commas between them, or all.")
    ] = "predicted_time",
    rate_scale: Annotated[float, typer.Option(min=1e-6, help="Arrivals so many times as dense.")] = 1.0,
    copies: Annotated[
        int, typer.Option(min=1, help="So many of the trace at once, which share no blocks.")
    ] = 1,
    workers: Annotated[int, typer.Option(min=1, max=4096, help="That prefill.")] = _DEFAULTS.num_prefill,
    decode_workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=4096,
            help="0: the workers decode as well. Default: one for each four that prefill.",
            show_default=False,
        ),
    ] = None,
    blocks_per_worker: Annotated[
        int, typer.Option(min=1, help="Of the trace's block size.")
    ] = _DEFAULTS.blocks_per_worker,
    host_blocks_per_worker: Annotated[int, typer.Option(min=0, help="In a host tier below.")] = 0,
    machine: Annotated[
        str,
        typer.Option(
            help="Whose times: 8b-1xh100, 8b-1xh200, 70b-4xh100, 70b-4xh200, 70b-8xh100, 70b-8xh200."
        ),
    ] = _DEFAULTS.machine,
    link: Annotated[
        float, typer.Option(min=0.001, help="GB/s between two workers.")
    ] = _DEFAULTS.link_bytes_per_s / 1e9,
    decode_prefills: Annotated[
        bool, typer.Option("--decode-prefills", help="Decode workers may compute prompts themselves.")
    ] = False,
    routers: Annotated[int, typer.Option(min=1, max=64, help="Requests go to any of them.")] = 1,
    sight: Annotated[
        Sight, typer.Option(help="What routers know of caches: events, or history: what they sent there.")
    ] = Sight.EVENTS,
    event_interval: Annotated[
        float, typer.Option(min=0.001, help="Seconds from one event of a worker to its next.")
    ] = _DEFAULTS.event_interval_s,
    event_delay: Annotated[
        float, typer.Option(min=0.0, help="Seconds until routers have it.")
    ] = _DEFAULTS.event_delay_s,
    event_loss: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share that never arrives.")] = 0.0,
    noise: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="Of all times: the logarithm's standard deviation.")
    ] = 0.0,
    dejitter: Annotated[
        bool,
        typer.Option(
            "--dejitter/--no-dejitter", help="Spread what a coarse clock puts at one time, up to the next."
        ),
    ] = True,
    session_gap: Annotated[
        float,
        typer.Option(min=0.001, help="Mean seconds between starts of sessions, where times are their own."),
    ] = 60.0,
    max_input: Annotated[
        int | None,
        typer.Option(min=1, help="Leave out prompts of more tokens. Default: none.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal results.")] = 0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the rows there too.", show_default=False),
    ] = None,
) -> None:
    """Serve a trace with a fleet in virtual time: policies of the router and of others, side by side.

    A figure of it is a simulation's, not a measurement. Ctrl-C leaves the rows so far.
    """
    from headrace.simulate.schemes import chosen_schemes
    from headrace.simulate.service_times import service_times

    schemes = chosen_schemes(policy)
    service_times(machine)
    settings = FleetSettings(
        num_prefill=workers,
        num_decode=max(1, workers // 4) if decode_workers is None else decode_workers,
        blocks_per_worker=blocks_per_worker,
        host_blocks_per_worker=host_blocks_per_worker,
        machine=machine,
        link_bytes_per_s=link * 1e9,
        decode_prefills=decode_prefills,
        noise=noise,
        num_routers=routers,
        sight=sight,
        event_interval_s=event_interval,
        event_delay_s=event_delay,
        event_loss=event_loss,
    )
    shape = _Shape(rate_scale, copies, dejitter, session_gap, max_input, seed)
    arrivals = _arrivals(trace, shape)
    rows: list[Row] = []
    _write(json_file, arrivals, shape, settings, rows)
    try:
        _run_all(arrivals, schemes, settings, shape, rows, json_file)
    except KeyboardInterrupt:
        console.print("[yellow]stopped[/]; the rows so far:")
        raise typer.Exit(_INTERRUPTED) from None
    finally:
        output.print(_table(arrivals, rows))


@dataclass(frozen=True, slots=True)
class _Shape:
    """How arrivals are made of a trace."""

    rate_scale: float
    copies: int
    dejitter: bool
    session_gap_s: float
    max_input: int | None
    seed: int


def _arrivals(path: Path, shape: _Shape) -> Trace:
    from headrace.traces.reading import read_trace

    trace = read_trace(path).with_starts(shape.session_gap_s, shape.seed)
    if shape.max_input is not None:
        trace = trace.up_to(shape.max_input)
        if not trace.requests:
            raise InvalidRequest("--max-input", shape.max_input, "no prompt of the trace is that short")
    if shape.dejitter:
        trace = trace.dejittered(shape.seed)
    return trace.times(shape.copies).faster(shape.rate_scale).in_order()


def _run_all(
    trace: Trace,
    schemes: Sequence[Scheme],
    settings: FleetSettings,
    shape: _Shape,
    rows: list[Row],
    json_file: Path | None,
) -> None:
    from headrace.simulate.result import row_of
    from headrace.simulate.simulation import Simulation

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True
    ) as progress:
        num_requests = len(trace.requests)
        task = progress.add_task("", total=len(schemes) * num_requests)
        for number, scheme in enumerate(schemes):
            progress.update(task, description=scheme.name)
            simulation = Simulation(trace, scheme, settings, shape.seed)
            done = number * num_requests
            simulation.run(lambda count, done=done: progress.update(task, completed=done + count))
            rows.append(row_of(simulation, scheme.name, shape.seed, shape.rate_scale))
            _write(json_file, trace, shape, settings, rows)


def _write(path: Path | None, trace: Trace, shape: _Shape, settings: FleetSettings, rows: list[Row]) -> None:
    """The same bytes for the same command: nothing of this machine is in it. Raises InvalidRequest."""
    if path is None:
        return
    facts = {"name": trace.name, "format": trace.format, "sha256": trace.sha256}
    content = {
        "trace": facts,
        "arrivals": asdict(shape),
        "fleet": asdict(settings),
        "rows": [asdict(row) for row in rows],
    }
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        raise InvalidRequest("--json", str(path), f"it can not be written: {error.strerror}") from None


def _table(trace: Trace, rows: list[Row]) -> Table:
    title = f"{trace.name}: {len(trace.requests):,} requests, simulated"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("policy")
    for name in ("hits", "fetched", "TTFT mean s", "p50", "p95", "p99", "ITL ms", "busy", "max/mean", ""):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.policy,
            *(f"{row.hit_rate_tokens:.1%}", f"{row.fetched_share:.1%}", f"{row.ttft_mean_s:.3f}"),
            *(f"{row.ttft_p50_s:.3f}", f"{row.ttft_p95_s:.2f}", f"{row.ttft_p99_s:.2f}"),
            *(f"{1e3 * row.itl_mean_s:.1f}", f"{row.busy:.0%}", f"{row.busy_max_over_mean:.2f}"),
            "saturated" if row.saturated else "",
        )
    return table
