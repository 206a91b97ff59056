"""`headrace bench serve`: load on a deployment, as its clients see it."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from headrace.cli.options import ConfigOption, SetOption, router_address, settings_from
from headrace.cli.progress import console, output
from headrace.config import Settings
from headrace.errors import InvalidRequest

if TYPE_CHECKING:
    from headrace.bench.serve.endpoint import Endpoint, Served
    from headrace.bench.serve.measure import Measurer
    from headrace.bench.serve.records import RequestRecord
    from headrace.bench.serve.workload import Plan

_INTERRUPTED = 130
_DEFAULT_VOCAB = 32_000  # of an endpoint that does not say; nearly every model has more


def serve(
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            help="HOST:PORT of a router (gRPC), or http(s)://… of any server with OpenAI's API. Default: the local cluster.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="With a URL: chats of words, not completions of token ids.")] = False,
    model: Annotated[str, typer.Option("--model", help="With a URL. Default: the first one served.", show_default=False)] = "",
    arrival: Annotated[str, typer.Option(help="poisson, gamma, constant, burst.")] = "poisson",
    rate: Annotated[float, typer.Option(help="Requests (or conversations) a second.")] = 1.0,
    burstiness: Annotated[float, typer.Option(help="Of gamma: shape of the gaps; 1 is Poisson, less is burstier.")] = 1.0,
    burst_size: Annotated[int, typer.Option(help="Of burst: requests due at once.")] = 10,
    requests: Annotated[int, typer.Option(min=1, help="Requests, or conversations where these have turns.")] = 100,
    input_tokens: Annotated[str, typer.Option(metavar="LENGTH", help="Of a question: N, LOW:HIGH, or lognormal:MEAN:SIGMA.")] = "512",
    output_tokens: Annotated[str, typer.Option(metavar="LENGTH", help="Of an answer.")] = "64",
    warmup: Annotated[int, typer.Option(min=0, help="Requests before, which do not count.")] = 3,
    slo: Annotated[str, typer.Option("--slo", metavar="LIST", help="A good answer: ttft:MS,tpot:MS,tbt10:MS,e2el:MS.")] = "",
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds until an answer is given up.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Of times, lengths and texts.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Results go there.", show_default=False)] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Load a deployment and report what its clients see: latencies from when requests were due, goodput, cache hits."""
    import uvloop

    from headrace.bench.serve.arrivals import KINDS, Arrivals
    from headrace.bench.serve.lengths import Lengths
    from headrace.bench.serve.slo import Objective
    from headrace.bench.serve.workload import Shape, at_times

    if arrival not in KINDS:
        raise InvalidRequest("--arrival", arrival, f"must be of {', '.join(KINDS)}")
    settings = settings_from(config, assignments)
    shape = Shape(Lengths.parse("--input-tokens", input_tokens), Lengths.parse("--output-tokens", output_tokens))
    arrivals = Arrivals(arrival, rate, burstiness, burst_size)
    plan = at_times(shape.conversations(requests, seed), arrivals.first(requests, seed).tolist())
    warm_up = at_times(shape.conversations(warmup, seed), [0.0] * warmup)
    summary = uvloop.run(_run(address, settings, plan, warm_up, Objective.parse("--slo", slo), seed, out, chat, model, timeout_s))
    output.print(_table(summary))


async def _run(address, settings, plan, warm_up, objective, seed, out, chat, model, timeout_s):
    from headrace.bench.serve.grpc_endpoint import GrpcEndpoint
    from headrace.bench.serve.http_endpoint import HttpEndpoint
    from headrace.bench.serve.measure import Measurer
    from headrace.clock import SystemClock
    if address and address.startswith("http"):
        endpoint = HttpEndpoint(address, settings.client, model, 0.0, timeout_s, chat=chat)
    else:
        endpoint = GrpcEndpoint(router_address(address, settings), settings.client, 0.0, timeout_s)
    try:
        served = await endpoint.served()
        m = Measurer(endpoint, SystemClock(), objective, served.vocab_size or _DEFAULT_VOCAB, seed, {}, warm_up)
        await m.prepare()
        return await m.measure(plan, out)
    finally:
        await endpoint.close()


def _table(summary: dict[str, Any]) -> Table:
    table = Table(title="Serving benchmark", title_justify="left", box=SIMPLE_HEAD, show_header=False)
    for name, value in summary.items():
        if isinstance(value, (int, float)):
            table.add_row(name, f"{value:,.2f}")
    return table
