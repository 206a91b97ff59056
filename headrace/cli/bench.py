"""`headrace bench …`: how fast this machine is, and how fast it could be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from headrace.cli.options import ConfigOption, ModelOption, SetOption, settings_from
from headrace.cli.progress import console, obtain_model, output
from headrace.config import Settings
from headrace.errors import InvalidRequest
from headrace.model_config import ModelFiles

if TYPE_CHECKING:  # imports torch
    from headrace.bench import kv as kv_bench
    from headrace.bench import router as router_bench
    from headrace.bench.engine import Case, Row, Variant
    from headrace.bench.report import Report

_Name = TypeVar("_Name", bound=str)

_MAX_BATCH, _MAX_TOKENS, _MAX_RUNS = 4096, 1 << 20, 1000
_MAX_BLOCKS = 1 << 16
_MAX_WORKERS, _MAX_INDEXED_BLOCKS = 4096, 10**8
_INTERRUPTED = 130

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@bench.command()
def engine(
    model: ModelOption = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Of cpu (native kernels), torch. Default: both, where the kernels were compiled.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Of weights: float32, bfloat16; with backend cpu also int8, int4, stored (as the files have them).",
        ),
    ] = "float32,bfloat16,int8,int4",
    threads: Annotated[
        str | None, typer.Option(metavar="LIST", help="Default: one per core.", show_default=False)
    ] = None,
    prompt: Annotated[
        str, typer.Option(metavar="LIST", help="Tokens of prefilled prompts; 0: none.")
    ] = "512,4096",
    batch: Annotated[str, typer.Option(metavar="LIST", help="Sequences that decode; 0: none.")] = "1,4,16,64",
    context: Annotated[
        str, typer.Option(metavar="LIST", help="Tokens of each before it decodes.")
    ] = "256,4096",
    runs: Annotated[int, typer.Option(help="Of each case; the median counts.")] = 5,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the rows there too.", show_default=False),
    ] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Prefill and decode of the engine in tokens per second, beside the machine's physical floor.

    LIST is numbers or names with commas between them. Ctrl-C leaves the rows so far.
    """
    num_runs = _in_range("--runs", runs, 1, _MAX_RUNS)
    cases = _cases(
        _numbers("--prompt", prompt, 0, _MAX_TOKENS),
        _numbers("--batch", batch, 0, _MAX_BATCH),
        _numbers("--context", context, 1, _MAX_TOKENS),
    )
    variants = _variants(backend, dtype, threads)
    settings = settings_from(config, assignments, model)
    files = obtain_model(settings.model.ref, settings.model.cache_dir)
    files = files.with_limit(settings.model.max_model_tokens)

    from headrace.bench.report import Report

    report = Report(json, {"name": files.name, "fingerprint": files.fingerprint})
    try:
        _measure_all(files, settings, variants, cases, num_runs, report)
    except KeyboardInterrupt:
        console.print("[yellow]stopped[/]; the rows so far:")
        raise typer.Exit(_INTERRUPTED) from None
    finally:
        output.print(_table(report))


@bench.command()
def kv(
    model: Annotated[
        str, typer.Option(metavar="LIST", help="Whose blocks: smollm2-135m, llama-3.1-8b. Their shape only.")
    ] = "smollm2-135m,llama-3.1-8b",
    transport: Annotated[
        str, typer.Option(metavar="NAME", help="nixl, or local: inside one process.")
    ] = "nixl",
    tls: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="What UCX may use, such as tcp. Default: its own choice.", show_default=False
        ),
    ] = None,
    blocks: Annotated[str, typer.Option(metavar="LIST", help="Blocks of one READ.")] = "1,16,256,4096",
    runs: Annotated[int, typer.Option(help="Of each case at least; the median counts.")] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="Pools that fit caches, seconds in all: a trial, no figures.")
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the rows there too.", show_default=False),
    ] = None,
) -> None:
    """READs of KV blocks from one process into another, beside copies of the same bytes within one.

    LIST is numbers or names with commas between them. Ctrl-C leaves the rows so far.
    """
    from headrace.bench import kv as kv_bench
    from headrace.bench.report import Report, machine_facts

    if tls and transport == "local":
        raise InvalidRequest("--tls", tls, "transport local does not go through UCX")
    [transport_name] = _names("--transport", transport, kv_bench.TRANSPORTS)
    subjects = [
        kv_bench.Subject(name, transport_name, kv_bench.ucx_tls(tls or ""))
        for name in _names("--model", model, tuple(kv_bench.MODELS))
    ]
    counts = _numbers("--blocks", blocks, 1, _MAX_BLOCKS)
    num_runs = _in_range("--runs", runs, 1, _MAX_RUNS)
    effort = kv_bench.QUICK if quick else kv_bench.Effort()
    facts = {"name": model, "transport": transport, "tls": tls or ""}
    report = Report(json, facts, {**machine_facts(), "nixl": version("nixl")})
    try:
        _measure_reads(subjects, counts, num_runs, effort, report)
    except KeyboardInterrupt:
        console.print("[yellow]stopped[/]; the rows so far:")
        raise typer.Exit(_INTERRUPTED) from None
    finally:
        output.print(_reads_table(report))


@bench.command()
def router(
    workers: Annotated[str, typer.Option(metavar="LIST", help="In the router's view.")] = "8,64,512,1024",
    blocks: Annotated[
        str, typer.Option(metavar="LIST", help="Different blocks in its index.")
    ] = "100000,1000000,10000000",
    prompt: Annotated[str, typer.Option(metavar="LIST", help="Tokens of the prompts.")] = "2000,32000",
    quick: Annotated[
        bool, typer.Option("--quick", help="Few of each, seconds in all: a trial, no figures.")
    ] = False,
    overhead: Annotated[
        int, typer.Option(metavar="ROUNDS", help="Instead: what metrics, traces and TLS cost.", min=0)
    ] = 0,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the rows there too.", show_default=False),
    ] = None,
) -> None:
    """Decisions of a router, the memory of its index, and what it adds to a request; workers compute nothing.

    LIST is numbers with commas between them. Ctrl-C leaves the rows so far.
    """
    from headrace.bench import router as router_bench
    from headrace.bench.report import Report
    from headrace.telemetry import configure_logging

    counts = _numbers("--workers", workers, 1, _MAX_WORKERS)
    sizes = _numbers("--blocks", blocks, 1, _MAX_INDEXED_BLOCKS)
    prompts = _numbers("--prompt", prompt, 1, _MAX_TOKENS)
    effort = router_bench.QUICK if quick else router_bench.Effort()
    configure_logging("warning", "bench")  # a line for each request would be measured too
    report = Report(json, {"name": "none"})
    if overhead:
        _measure_overhead(overhead, effort, report)
        return
    try:
        _measure_router(counts, sizes, prompts, effort, report)
    except KeyboardInterrupt:
        console.print("[yellow]stopped[/]; the rows so far:")
        raise typer.Exit(_INTERRUPTED) from None
    finally:
        output.print(_router_table(report))


@bench.command()
def soak(
    streams: Annotated[int, typer.Option(min=1, max=10_000, help="Answers at once.")] = 500,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long.")] = 300.0,
    seed: Annotated[int, typer.Option(help="Of prompts and lengths.")] = 0,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write a row per second there.", show_default=False),
    ] = None,
) -> None:
    """Hold a router under load: its memory from second to second, and what is left when the load ends.

    The worker computes nothing and brings each answer a token every 50 ms. An error of any client ends it.
    """
    import uvloop

    from headrace.bench.relay import LOAD_STEP_S, Load, Sample, router_and_worker
    from headrace.bench.report import Report
    from headrace.telemetry import configure_logging

    configure_logging("warning", "bench")
    report = Report(json, {"name": "none"})
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=seconds)

        def on_sample(sample: Sample) -> None:
            report.add(asdict(sample))
            memory = sample.figures.rss_bytes / 1e6
            text = f"{sample.answers:,} answers, {sample.tokens:,} tokens, {memory:.1f} MB"
            progress.update(task, completed=sample.seconds, description=text)

        with router_and_worker(LOAD_STEP_S) as doors:
            on_sample(uvloop.run(Load(doors, streams, seed).run(seconds, on_sample)))
    output.print(_soak_table(report))


def _soak_table(report: Report) -> Table:
    """The last row is of when all clients had ended."""
    table = Table(title="Router under load", title_justify="left", box=SIMPLE_HEAD)
    for name in ("second", "answers", "tokens", "memory MB", "CPU s", "in flight"):
        table.add_column(name, justify="right")
    every = max(1, len(report.rows) // 10)
    shown = [*report.rows[:-1:every], report.rows[-1]]
    for row in shown:
        figures = row["figures"]
        table.add_row(
            *(f"{row['seconds']:.0f}", f"{row['answers']:,}", f"{row['tokens']:,}"),
            *(f"{figures['rss_bytes'] / 1e6:.1f}", f"{figures['cpu_s']:.1f}"),
            " ".join(f"{name} {count}" for name, count in figures["gauges"].items()),
        )
    return table


def _measure_router(
    counts: Sequence[int],
    sizes: Sequence[int],
    prompts: Sequence[int],
    effort: router_bench.Effort,
    report: Report,
) -> None:
    from headrace.bench.router import measure_decisions, measure_path, why_not

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("through the router", total=len(sizes) * len(counts) * len(prompts))
        for row in measure_path(effort):
            report.add(asdict(row))
        for size in sizes:
            for count in counts:
                case = f"{count:,} workers, {size:,} blocks"
                progress.update(task, description=case)
                reason = why_not(size)
                if reason is not None:
                    report.skip({"workers": count, "indexed_blocks": size}, reason)
                    console.print(f"skipped: {case}: {reason}", highlight=False, soft_wrap=True)
                    progress.advance(task, len(prompts))
                    continue
                for row in measure_decisions(count, size, prompts, effort):
                    report.add(asdict(row))
                    progress.advance(task)


def _measure_overhead(rounds: int, effort: router_bench.Effort, report: Report) -> None:
    from headrace.bench.overhead import measure

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        for news in measure(rounds, effort.requests, effort.relayed_tokens):
            if isinstance(news, str):
                progress.update(task, description=news)
                continue
            for row in news:
                report.add(asdict(row))
    table = Table(title="Router with 64 answers at once", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("with")
    for name in ("relayed/s", "ratio", "CPU us/token", "ratio", "added ms", "ratio"):
        table.add_column(name, justify="right")
    for row in report.rows:
        table.add_row(
            row["extra"],
            *(f"{row['relayed_tokens_per_s']:,.0f}", f"{row['tokens_ratio']:.2f}"),
            *(f"{row['router_cpu_us_per_token']:.1f}", f"{row['cpu_ratio']:.2f}"),
            *(f"{row['added_latency_ms_p50']:.2f}", f"{row['latency_ratio']:.2f}"),
        )
    output.print(table)


def _router_table(report: Report) -> Table:
    table = Table(title="Router", title_justify="left", box=SIMPLE_HEAD)
    formats = {
        "workers": ("workers", ","),
        "indexed_blocks": ("blocks", ","),
        "prompt_tokens": ("prompt", ","),
        "match_us_p50": ("match us", ",.0f"),
        "match_us_p99": ("p99", ",.0f"),
        "decision_us_p50": ("decision us", ",.0f"),
        "decision_us_p99": ("p99", ",.0f"),
        "decisions_per_s": ("decisions/s", ",.0f"),
        "hash_ms_p50": ("hash ms", ".2f"),
        "event_us_p50": ("event us", ",.0f"),
        "bytes_per_entry": ("bytes/entry", ".1f"),
        "added_latency_ms_p50": ("added ms", ".2f"),
        "streams": ("answers", ","),
        "relayed_tokens_per_s": ("relayed/s", ",.0f"),
        "router_cpu_us_per_token": ("CPU us/token", ",.1f"),
    }
    for name, _ in formats.values():
        table.add_column(name, justify="right")
    for row in report.rows:
        table.add_row(
            *("" if row[key] is None else format(row[key], how) for key, (_, how) in formats.items())
        )
    return table


def _measure_reads(
    subjects: Sequence[kv_bench.Subject],
    counts: Sequence[int],
    num_runs: int,
    effort: kv_bench.Effort,
    report: Report,
) -> None:
    from headrace.bench.kv import ORDERS, measure

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=len(subjects) * len(counts) * len(ORDERS))
        for subject in subjects:
            progress.update(task, description=f"{subject.model}: starting two processes")
            with closing(measure(subject, counts, num_runs, effort)) as rows:
                for row in rows:
                    report.add(asdict(row))
                    progress.update(task, advance=1, description=f"{row.model}: {row.blocks:,} {row.order}")


def _reads_table(report: Report) -> Table:
    title = f"READs over {report.model['transport']} {report.model['tls']}".rstrip()
    table = Table(title=f"{title}: GB/s", title_justify="left", box=SIMPLE_HEAD)
    for name in ("model", "order"):
        table.add_column(name)
    numbers = ("blocks", "READ", "memcpy", "of it", "scatter", "of it", "us/block", "spread", "runs")
    for name in (*numbers, "idle CPU", "serving CPU"):
        table.add_column(name, justify="right")
    for row in report.rows:
        serving = row["serving_cpu"]
        table.add_row(
            *(row["model"], row["order"], f"{row['blocks']:,}", f"{row['gb_per_s']:.2f}"),
            *(f"{row['memcpy_gb_per_s']:.2f}", f"{row['of_memcpy']:.0%}"),
            *(f"{row['scatter_gb_per_s']:.2f}", f"{row['of_scatter']:.0%}"),
            *(f"{row['latency_us']:,.1f}", f"{row['spread']:.0%}", str(row["rounds"])),
            f"{max(row['owner_idle_cpu'], row['reader_idle_cpu']):.1%}",
            "" if serving is None else f"{serving:.1%}",
        )
    return table


def _measure_all(
    files: ModelFiles,
    settings: Settings,
    variants: Sequence[Variant],
    cases: Sequence[Case],
    num_runs: int,
    report: Report,
) -> None:
    from headrace.bench.engine import measure, why_not

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=len(variants) * len(cases))
        for variant in variants:
            possible: list[Case] = []
            for case in cases:
                reason = why_not(variant, case, files.config, settings, num_runs)
                if reason is None:
                    possible.append(case)
                    continue
                report.skip({**_facts(variant), **asdict(case)}, reason)
                console.print(
                    f"skipped: {_name(variant)}, {_case_name(case)}: {reason}",
                    highlight=False,
                    soft_wrap=True,
                )
                progress.advance(task)
            if not possible:
                continue
            progress.update(task, description=f"{_name(variant)}: loading, {_case_name(possible[0])}")
            # What comes after the row that just came.
            following = [*(_case_name(case) for case in possible[1:]), "done"]
            with closing(measure(files, settings, variant, possible, num_runs)) as rows:
                for row, next_name in zip(rows, following, strict=True):
                    report.add(asdict(row))
                    progress.update(task, advance=1, description=f"{_name(variant)}: {next_name}")
                    if not console.is_terminal:
                        console.print(_line(row), highlight=False, soft_wrap=True)


def _variants(backends: str | None, dtypes: str, threads: str | None) -> list[Variant]:
    """Raises InvalidRequest."""
    from headrace.bench.engine import BACKENDS, DTYPES, Variant
    from headrace.engine.native import library

    has_kernels = library.load() is not None
    num_cores = len(os.sched_getaffinity(0))
    thread_counts = _numbers("--threads", threads, 1, num_cores) if threads is not None else [num_cores]
    chosen_backends = _names("--backend", backends or ("cpu,torch" if has_kernels else "torch"), BACKENDS)
    chosen_dtypes = _names("--dtype", dtypes, DTYPES)
    if "cpu" in chosen_backends and not has_kernels:
        raise InvalidRequest("--backend", "cpu", "it needs the native kernels, which were not compiled here")
    variants = [
        Variant(backend, dtype, number)
        for number in thread_counts
        for backend in chosen_backends
        for dtype in chosen_dtypes
    ]
    possible = [variant for variant in variants if variant.is_possible]
    if not possible:
        raise InvalidRequest("--dtype", dtypes, "backend torch computes with float32 and bfloat16 only")
    return possible


def _cases(prompts: list[int], batches: list[int], contexts: list[int]) -> list[Case]:
    from headrace.bench.engine import Case

    prefills = [Case("prefill", 1, num_tokens) for num_tokens in prompts if num_tokens]
    decodes = [Case("decode", size, num_tokens) for num_tokens in contexts for size in batches if size]
    if not prefills and not decodes:
        raise InvalidRequest(
            "--prompt and --batch", 0, "one of them must be more than 0: nothing is left to measure"
        )
    return [*prefills, *decodes]


def _names(option: str, text: str, allowed: Sequence[_Name]) -> list[_Name]:
    """Without repetitions, in the order given."""
    known = {str(name): name for name in allowed}
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise InvalidRequest(option, word, f"it must be of {', '.join(allowed)}")
    return list(dict.fromkeys(known[word] for word in words))


def _numbers(option: str, text: str, low: int, high: int) -> list[int]:
    """Without repetitions, in the order given."""
    numbers: list[int] = []
    for word in text.split(","):
        try:
            number = int(word)
        except ValueError:
            raise InvalidRequest(option, word, f"it must be a whole number from {low} to {high}") from None
        numbers.append(_in_range(option, number, low, high))
    return list(dict.fromkeys(numbers))


def _in_range(option: str, number: int, low: int, high: int) -> int:
    if not low <= number <= high:
        raise InvalidRequest(option, number, f"it must be from {low} to {high}")
    return number


def _table(report: Report) -> Table:
    table = Table(title=f"{report.model['name']}: tokens per second", title_justify="left", box=SIMPLE_HEAD)
    for name in ("phase", "backend", "dtype"):
        table.add_column(name)
    numbers = (
        "threads",
        "batch",
        "context",
        "tokens/s",
        "floor",
        "of it",
        "step ms",
        "overhead ms",
        "GB/s",
        "GFLOP/s",
    )
    for name in numbers:
        table.add_column(name, justify="right")
    for row in report.rows:
        table.add_row(
            *(str(row[key]) for key in ("phase", "backend", "dtype", "threads", "batch", "context")),
            *(
                f"{row['tokens_per_s']:,.1f}",
                f"{row['floor_tokens_per_s']:,.1f}",
                f"{row['fraction_of_floor']:.0%}",
            ),
            *(f"{row['step_ms']:.2f}", f"{row['overhead_ms']:.2f}"),
            *(f"{row['read_gb_per_s']:.1f}", f"{row['gemm_gflops']:.0f}"),
        )
    return table


def _facts(variant: Variant) -> dict[str, object]:
    return {"backend": variant.backend, "dtype": variant.dtype, "threads": variant.num_threads}


def _name(variant: Variant) -> str:
    return f"{variant.backend} {variant.dtype}, {variant.num_threads} threads"


def _case_name(case: Case) -> str:
    if case.phase == "prefill":
        return f"prefill {case.context:,}"
    return f"decode {case.batch} at {case.context:,}"


def _line(row: Row) -> str:
    where = f"{row.phase} {row.backend} {row.dtype}, {row.threads} threads, batch {row.batch}, context {row.context}"
    return f"{where}: {row.tokens_per_s:,.1f} tokens/s, floor {row.floor_tokens_per_s:,.1f}"
