"""`headrace plan`: how many workers a workload takes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from headrace.cluster.planner.capacity import (
    Costs,
    Limits,
    Workload,
    costs_of_rows,
    decode_pool,
    prefill_pool,
)
from headrace.errors import InvalidRequest
from router.costs import DecodeCost, PrefillCost

_VARIANT = ("backend", "dtype", "threads")


def costs_from(bench_file: Path | None, variant: str, prefill: str, decode: str) -> Costs:
    """Measured, or given as three numbers each. Raises InvalidRequest."""
    if bench_file is not None:
        if prefill or decode:
            raise InvalidRequest(
                "--costs", str(bench_file), "leave out --prefill-cost and --decode-cost then"
            )
        return costs_of_rows(_rows(bench_file, variant))
    if not (prefill and decode):
        raise InvalidRequest(
            "--costs",
            "",
            "give a file of `headrace bench engine --json`, or --prefill-cost and --decode-cost",
        )
    return Costs(
        PrefillCost(*_three("--prefill-cost", prefill)), DecodeCost(*_three("--decode-cost", decode))
    )


def plan_report(work: Workload, costs: Costs, limits: Limits) -> tuple[dict[str, Any], RenderableType]:
    """As plain data and to be shown. Raises InvalidRequest when no number of workers would do."""
    prefill, decode = prefill_pool(work, costs, limits), decode_pool(work, costs, limits)
    data = {
        "prefill": asdict(prefill),
        "decode": asdict(decode),
        "workload": asdict(work) | {"context_tokens": work.context_tokens},
        "limits": asdict(limits),
        "costs": asdict(costs),
    }
    pools = Table("", "workers", "load of each", "keeps", box=SIMPLE_HEAD)
    pools.add_row(
        "prefill",
        str(prefill.workers),
        f"computes {100 * prefill.busy:.0f} % of the time, {prefill.prompt_s:.3g} s a prompt",
        f"TTFT {prefill.ttft_s:.3g} s at quantile {limits.quantile:g}, target {limits.ttft_s:g} s",
    )
    use = f", {100 * decode.kv_use:.0f} % of its KV" if limits.kv_tokens else ""
    pools.add_row(
        "decode",
        str(decode.workers),
        f"{decode.batch:.1f} sequences{use}",
        f"ITL {1e3 * decode.step_s:.3g} ms, target {1e3 * limits.itl_s:g} ms; bound by: {decode.bound_by}",
    )
    return data, Group(pools, _formulas(work, costs))


def _formulas(work: Workload, costs: Costs) -> Table:
    a, b, c = costs.prefill.base_s, costs.prefill.token_s, costs.prefill.attention_s
    base, sequence, context = costs.decode.base_s, costs.decode.sequence_s, costs.decode.context_s
    table = Table("formula (docs/operations.md, Sizing)", "with", box=SIMPLE_HEAD)
    table.add_row(
        "prompt = a + b·n + c·n·(p + n/2), of n tokens behind p cached ones",
        f"a {a:.3g} s, b {b:.3g} s, c {c:.3g} s; hits {100 * work.hit_rate:g} %",
    )
    table.add_row("busy = rate · E\\[prompt] / P, TTFT = wait in a queue of P servers + prompt", "")
    table.add_row(
        "step = a / (1 - rate · E\\[out] · (b + d·context) / D), batch = rate · E\\[out] · step / D",
        f"a {base:.3g} s, b {sequence:.3g} s, d {context:.3g} s; E\\[out] {work.outputs.mean:.0f},"
        f" context {work.context_tokens:.0f} tokens",
    )
    return table


def _rows(path: Path, variant: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(path.read_text())["rows"]
        by_variant: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_variant.setdefault("/".join(str(row[name]) for name in _VARIANT), []).append(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            "--costs", str(path), f"is not of `headrace bench engine --json`: {error}"
        ) from None
    if not variant and len(by_variant) == 1:
        return next(iter(by_variant.values()))
    if variant not in by_variant:
        shown = ", ".join(sorted(by_variant)) or "none"
        raise InvalidRequest("--variant", variant, f"backend/dtype/threads, one of {shown}")
    return by_variant[variant]


def _three(name: str, text: str) -> tuple[float, float, float]:
    try:
        first, second, third = (float(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest(name, text, "write three numbers of seconds, commas between them") from None
    if min(first, second, third) < 0 or first + second <= 0:
        raise InvalidRequest(name, text, "must not be negative, nor all 0")
    return first, second, third
