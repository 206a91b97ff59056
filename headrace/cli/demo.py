"""`headrace demo`: a cluster, a question, a follow-up, and what it took."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from statistics import quantiles

from rich.table import Table

from headrace.cli.client import Answer, Client
from headrace.cli.options import DEFAULT_HTTP_PORT, DEFAULT_PORT
from headrace.cli.progress import cluster_progress, console, obtain_model
from headrace.cluster.local_cluster import LocalCluster
from headrace.config import Settings
from headrace.rpc.v1 import inference_pb2
from headrace.tokenizer import ChatMessage

# Long enough that its KV is worth moving: shorter prompts are prefilled where they are decoded.
_QUESTION = (
    "A headrace is the channel that leads water from a reservoir to a turbine. It has to carry enough water when"
    " demand is high, lose little height on the way, keep out sand and driftwood, and never run dry while the turbine"
    " turns. Engineers who design one look at its slope, its cross-section, its lining and its gates."
    " Explain to a newcomer in three short sentences why the channel matters as much as the turbine."
)
_FOLLOW_UP = "Now give the single most important of these points in one sentence."
_MAX_TOKENS = 96
_TIMEOUT_S = 120.0


def run_demo(settings: Settings, num_prefill: int, num_decode: int) -> None:
    """Start everything, ask twice, print a table, stop everything. Raises HeadraceError."""
    obtain_model(settings.model.ref, settings.model.cache_dir)
    with ExitStack() as stack:
        with cluster_progress() as on_stage:
            cluster = LocalCluster(
                settings, num_prefill=num_prefill, num_decode=num_decode, on_stage=on_stage
            )
            stack.enter_context(cluster)
        stack.callback(console.print, "[dim]stopping[/]")
        if cluster.http_address:
            console.print(f"[dim]HTTP, while this lasts: {cluster.http_address}/v1[/]", highlight=False)
        _converse(cluster.router_address)
    console.print(
        f"[dim]Keep a cluster running: headrace up (gRPC port {DEFAULT_PORT}, HTTP port {DEFAULT_HTTP_PORT})."
        " Talk to it: headrace chat[/]"
    )


def _converse(address: str) -> None:
    with Client(address) as client:
        client.wait_until_reachable()
        chat = [ChatMessage(role="user", content=_QUESTION)]
        first = _ask(client, chat)
        chat += [
            ChatMessage(role="assistant", content=first.text),
            ChatMessage(role="user", content=_FOLLOW_UP),
        ]
        second = _ask(client, chat)
    console.print(_table([first, second], ["question", "follow-up"]))


def _ask(client: Client, chat: list[ChatMessage]) -> Answer:
    console.print(f"\n[bold cyan]{chat[-1].content}[/]\n")
    sampling = inference_pb2.SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)
    answer = Answer()
    for piece in client.generate(chat, sampling, answer, _TIMEOUT_S):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return answer


def _table(answers: list[Answer], titles: list[str]) -> Table:
    columns = [_figures(answer) for answer in answers]
    table = Table("", *titles, title="What it took", title_justify="left")
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _figures(answer: Answer) -> dict[str, str]:
    last = answer.last or inference_pb2.GenerateResponse()
    moved, seconds = last.hand_off.bytes_moved, last.hand_off.transfer_s
    gaps_ms = [1000 * gap for gap in answer.inter_token_s] or [0.0]
    percentiles = quantiles(gaps_ms, n=20, method="inclusive") if len(gaps_ms) > 1 else gaps_ms * 19
    workers = [name for name in (last.hand_off.prefill_worker, last.hand_off.decode_worker) if name]
    return {
        "time to first token": f"{1000 * answer.token_times_s[0]:.0f} ms" if answer.token_times_s else "none",
        "inter-token p50 / p95": f"{percentiles[9]:.1f} / {percentiles[18]:.1f} ms",
        "prompt / cached tokens": f"{last.usage.prompt_tokens} / {last.usage.cached_tokens}",
        "answer tokens": str(last.usage.completion_tokens),
        "prefilled and decoded by": " → ".join(workers),
        "blocks / bytes moved": f"{last.hand_off.blocks_moved} / {moved:,}",
        "transport": last.hand_off.transport,
        "transfer": f"{moved / seconds / 1e6:,.0f} MB/s" if seconds else "nothing moved",
    }
