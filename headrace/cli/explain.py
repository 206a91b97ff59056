"""`headrace explain`: where the router would send a prompt, and why."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from headrace.rpc.v1 import inference_pb2

_COLUMNS = ("queue", "prefill", "fetch", "TTFT", "transfer", "exposed", "ITL", "cached", "fetched")


def plan_report(plan: inference_pb2.RoutingPlan) -> RenderableType:
    """A row per worker, the chosen ones marked; times in milliseconds."""
    prefill = ", ".join(plan.prefill_workers) or f"{plan.decode_worker} itself"
    return Group(
        f"{plan.prompt_tokens} prompt tokens · prefill: {escape(prefill)} · decode: {escape(plan.decode_worker)}",
        f"[dim]{escape(plan.reason)}[/]",
        _candidates(
            "prefill, decoded by the chosen worker", plan.prefill_candidates, plan.prefill_workers[:1]
        ),
        _candidates("decode, prefilled as chosen", plan.decode_candidates, [plan.decode_worker]),
    )


def _candidates(
    title: str, predictions: Iterable[inference_pb2.WorkerPrediction], chosen: Iterable[str]
) -> Table:
    table = Table(title=f"{title} (ms, tokens)", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("worker", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for each in predictions:
        seconds = (
            each.queue_s,
            each.prefill_s,
            each.fetch_s,
            each.time_to_first_token_s,
            each.transfer_s,
            each.exposed_transfer_s,
            each.inter_token_s,
        )
        name = f"[bold]{escape(each.worker)} *[/]" if each.worker in chosen else escape(each.worker)
        table.add_row(
            name, *(f"{1e3 * s:.1f}" for s in seconds), str(each.cached_tokens), str(each.fetched_tokens)
        )
    return table
