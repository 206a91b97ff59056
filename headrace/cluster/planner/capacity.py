"""How many workers of each kind a workload takes: the arithmetic of `headrace plan`, and its formulas.

    prefill   s = a + b·n + c·n·(p + n/2)      of a prompt of p cached tokens and n others
              busy = rate·E[s] / P             at most max_prefill_busy
              TTFT = wait + s                  the wait of a queue with P servers (Sakasegawa's approximation):
              E[wait] = busy^(√(2(P+1)) - 1) / (P·(1 - busy)) · (1 + Var[s]/E[s]²)/2 · E[s]
              a share of busy^(√(2(P+1)) - 1) waits at all, exponentially: the quantile follows
    decode    step = a + b·batch + d·batch·context, and by Little's law batch = rate·E[out]·step / D, so
              step = a / (1 - rate·E[out]·(b + d·context) / D)                            at most the ITL target
              batch·context                    at most max_kv_use of a worker's KV, and batch of max_sequences
    context   tokens of a sequence while it is decoded, on average: E[out·(in + out/2)] / E[out]

The smallest P and D that keep all limits. Lengths are drawn independently. Not in it: bursts beyond Poisson arrivals,
failures (add one worker of each kind for those), and transfers that are slower than prefill.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from headrace.errors import InvalidRequest
from router.costs import DecodeCost, PrefillCost, RecursiveFit, prior_costs

_MAX_WORKERS = 100_000
_NUM_PASSES = 20  # over the measurements, until the fit has forgotten what it began with


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens and their weights."""

    values: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def parse(cls, name: str, text: str) -> Lengths:
        """`500` or `500:3,4000:1`: tokens, with weights where they differ. Raises InvalidRequest."""
        values: list[int] = []
        weights: list[float] = []
        for part in text.split(","):
            tokens, _, weight = part.partition(":")
            try:
                value, share = int(tokens), float(weight or 1)
            except ValueError:
                raise InvalidRequest(
                    name, part, "write TOKENS or TOKENS:WEIGHT, commas between them"
                ) from None
            if value < 1 or not 0 < share < math.inf:
                raise InvalidRequest(name, part, "tokens and weights must be above 0")
            values.append(value)
            weights.append(share)
        total = sum(weights)
        return cls(tuple(values), tuple(weight / total for weight in weights))

    @property
    def mean(self) -> float:
        return sum(value * weight for value, weight in zip(self.values, self.weights, strict=True))

    @property
    def square_mean(self) -> float:
        return sum(value**2 * weight for value, weight in zip(self.values, self.weights, strict=True))


@dataclass(frozen=True, slots=True)
class Workload:
    rate: float  # requests a second
    inputs: Lengths
    outputs: Lengths
    hit_rate: float = 0.0  # of prompt tokens, found in a cache

    @property
    def context_tokens(self) -> float:
        return self.inputs.mean + self.outputs.square_mean / self.outputs.mean / 2


@dataclass(frozen=True, slots=True)
class Limits:
    ttft_s: float
    itl_s: float
    quantile: float = 0.95  # of answers whose first token keeps the target
    max_prefill_busy: float = 0.85
    max_kv_use: float = 0.9
    kv_tokens: int = 0  # of a decode worker's pool; 0: no limit
    max_sequences: int = 64


@dataclass(frozen=True, slots=True)
class Costs:
    prefill: PrefillCost
    decode: DecodeCost


@dataclass(frozen=True, slots=True)
class PrefillPool:
    workers: int
    busy: float
    prompt_s: float  # mean time to compute a prompt
    wait_s: float  # mean, in the queue
    ttft_s: float  # the quantile


@dataclass(frozen=True, slots=True)
class DecodePool:
    workers: int
    step_s: float  # the ITL
    batch: float  # of each worker
    kv_use: float  # of its pool; 0: no limit was given
    bound_by: str  # what one worker less would break


def prefill_pool(work: Workload, costs: Costs, limits: Limits) -> PrefillPool:
    """Raises InvalidRequest when no number of workers keeps the target."""
    times = [_prompt_s(work, costs, tokens) for tokens in work.inputs.values]
    mean_s = sum(map(_product, times, work.inputs.weights))
    slowest_s = _quantile(times, work.inputs.weights, limits.quantile)
    if slowest_s > limits.ttft_s:
        raise InvalidRequest(
            "ttft",
            limits.ttft_s,
            f"computing the prompt alone takes {slowest_s:.3g} s: faster workers, or more hits",
        )
    square_s = sum(time_s**2 * weight for time_s, weight in zip(times, work.inputs.weights, strict=True))
    first = max(1, math.ceil(work.rate * mean_s / limits.max_prefill_busy))
    for workers in range(first, _MAX_WORKERS):
        busy = work.rate * mean_s / workers
        share_waits = busy ** (math.sqrt(2 * (workers + 1)) - 1)
        variation = square_s / mean_s**2 - 1
        wait_s = share_waits / (workers * (1 - busy)) * (1 + variation) / 2 * mean_s
        late = 1 - limits.quantile
        waits_s = wait_s / share_waits * math.log(share_waits / late) if share_waits > late else 0.0
        if waits_s + slowest_s <= limits.ttft_s:
            return PrefillPool(workers, busy, mean_s, wait_s, waits_s + slowest_s)
    raise InvalidRequest("rate", work.rate, f"takes more than {_MAX_WORKERS} prefill workers")


def decode_pool(work: Workload, costs: Costs, limits: Limits) -> DecodePool:
    """Raises InvalidRequest when no number of workers keeps the target."""
    cost, context = costs.decode, work.context_tokens
    alone_s = cost.seconds(1, context)
    if alone_s > limits.itl_s:
        raise InvalidRequest(
            "itl",
            limits.itl_s,
            f"a step of one sequence takes {alone_s:.3g} s: faster workers, or shorter prompts",
        )
    if limits.kv_tokens and context > limits.max_kv_use * limits.kv_tokens:
        raise InvalidRequest("kv tokens", limits.kv_tokens, f"one sequence takes {context:.0f} on average")
    bound_by = "one is enough"
    tokens_per_s = work.rate * work.outputs.mean
    for workers in range(1, _MAX_WORKERS):
        share = tokens_per_s * (cost.sequence_s + cost.context_s * context) / workers
        step_s = cost.base_s / (1 - share) if share < 1 else math.inf
        batch = tokens_per_s * step_s / workers
        kv_use = batch * context / limits.kv_tokens if limits.kv_tokens else 0.0
        broken = [
            name
            for name, is_broken in (
                ("ITL target", step_s > limits.itl_s),
                ("KV memory", kv_use > limits.max_kv_use),
                ("sequences at once", batch > limits.max_sequences),
            )
            if is_broken
        ]
        if not broken:
            return DecodePool(workers, step_s, batch, kv_use, bound_by)
        bound_by = ", ".join(broken)
    raise InvalidRequest("rate", work.rate, f"takes more than {_MAX_WORKERS} decode workers")


def costs_of_rows(rows: Sequence[Mapping[str, Any]]) -> Costs:
    """Of what `headrace bench engine --json` has measured with one variant. Raises InvalidRequest for too little."""
    prefill = [row for row in rows if row["phase"] == "prefill"]
    decode = [row for row in rows if row["phase"] == "decode"]
    if not prefill or not decode:
        raise InvalidRequest("costs", f"{len(rows)} rows", "needs rows of prefill and of decode")
    prior = prior_costs(max(row["tokens_per_s"] for row in prefill))
    prompts = [
        ((1.0, float(n), n * n / 2), n / row["tokens_per_s"]) for row in prefill for n in (row["context"],)
    ]
    steps = [
        ((1.0, float(row["batch"]), float(row["batch"] * row["context"])), row["batch"] / row["tokens_per_s"])
        for row in decode
    ]
    return Costs(
        PrefillCost(*_fitted(astuple(prior.prefill), prompts)),
        DecodeCost(*_fitted(astuple(prior.decode), steps)),
    )


def _fitted(
    prior: tuple[float, ...], observed: list[tuple[tuple[float, ...], float]]
) -> tuple[float, float, float]:
    fit = RecursiveFit(prior, memory=10 * len(observed) * _NUM_PASSES, ridge=1e-3)
    for features, seconds in itertools.chain.from_iterable([observed] * _NUM_PASSES):
        fit.observe(features, seconds)
    first, second, third = fit.coefficients
    return first, second, third


def _prompt_s(work: Workload, costs: Costs, tokens: int) -> float:
    cached = min(tokens - 1, work.hit_rate * tokens)
    return costs.prefill.seconds(tokens - cached, cached)


def _product(value: float, weight: float) -> float:
    return value * weight


def _quantile(values: Sequence[float], weights: Sequence[float], quantile: float) -> float:
    below = 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        below += weight
        if below >= quantile - 1e-9:
            return value
    return max(values)
