"""`headrace status`: what the directory knows and what each worker says of itself."""

from __future__ import annotations

import asyncio

import grpc
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from headrace.cluster.exposure import unprotected
from headrace.config import Settings
from headrace.directory.records import WorkerRecord
from headrace.directory.redis_directory import RedisDirectory
from headrace.rpc.channel import open_channel
from headrace.rpc.tls import Part
from headrace.rpc.v1 import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 3.0


def status_report(settings: Settings) -> RenderableType:
    """A row per worker, and a row per pair of workers that exchange blocks or refuse to. Raises Unavailable when the
    directory can not be reached.
    """
    return asyncio.run(_collect(settings))


async def _collect(settings: Settings) -> RenderableType:
    directory = RedisDirectory(settings.directory)
    try:
        records = sorted(await directory.workers(), key=lambda record: record.worker_id)
    finally:
        await directory.close()
    answers = await asyncio.gather(*(_ask(record, settings) for record in records))
    warnings = [f"[bold red]insecure[/] {what}" for what in unprotected(settings, Part.ROUTER)]
    return Group(*warnings, _workers(settings.directory.cluster, records, answers), _links(answers))


def _workers(
    cluster: str, records: list[WorkerRecord], answers: list[worker_pb2.StatusResponse | None]
) -> Table:
    title = f"cluster {cluster!r}: {len(records)} workers"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in (
        "worker",
        "role",
        "state",
        "model",
        "running",
        "waiting",
        "KV used",
        "cached",
        "held",
        "quarantined",
        "address",
        "metrics",
    ):
        table.add_column(column, no_wrap=column in ("worker", "role", "state"))
    for record, answer in zip(records, answers, strict=True):
        table.add_row(*_row(record, answer))
    return table


def _links(answers: list[worker_pb2.StatusResponse | None]) -> Table:
    table = Table(title="exchange of KV blocks", title_justify="left", box=SIMPLE_HEAD)
    for column in ("reader", "owner", "state", "over", "one block", "measured"):
        table.add_column(column)
    for answer in answers:
        if answer is None:
            continue
        for peer in answer.peers:
            state = f"[red]{escape(peer.refusal)}[/]" if peer.refusal else "connected"
            over = f"{peer.transport} {peer.device}".strip() or "-"
            latency = f"{peer.block_latency_s * 1e3:.2f} ms" if peer.connected else "-"
            measured = f"{peer.bytes_per_s / 1e9:.2f} GB/s" if peer.bytes_per_s else "-"
            table.add_row(answer.worker_id, peer.worker_id, state, over, latency, measured)
    return table


async def _ask(record: WorkerRecord, settings: Settings) -> worker_pb2.StatusResponse | None:
    async with open_channel(record.address, settings.rpc) as channel:
        try:
            return await worker_pb2_grpc.WorkerStub(channel).Status(
                worker_pb2.StatusRequest(), timeout=_TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return None


def _row(record: WorkerRecord, answer: worker_pb2.StatusResponse | None) -> list[str]:
    if answer is None:
        return [
            record.worker_id,
            record.role,
            "[red]no answer[/]",
            record.model_name,
            *["-"] * 6,
            record.address,
            "-",
        ]
    blocks = answer.blocks
    state = "draining" if answer.draining else "serving"
    if blocks.problems:
        state = f"[red]{'; '.join(blocks.problems)}[/]"
    used = blocks.total - blocks.free - blocks.cached
    return [
        record.worker_id,
        record.role,
        state,
        record.model_name,
        str(answer.running),
        str(answer.waiting),
        f"{used}/{blocks.total} ({100 * used / max(1, blocks.total):.0f} %)",
        str(blocks.cached),
        str(blocks.held),
        str(blocks.quarantined),
        record.address,
        answer.metrics_address,
    ]
