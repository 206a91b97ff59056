"""The commands. `headrace --help` shows them."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from headrace.cli.bench import bench
from headrace.cli.client import Answer, Client
from headrace.cli.keys import keys
from headrace.cli.options import (
    DEFAULT_HTTP_PORT,
    DEFAULT_PORT,
    AddressOption,
    ConfigOption,
    MaxTokensOption,
    ModelOption,
    SeedOption,
    SetOption,
    TemperatureOption,
    TimeoutOption,
    http_address,
    router_address,
    settings_from,
)
from headrace.cli.progress import cluster_progress, console, obtain_model, output
from headrace.cli.simulate import simulate
from headrace.cluster.process import Kind, ProcessSpec
from headrace.cluster.running import RunningCluster, announce, find_running
from headrace.config import Settings
from headrace.directory.redis_directory import shown_url
from headrace.errors import Code, HeadraceError, InvalidRequest
from headrace.model_store import list_models, resolve
from headrace.rpc.v1 import inference_pb2
from headrace.tokenizer import ChatMessage

app = typer.Typer(
    help="LLM serving with prefill and decode on separate pools.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
models = typer.Typer(help="Models on this machine.", no_args_is_help=True)
app.add_typer(models, name="model")
app.add_typer(bench, name="bench")
app.add_typer(keys, name="keys")
app.command()(simulate)

PrefillCount = Annotated[int, typer.Option("--prefill", min=0, help="Prefill workers.")]
DecodeCount = Annotated[int, typer.Option("--decode", min=1, help="Decode workers.")]


def main() -> None:
    """Entry point. An error of ours is one line and an exit status: 2 for wrong input, else 1."""
    try:
        app()
    except HeadraceError as error:
        _print_error(error)
        sys.exit(2 if error.code == Code.INVALID_ARGUMENT else 1)


@app.callback(invoke_without_command=True)
def top(
    *, show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False
) -> None:
    if show_version:
        output.print(version("headrace"))
        raise typer.Exit


@app.command()
def demo(
    prefill: PrefillCount = 1,
    decode: DecodeCount = 1,
    model: ModelOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Start a cluster on this machine, stream two answers from it, show what moved, stop it."""
    from headrace.cli.demo import run_demo

    _stop_on_sigterm()
    run_demo(settings_from(config, assignments, model), prefill, decode)


@app.command()
def up(
    prefill: PrefillCount = 1,
    decode: DecodeCount = 1,
    model: ModelOption = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the gRPC API. 0: any free one.")
    ] = DEFAULT_PORT,
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the HTTP API. 0: any free one.")
    ] = DEFAULT_HTTP_PORT,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Keep a cluster running on this machine until Ctrl-C."""
    from headrace.cluster.local_cluster import LocalCluster

    settings = settings_from(config, assignments, model)
    cluster_name, cache_dir = settings.directory.cluster, settings.model.cache_dir
    running = find_running(cache_dir, cluster_name)
    if running is not None:
        raise InvalidRequest(
            "directory.cluster",
            cluster_name,
            f"a cluster of this name runs already (process {running.pid}, router {running.router});"
            " stop it or take another name",
        )
    _stop_on_sigterm()
    obtain_model(settings.model.ref, cache_dir)
    with ExitStack() as stack:
        with cluster_progress() as on_stage:
            cluster = LocalCluster(
                settings,
                num_prefill=prefill,
                num_decode=decode,
                port=port,
                http_port=http_port,
                on_stage=on_stage,
            )
            stack.enter_context(cluster)
        stack.callback(console.print, "[dim]draining and stopping[/]")
        running = RunningCluster(
            cluster.router_address, cluster.directory_url, os.getpid(), cluster.http_address
        )
        stack.callback(announce(running, cache_dir, cluster_name).unlink, missing_ok=True)
        _describe(running, cluster.folder / "logs")
        _wait_for_signal()


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The question; with --raw, text to be continued.")],
    raw: Annotated[bool, typer.Option("--raw", help="Without the chat template.")] = False,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = None,
    timeout_s: TimeoutOption = 600.0,
    address: AddressOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Ask once; the answer streams to standard output."""
    settings = settings_from(config, assignments)
    with Client(router_address(address, settings), settings.client) as client:
        client.wait_until_reachable()
        question = prompt if raw else [ChatMessage(role="user", content=prompt)]
        _stream(client, question, _sampling(max_tokens, temperature, seed), timeout_s)


@app.command()
def explain(
    prompt: Annotated[str, typer.Argument(help="The question; with --raw, text to be continued.")],
    raw: Annotated[bool, typer.Option("--raw", help="Without the chat template.")] = False,
    address: AddressOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Show where the router would send a prompt now, and why. Nothing is generated."""
    from headrace.cli.explain import plan_report

    settings = settings_from(config, assignments)
    with Client(router_address(address, settings), settings.client) as client:
        client.wait_until_reachable()
        question = prompt if raw else [ChatMessage(role="user", content=prompt)]
        output.print(plan_report(client.explain(question)), highlight=False)


@app.command()
def chat(
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = None,
    timeout_s: TimeoutOption = 600.0,
    address: AddressOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Talk to a model. An empty line or Ctrl-D ends it."""
    settings = settings_from(config, assignments)
    messages = [ChatMessage(role="system", content=system)] if system else []
    with Client(router_address(address, settings), settings.client) as client:
        client.wait_until_reachable()
        while question := _read_line():
            messages.append(ChatMessage(role="user", content=question))
            try:
                answer = _stream(client, messages, _sampling(max_tokens, temperature, seed), timeout_s)
            except HeadraceError as error:
                messages.pop()
                _print_error(error)
                continue
            messages.append(ChatMessage(role="assistant", content=answer.text))
            if answer.last is not None:
                usage, timings = answer.last.usage, answer.last.timings
                console.print(
                    f"[dim]{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached,"
                    f" {usage.completion_tokens} new, first after {1000 * timings.time_to_first_token_s:.0f} ms[/]",
                    highlight=False,
                )


@app.command()
def status(config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Show workers, roles, load and cache use."""
    from headrace.cli.status import status_report

    settings = settings_from(config, assignments)
    running = find_running(settings.model.cache_dir, settings.directory.cluster)
    if running is not None:
        directory = settings.directory.model_copy(update={"url": running.directory_url})
        settings = settings.model_copy(update={"directory": directory})
        output.print(_router_line(running), highlight=False)
    output.print(status_report(settings))


@app.command("top")
def live_view(
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            help="URL or HOST:PORT of a router's HTTP API. Default: the local cluster's.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The state as JSON, a line each second.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", envvar="HEADRACE_API_KEY", help="Where the router asks for one.", show_default=False
        ),
    ] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Watch the router and its workers live. q or Ctrl-C ends it."""
    from headrace.cli.top import show_fleet

    url = address or http_address(settings_from(config, assignments))
    show_fleet(url, api_key, as_json=as_json, once=once)


IdOption = Annotated[
    str | None,
    typer.Option(
        "--id", help="Name in the directory. Default: the role and a random suffix.", show_default=False
    ),
]


@app.command()
def router(model: ModelOption = None, config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Run one router in the foreground, without Ray."""
    settings = settings_from(config, assignments, model)
    for section, port in (("rpc", DEFAULT_PORT), ("http", DEFAULT_HTTP_PORT)):
        chosen = getattr(settings, section)
        if chosen.port == 0:
            settings = settings.model_copy(update={section: chosen.model_copy(update={"port": port})})
    _run("router", "router", settings)


@app.command()
def prefill(
    worker_id: IdOption = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Run one prefill worker in the foreground, without Ray."""
    _run("prefill", worker_id, settings_from(config, assignments, model))


@app.command()
def decode(
    worker_id: IdOption = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Run one decode worker in the foreground, without Ray."""
    _run("decode", worker_id, settings_from(config, assignments, model))


@models.command("list")
def list_() -> None:
    """Models that Headrace knows by name."""
    settings = settings_from(None, None)
    table = Table("name", "description", "license", "size", "on this machine", box=SIMPLE_HEAD)
    for model in list_models(settings.model.cache_dir):
        where = str(model.path) if model.cached else "no"
        table.add_row(model.name, model.description, model.license, f"{model.size_bytes / 1e6:.0f} MB", where)
    output.print(table)


@models.command()
def pull(ref: Annotated[str, typer.Argument(help="Catalogue name or hub name.")]) -> None:
    """Fetch a model, or check the one that is here."""
    output.print(str(obtain_model(ref, settings_from(None, None).model.cache_dir).path), highlight=False)


@models.command()
def show(ref: Annotated[str, typer.Argument(help="Catalogue name, file, folder or hub name.")]) -> None:
    """What a model is."""
    files = resolve(ref, cache_dir=settings_from(None, None).model.cache_dir)
    table = Table(show_header=False, title=files.name, title_justify="left")
    rows = {
        "path": files.path,
        "format": files.format,
        "fingerprint": files.fingerprint,
        **_config_rows(files.config),
    }
    for name, value in {**rows, "end tokens": sorted(files.eos_token_ids)}.items():
        table.add_row(name, escape(str(value)))
    output.print(table)


def _config_rows(model_config: object) -> dict[str, object]:
    return {name: getattr(model_config, name) for name in model_config.__slots__}  # type: ignore[attr-defined]


def _run(kind: Kind, name: str | None, settings: Settings) -> None:
    from headrace.cluster.foreground import run_in_foreground

    run_in_foreground(ProcessSpec(name or f"{kind}-{secrets.token_hex(4)}", kind, settings))


def _stream(
    client: Client, prompt: str | list[ChatMessage], sampling: inference_pb2.SamplingParams, timeout_s: float
) -> Answer:
    answer = Answer()
    for piece in client.generate(prompt, sampling, answer, timeout_s):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return answer


def _print_error(error: HeadraceError) -> None:
    console.print(f"[bold red]{error.code.value}[/] {escape(str(error))}", highlight=False, soft_wrap=True)


def _sampling(max_tokens: int | None, temperature: float, seed: int | None) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)


def _read_line() -> str:
    try:
        return input("› ").strip()
    except EOFError:
        return ""


def _describe(running: RunningCluster, logs: Path) -> None:
    console.print(f"\n{_router_line(running)}", highlight=False)
    console.print(f"directory  {shown_url(running.directory_url)}\nlogs       {logs}", highlight=False)
    console.print("[dim]In another terminal: headrace chat. Ctrl-C stops it.[/]")


def _router_line(running: RunningCluster) -> str:
    http = f"   [bold]{running.http}/v1[/]   (OpenAI-compatible HTTP)" if running.http else ""
    return f"router     [bold]{running.router}[/]   (gRPC, headrace.v1.Inference){http}"


def _stop_on_sigterm() -> None:
    """SIGTERM unwinds as Ctrl-C does, so that what was started is stopped."""

    def on_signal(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, on_signal)


def _wait_for_signal() -> None:
    _stop_on_sigterm()  # Ray has put its own handler there
    with suppress(KeyboardInterrupt):
        threading.Event().wait()
