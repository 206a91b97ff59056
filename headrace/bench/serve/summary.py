"""What a run found, under the names that vLLM's benchmark uses, and blocks of what it does not have.

Latencies are those of complete answers; goodput counts good answers among all that were offered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.bench.serve.punctuality import Punctuality
from headrace.bench.serve.records import RequestRecord
from headrace.bench.serve.slo import Objective
from headrace.bench.serve.statistics import METHOD, Counts, Pooled, resamples, share_interval
from headrace.bench.serve.timeline import timeline
from headrace.bench.serve.workload import Plan

Json = dict[str, Any]

SCHEMA = "headrace.bench.serve/1"
PERCENTILES = (50, 90, 95, 99)
_TAIL = 90  # from this percentile on
_METRICS: dict[str, Callable[[RequestRecord], Sequence[float]]] = {
    "ttft": lambda record: [record.ttft_ms],
    "tpot": lambda record: [] if record.tpot_ms is None else [record.tpot_ms],
    "itl": lambda record: record.itls_ms,
    "e2el": lambda record: [record.e2el_ms],
    "tbt10": lambda record: [] if record.tbt10_ms is None else [record.tbt10_ms],
}


@dataclass(frozen=True, slots=True)
class Price:
    gpu_hour: float
    num_gpus: float


def summarise(
    plan: Plan,
    records: Sequence[RequestRecord],
    objective: Objective,
    stalls_s: Sequence[float],
    *,
    seed: int,
    price: Price | None = None,
) -> Json:
    """`records` of a whole run, in any order."""
    records = sorted(records, key=lambda record: (record.scheduled_s, record.conversation))
    complete = [record for record in records if record.is_ok]
    punctuality = Punctuality.of(records, stalls_s)
    draws = resamples(len(records), seed) if records else None
    duration_s = max((record.end_s for record in records), default=0.0)
    content: Json = {
        **_counts(plan, records, duration_s),
        **_goodput(plan, records, objective, duration_s, draws),
    }
    intervals: Json = content.pop("_intervals")
    for name, values_of in _METRICS.items():
        values = Pooled([values_of(record) if record.is_ok else [] for record in records])
        content |= _latencies(name, values, with_tails=punctuality.is_valid)
        intervals |= _intervals(name, values, draws, with_tails=punctuality.is_valid)
    return {
        **content,
        "cache": _cache(plan, complete),
        "pd": _phases(complete),
        "routing": _routing(complete),
        "client": {**punctuality.json(), **_from_sent(complete, with_tails=punctuality.is_valid)},
        "intervals": {"method": METHOD, **intervals},
        "cost": _cost(content, price) if price else None,
        "timeline": timeline(records),
    }


def _counts(plan: Plan, records: Sequence[RequestRecord], duration_s: float) -> Json:
    statuses = Counter(record.status for record in records)
    complete = [record for record in records if record.is_ok]
    num_input = sum(record.prompt_tokens for record in complete)
    num_output = sum(record.output_tokens for record in complete)
    seconds = duration_s or float("inf")
    return {
        "num_prompts": plan.num_requests,
        "duration": duration_s,
        "completed": statuses["ok"],
        "failed": statuses["failed"],
        "timeouts": statuses["timeout"],
        "rejected": statuses["rejected"],
        "not_sent": plan.num_requests - len(records),  # later turns of conversations that failed
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "cut_short": sum(record.output_tokens < record.wanted_tokens for record in complete),
        "messages_per_token": sum(record.num_messages for record in complete) / (num_output or 1),
        "request_throughput": len(complete) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        "errors": dict(Counter(record.error[:120] for record in records if record.error).most_common(5)),
    }


def _goodput(
    plan: Plan,
    records: Sequence[RequestRecord],
    objective: Objective,
    duration_s: float,
    draws: Counts | None,
) -> Json:
    offered, seconds = plan.num_requests or 1, duration_s or float("inf")
    good = np.array([objective.is_met(record) for record in records], dtype=float)
    attained = {
        f"{name}_attainment": sum(objective.meets(record, name) for record in records) / offered
        for name in objective.limits_ms
    }
    intervals: Json = {}
    if draws is not None:
        sent_share = len(records) / offered
        low, high = (sent_share * bound for bound in share_interval(good, draws))
        intervals = {
            "attainment": (low, high),
            "request_goodput": (low * offered / seconds, high * offered / seconds),
        }
    limits_ms = {f"{name}_ms": limit for name, limit in objective.limits_ms.items()}
    return {
        "request_goodput": float(good.sum()) / seconds,
        "slo": {**limits_ms, "attainment": float(good.sum()) / offered, **attained},
        "_intervals": intervals,
    }


def _latencies(name: str, values: Pooled, *, with_tails: bool) -> Json:
    if not len(values.values):
        return {}
    quoted = np.percentile(values.values, PERCENTILES).tolist()
    return {
        f"mean_{name}_ms": float(values.values.mean()),
        f"median_{name}_ms": quoted[0],
        f"std_{name}_ms": float(values.values.std()),
        **{
            f"p{percent}_{name}_ms": value if with_tails or percent < _TAIL else None
            for percent, value in zip(PERCENTILES, quoted, strict=True)
        },
    }


def _intervals(name: str, values: Pooled, draws: Counts | None, *, with_tails: bool) -> Json:
    if draws is None or not len(values.values):
        return {}
    percents = [percent for percent in PERCENTILES if with_tails or percent < _TAIL]
    names = [f"mean_{name}_ms", *(f"p{percent}_{name}_ms" for percent in percents)]
    return dict(zip(names, values.intervals(draws, percents), strict=True))


def _cache(plan: Plan, complete: Sequence[RequestRecord]) -> Json:
    """Rates are shares of prompt tokens."""
    bounds = plan.bounds()
    told = [record for record in complete if record.cached_tokens is not None]
    num_prompt = sum(record.prompt_tokens for record in told)
    num_cached = sum(record.cached_tokens or 0 for record in told)
    hit_rate = num_cached / num_prompt if num_prompt else None
    return {
        "hit_rate_tokens": hit_rate,  # None: the server does not say
        "cached_tokens": num_cached if told else None,
        "bound_infinite": bounds.hit_rate,
        "bound_share": hit_rate / bounds.hit_rate if hit_rate is not None and bounds.hit_rate else None,
        "working_set_tokens": bounds.working_set_tokens,
    }


def _phases(complete: Sequence[RequestRecord]) -> Json:
    """Means and percentiles of what the server says of the way of each request; empty where it says nothing."""
    names = {
        "queue_s": "queue_ms",
        "worker_queue_s": "worker_queue_ms",
        "worker_prefill_s": "prefill_ms",
        "transfer_s": "kv_transfer_ms",
        "decode_s": "decode_ms",
    }
    told = [record.server for record in complete if record.server.get("decode_worker")]
    if not told:
        return {}
    return {
        **{
            after: _spread([1000 * float(server[before]) for server in told])
            for before, after in names.items()
        },
        "kv_bytes": sum(int(server["bytes_moved"]) for server in told),
        "local_prefills": sum(not server["prefill_worker"] for server in told),
        "failed_hand_offs": sum(int(server["failed_attempts"]) for server in told),
    }


def _routing(complete: Sequence[RequestRecord]) -> Json:
    """How evenly the workers were used."""
    found: Json = {}
    for role in ("prefill", "decode"):
        workers = Counter(str(record.server.get(f"{role}_worker") or "") for record in complete)
        del workers[""]
        if workers:
            counts = np.array(list(workers.values()), dtype=float)
            found[f"{role}_requests"] = dict(sorted(workers.items()))
            found[f"{role}_max_over_mean"] = float(counts.max() / counts.mean())
    return found


def _from_sent(complete: Sequence[RequestRecord], *, with_tails: bool) -> Json:
    """What TTFT would be if it counted from the moment of sending."""
    values = [record.ttft_from_sent_ms for record in complete]
    return {"ttft_from_sent_ms": _spread(values, with_tails=with_tails)} if values else {}


def _cost(content: Mapping[str, Any], price: Price) -> Json:
    spent = price.gpu_hour * price.num_gpus * content["duration"] / 3600
    num_input, num_output = content["total_input_tokens"], content["total_output_tokens"]
    return {
        "gpu_hour": price.gpu_hour,
        "gpus": price.num_gpus,
        "per_million_output_tokens": spent / num_output * 1e6 if num_output else None,
        "per_million_tokens": spent / (num_input + num_output) * 1e6 if num_input + num_output else None,
    }


def _spread(values: Sequence[float], *, with_tails: bool = True) -> Json:
    return {
        "mean": float(np.mean(values)),
        **{
            f"p{percent}": float(np.percentile(values, percent)) if with_tails or percent < _TAIL else None
            for percent in PERCENTILES
        },
    }
