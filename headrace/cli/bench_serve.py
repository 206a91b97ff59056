"""`headrace bench serve`: load on a deployment, as its clients see it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from headrace.cli.options import ConfigOption, SetOption, router_address, settings_from
from headrace.cli.progress import console, output
from headrace.config import Settings
from headrace.errors import InvalidRequest

if TYPE_CHECKING:
    from headrace.bench.serve.endpoint import Endpoint, Served
    from headrace.bench.serve.measure import Measurer
    from headrace.bench.serve.records import RequestRecord
    from headrace.bench.serve.source import Source
    from headrace.bench.serve.sweep import Bounds, Probe
    from headrace.bench.serve.workload import Plan

_INTERRUPTED = 130
_DEFAULT_COUNT = 100
_DEFAULT_VOCAB = 32_000  # of an endpoint that does not say; nearly every model has more
_BLOCK_TOKENS = 32
_WHO, _WHEN, _WHAT, _TRACE, _HOW_GOOD = "Endpoint", "Arrivals", "Prompts and answers", "Trace", "Objective"


def serve(
    address: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of a router (gRPC), or the http URL of any server with OpenAI's API. "
            "Default: the local cluster.",
            show_default=False,
            rich_help_panel=_WHO,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="With a URL: chats of words, not completions of token ids.", rich_help_panel=_WHO
        ),
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            help="With a URL. Default: the first that is served.", show_default=False, rich_help_panel=_WHO
        ),
    ] = "",
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help=f"Of the model. Default: as the endpoint says, else {_DEFAULT_VOCAB:,}.",
            show_default=False,
            rich_help_panel=_WHO,
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds until an answer is given up.", rich_help_panel=_WHO)
    ] = 600.0,
    arrival: Annotated[
        str, typer.Option(help="poisson, gamma, constant, burst or closed.", rich_help_panel=_WHEN)
    ] = "poisson",
    rate: Annotated[
        float, typer.Option(help="Requests a second; with turns: conversations.", rich_help_panel=_WHEN)
    ] = 1.0,
    burstiness: Annotated[
        float,
        typer.Option(help="Shape of gamma's gaps: 1 is Poisson, less is burstier.", rich_help_panel=_WHEN),
    ] = 1.0,
    burst_size: Annotated[int, typer.Option(help="Due at once with burst.", rich_help_panel=_WHEN)] = 10,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Conversations at any time with closed.", rich_help_panel=_WHEN)
    ] = 1,
    max_in_flight: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Send no more at once; waiting for that counts as latency. Default: no limit.",
            show_default=False,
            rich_help_panel=_WHEN,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"How many; with turns: conversations. Default: {_DEFAULT_COUNT}, or the whole trace.",
            show_default=False,
            rich_help_panel=_WHEN,
        ),
    ] = None,
    duration_s: Annotated[
        float | None,
        typer.Option(
            "--duration",
            min=0.1,
            help="All that are due within so many seconds, in place of --requests.",
            show_default=False,
            rich_help_panel=_WHEN,
        ),
    ] = None,
    input_tokens: Annotated[
        str,
        typer.Option(
            metavar="LENGTH",
            help="Of a question: N, LOW:HIGH or lognormal:MEAN:SIGMA.",
            rich_help_panel=_WHAT,
        ),
    ] = "512",
    output_tokens: Annotated[
        str,
        typer.Option(metavar="LENGTH", help="Of an answer; ends of text are ignored.", rich_help_panel=_WHAT),
    ] = "64",
    prefix_tokens: Annotated[
        int, typer.Option(min=0, help="Of a system prompt before it; 0: none.", rich_help_panel=_WHAT)
    ] = 0,
    prefixes: Annotated[
        int, typer.Option(min=1, help="Different system prompts.", rich_help_panel=_WHAT)
    ] = 1,
    documents: Annotated[
        int,
        typer.Option(
            min=0, help="Of a library, some of which precede each question; 0: none.", rich_help_panel=_WHAT
        ),
    ] = 0,
    document_tokens: Annotated[int, typer.Option(min=1, help="Of a document.", rich_help_panel=_WHAT)] = 512,
    retrieved: Annotated[int, typer.Option(min=1, help="Documents a question.", rich_help_panel=_WHAT)] = 4,
    shuffle: Annotated[
        bool,
        typer.Option(
            "--shuffle-documents",
            help="In any order, so that fewer prefixes are equal.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    zipf: Annotated[
        float,
        typer.Option(
            min=0.0, help="Popularity of the k-th prefix or document: k ** -zipf.", rich_help_panel=_WHAT
        ),
    ] = 1.0,
    turns: Annotated[
        str, typer.Option(metavar="LENGTH", help="Of a conversation.", rich_help_panel=_WHAT)
    ] = "1",
    think_s: Annotated[
        float,
        typer.Option(
            "--think", min=0.0, help="Mean seconds from an answer to the next turn.", rich_help_panel=_WHAT
        ),
    ] = 0.0,
    temperature: Annotated[float, typer.Option(help="Of sampling.", rich_help_panel=_WHAT)] = 0.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Replay it: of Mooncake, Qwen-Bailian, agentic or Azure format, plain or gzip.",
            show_default=False,
            rich_help_panel=_TRACE,
        ),
    ] = None,
    time_scale: Annotated[float, typer.Option(help="2: twice as fast.", rich_help_panel=_TRACE)] = 1.0,
    length_scale: Annotated[
        str,
        typer.Option(
            metavar="RATIO",
            help="Of prompts, their blocks and answers, such as 1/16.",
            rich_help_panel=_TRACE,
        ),
    ] = "1",
    dejitter: Annotated[
        bool, typer.Option(help="Spread what a coarse clock put at one time.", rich_help_panel=_TRACE)
    ] = True,
    trace_from: Annotated[float, typer.Option(help="Second of the trace.", rich_help_panel=_TRACE)] = 0.0,
    trace_to: Annotated[
        float | None, typer.Option(help="Default: its end.", show_default=False, rich_help_panel=_TRACE)
    ] = None,
    slo: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="What makes an answer good: some of ttft:MS,tpot:MS,tbt10:MS,e2el:MS.",
            rich_help_panel=_HOW_GOOD,
        ),
    ] = "",
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="LOW:HIGH",
            help="Find the highest rate (of a trace: time scale) that meets the objective.",
            show_default=False,
            rich_help_panel=_HOW_GOOD,
        ),
    ] = None,
    attainment: Annotated[
        float, typer.Option(help="Share of good answers that meets it.", rich_help_panel=_HOW_GOOD)
    ] = 0.9,
    gpu_price: Annotated[
        float | None,
        typer.Option(min=0.0, help="Of a GPU for an hour.", show_default=False, rich_help_panel=_HOW_GOOD),
    ] = None,
    gpus: Annotated[float, typer.Option(min=0.0, help="That are paid for.", rich_help_panel=_HOW_GOOD)] = 1.0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before, which do not count.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of times, lengths and texts.")] = 0,
    label: Annotated[str, typer.Option(help="Name of the run in reports.", show_default=False)] = "",
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Results and a report go there.", show_default=False)
    ] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Load a deployment and report what its clients see.

    Latency counts from the moment a request is due, whether or not the one before is answered. Equal seeds ask the
    same at the same times. Where the client itself comes late, no tails are quoted.
    """
    from headrace.bench.serve.arrivals import Arrivals, kind_of
    from headrace.bench.serve.lengths import Lengths
    from headrace.bench.serve.replay import Replay
    from headrace.bench.serve.slo import Objective
    from headrace.bench.serve.source import Drawn, Replayed
    from headrace.bench.serve.summary import Price
    from headrace.bench.serve.sweep import Bounds
    from headrace.bench.serve.workload import Shape
    from headrace.traces.reading import read_trace

    settings = settings_from(config, assignments)
    is_closed = arrival == "closed"
    source: Source
    if trace is not None:
        replay = Replay(
            time_scale, _ratio(length_scale), dejitter, trace_from, trace_to or inf, rate, requests
        )
        source = Replayed(read_trace(trace), replay, seed)
    else:
        shape = Shape(
            Lengths.parse("--input-tokens", input_tokens),
            Lengths.parse("--output-tokens", output_tokens),
            *(prefix_tokens, prefixes, documents, document_tokens, retrieved, shuffle),
            Lengths.parse("--turns", turns),
            think_s,
            zipf,
        )
        arrivals = Arrivals("poisson" if is_closed else kind_of(arrival), rate, burstiness, burst_size)
        count = requests or _DEFAULT_COUNT
        source = Drawn(shape, arrivals, seed, count, duration_s, concurrency if is_closed else None)
    if sweep and is_closed:
        raise InvalidRequest("--sweep", sweep, "a closed loop has no rate")
    if sweep and not slo:
        raise InvalidRequest("--sweep", sweep, "needs --slo, which says what is good")
    objective = Objective.parse("--slo", slo)
    bounds = Bounds.parse("--sweep", sweep, attainment) if sweep else None
    price = Price(gpu_price, gpus) if gpu_price is not None else None
    who = _Who(address, model, settings, temperature, timeout_s, is_chat=chat)
    job = _Job(who, source, bounds, warmup, vocab_size, seed, label, out)
    job.run(objective, price, max_in_flight)


@dataclass(frozen=True, slots=True)
class _Who:
    """Is asked."""

    address: str | None
    model: str
    settings: Settings
    temperature: float
    timeout_s: float
    is_chat: bool

    @property
    def target(self) -> str:
        return self.address or router_address(None, self.settings)

    @property
    def backend(self) -> str:
        if not self.target.startswith(("http://", "https://")):
            return "grpc"
        return "chat" if self.is_chat else "completions"

    def connect(self) -> Endpoint:
        from headrace.bench.serve.grpc_endpoint import GrpcEndpoint
        from headrace.bench.serve.http_endpoint import HttpEndpoint

        client = self.settings.client
        if self.backend == "grpc":
            return GrpcEndpoint(self.target, client, self.temperature, self.timeout_s)
        return HttpEndpoint(
            self.target, client, self.model, self.temperature, self.timeout_s, chat=self.is_chat
        )


@dataclass(frozen=True, slots=True)
class _Job:
    """One call of the command."""

    who: _Who
    source: Source
    bounds: Bounds | None
    num_warm_up: int
    vocab_size: int | None
    seed: int
    label: str
    out: Path | None

    def run(self, objective: Any, price: Any, max_in_flight: int | None) -> None:
        import uvloop

        try:
            uvloop.run(self._run(objective, price, max_in_flight))
        except KeyboardInterrupt:
            where = f"; answers so far: {self.out}/requests.jsonl" if self.out else ""
            console.print(f"[yellow]stopped[/]{where}", highlight=False)
            raise typer.Exit(_INTERRUPTED) from None

    async def _run(self, objective: Any, price: Any, max_in_flight: int | None) -> None:
        from headrace.bench.serve.measure import Measurer
        from headrace.clock import SystemClock

        endpoint = self.who.connect()
        try:
            served = await endpoint.served()
            with _progress() as bar:
                vocab_size = self.vocab_size or served.vocab_size or _DEFAULT_VOCAB
                measurer = Measurer(
                    endpoint, SystemClock(), objective, vocab_size, self.seed, max_in_flight, price, bar.count
                )
                bar.begin("warming up", self.num_warm_up)
                await measurer.warm_up(self.source.warm_up(self.num_warm_up, served.max_tokens))
                if self.bounds is None:
                    await self._once(measurer, served, bar)
                else:
                    await self._sweep(measurer, served, bar, self.bounds)
        finally:
            await endpoint.close()

    async def _once(self, measurer: Measurer, served: Served, bar: _Bar) -> None:
        from headrace.bench.serve.table import summary_table

        plan, facts = self.source.plan(None, served.max_tokens)
        _announce(plan)
        bar.begin("measuring", plan.num_requests)
        summary = await measurer.measure(plan, self._facts(served, facts), self.out)
        output.print(summary_table(summary))
        if self.out:
            _report_run(self.out)

    async def _sweep(self, measurer: Measurer, served: Served, bar: _Bar, bounds: Bounds) -> None:
        from headrace.bench.serve.measure import write_json
        from headrace.bench.serve.sweep import highest_rate, sweep_json
        from headrace.bench.serve.table import summary_table, sweep_table

        num_runs = 0

        async def measure_at(rate: float) -> Any:
            nonlocal num_runs
            num_runs += 1
            plan, facts = self.source.plan(rate, served.max_tokens)
            bar.begin(f"rate {rate:.3g}", plan.num_requests)
            folder = self.out / f"rate-{rate:.4g}" if self.out else None
            return await measurer.measure(plan, self._facts(served, facts), folder, num_runs)

        def on_probe(probes: list[Probe]) -> None:
            if self.out:
                write_json(self.out / "sweep.json", sweep_json(bounds, probes))

        probes = await highest_rate(bounds, measure_at, on_probe)
        content = sweep_json(bounds, probes)
        highest = content["highest_rate"]
        best = next((probe.summary for probe in probes if probe.rate == highest), probes[0].summary)
        output.print(summary_table(best), sweep_table(content))
        if self.out:
            _report_sweep(self.out)

    def _facts(self, served: Served, facts: dict[str, Any]) -> dict[str, Any]:
        target = {"backend": self.who.backend, "endpoint": self.who.target, "model_id": served.model}
        return {"label": self.label or served.model, **target, **facts}


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of `headrace bench serve --out`, or their summary.json.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with figures, too.", show_default=False)
    ] = None,
) -> None:
    """Two or more runs of `headrace bench serve` side by side, each beside the first."""
    from headrace.bench.serve.results import read_runs
    from headrace.bench.serve.table import comparison_table

    if len(runs) < 2:
        raise InvalidRequest("runs", len(runs), "two or more are compared")
    found = read_runs(runs)
    output.print(comparison_table(found))
    if out is not None and _can_draw():
        from headrace.bench.serve.page import comparison_page

        comparison_page(found).write(out)
        _say_where(out)


def _report_run(folder: Path) -> None:
    if _can_draw():
        from headrace.bench.serve.page import run_page
        from headrace.bench.serve.results import read_run

        run_page(read_run(folder)).write(folder / "report.html")
    _say_where(folder)


def _report_sweep(folder: Path) -> None:
    if _can_draw():
        from headrace.bench.serve.page import run_page, sweep_page
        from headrace.bench.serve.results import read_run, read_sweep

        sweep_page(read_sweep(folder)).write(folder / "report.html")
        for run in sorted(folder.glob("rate-*")):
            run_page(read_run(run)).write(run / "report.html")
    _say_where(folder)


def _can_draw() -> bool:
    if find_spec("matplotlib"):
        return True
    console.print(
        "[yellow]no report[/]: it needs matplotlib: pip install 'headrace\\[report]'", highlight=False
    )
    return False


def _say_where(path: Path) -> None:
    console.print(f"written to {path}", highlight=False, soft_wrap=True)


class _Bar:
    """Answers of the run under way."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("connecting", total=None)
        self._failed = 0

    def begin(self, what: str, total: int) -> None:
        self._failed = 0
        self._progress.reset(self._task, total=total, description=what)
        if not console.is_terminal:
            console.print(f"{what}: {total} requests", highlight=False)

    def count(self, record: RequestRecord) -> None:
        self._failed += not record.is_ok
        failed = f", [red]{self._failed} without an answer[/]" if self._failed else ""
        self._progress.update(self._task, advance=1, description=f"measuring{failed}")


@contextmanager
def _progress() -> Generator[_Bar]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, refresh_per_second=4
    ) as progress:
        yield _Bar(progress)


def _announce(plan: Plan) -> None:
    """What a cache could find, before it is measured what it does."""
    bounds = plan.bounds()
    console.print(
        f"{plan.num_requests:,} requests, {bounds.input_tokens:,} prompt tokens; a cache that never evicts finds"
        f" {bounds.hit_rate:.1%} of them and holds {bounds.working_set_tokens:,} tokens"
        f" ({-(-bounds.working_set_tokens // _BLOCK_TOKENS):,} blocks of {_BLOCK_TOKENS})",
        highlight=False,
        soft_wrap=True,
    )


def _ratio(text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise InvalidRequest("--length-scale", text, "must be a ratio, such as 1/16 or 0.25") from None
