"""How long workers take, from kernel times that were measured (`data/`, see the README there).

Between the points of a table it is interpolated, and beyond them extrapolated, as times the formula

    prefill     a + b·n + c·n·(p + n/2)     n tokens to compute behind p that are cached
    decode      a + b·batch + d·context     one step; context: tokens of all sequences in the batch

whose coefficients are the table's least squares. The host's time, which the tables lack, is added.
"""

from __future__ import annotations

import csv
import gzip
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from headrace.errors import InvalidRequest
from router.costs import DecodeCost, PrefillCost

# Not measured: a step's scheduling and launches, with CUDA graphs for decode.
_PREFILL_HOST_S, _DECODE_HOST_S = 5e-3, 1.5e-3
_LLAMA_8B_TOKEN_BYTES, _LLAMA_70B_TOKEN_BYTES = 131_072, 327_680  # of KV in bf16


@dataclass(frozen=True, slots=True)
class Machine:
    """What one worker is: a model on so many GPUs, with a network card of 400 Gbit/s each."""

    system: str
    model: str
    gpus: int
    token_bytes: int


MACHINES = {
    "8b-1xh100": Machine("h100_sxm", "llama-3.1-8b", 1, _LLAMA_8B_TOKEN_BYTES),
    "8b-1xh200": Machine("h200_sxm", "llama-3.1-8b", 1, _LLAMA_8B_TOKEN_BYTES),
    "70b-4xh100": Machine("h100_sxm", "llama-3.1-70b", 4, _LLAMA_70B_TOKEN_BYTES),
    "70b-4xh200": Machine("h200_sxm", "llama-3.1-70b", 4, _LLAMA_70B_TOKEN_BYTES),
    "70b-8xh100": Machine("h100_sxm", "llama-3.1-70b", 8, _LLAMA_70B_TOKEN_BYTES),
    "70b-8xh200": Machine("h200_sxm", "llama-3.1-70b", 8, _LLAMA_70B_TOKEN_BYTES),
}


class Curve:
    """Straight between points, constant beyond them."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        """By rising x."""
        self._xs = [x for x, _ in points]
        self._ys = [y for _, y in points]

    def __call__(self, x: float) -> float:
        right = bisect_right(self._xs, x)
        if right == 0:
            return self._ys[0]
        if right == len(self._xs):
            return self._ys[-1]
        low, high = self._xs[right - 1], self._xs[right]
        share = (x - low) / (high - low)
        return self._ys[right - 1] + share * (self._ys[right] - self._ys[right - 1])


class ServiceTimes:
    """Of one machine, in seconds."""

    def __init__(
        self,
        prefill: PrefillCost,
        decode: DecodeCost,
        prefill_factor: Curve,
        decode_factors: Sequence[tuple[float, Curve]],
    ) -> None:
        """Factors on the formulas: by the logarithm of the new tokens; by that of the batch, of the mean context."""
        self.prefill = prefill
        self.decode = decode
        self._prefill_factor = prefill_factor
        self._batches = [batch for batch, _ in decode_factors]
        self._decode_factors = [curve for _, curve in decode_factors]

    def prefill_s(self, num_tokens: int, context_tokens: int) -> float:
        """Of at least one token."""
        factor = self._prefill_factor(math.log(num_tokens))
        return _PREFILL_HOST_S + factor * self.prefill.seconds(num_tokens, context_tokens)

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """One step of a batch of at least one sequence; context of all of them."""
        at, context = math.log(batch), math.log(max(1.0, context_tokens / batch))
        right = min(bisect_right(self._batches, at), len(self._batches) - 1)
        left = max(0, right - 1)
        factor = self._decode_factors[left](context)
        if right > left:
            low, high = self._batches[left], self._batches[right]
            share = min(1.0, max(0.0, (at - low) / (high - low)))
            factor += share * (self._decode_factors[right](context) - factor)
        return _DECODE_HOST_S + factor * self.decode.seconds(batch, context_tokens)

    @property
    def tokens_per_s(self) -> float:
        """What a worker publishes as its rate of prefill: of 2,048 tokens."""
        return 2048 / self.prefill_s(2048, 0)


@cache
def service_times(name: str) -> tuple[Machine, ServiceTimes]:
    """Raises InvalidRequest for an unknown name."""
    if name not in MACHINES:
        raise InvalidRequest("machine", name, f"known machines: {', '.join(MACHINES)}")
    machine = MACHINES[name]
    rows = [row for row in _table() if row[:3] == (machine.system, machine.model, machine.gpus)]
    prefill = [(n, seconds) for *_, phase, _, n, _, seconds in rows if phase == "prefill"]
    decode = [
        (batch, context, seconds) for *_, phase, batch, _, context, seconds in rows if phase == "decode"
    ]
    return machine, _fitted(prefill, decode)


_Row = tuple[str, str, int, str, int, int, int, float]


@cache
def _table() -> list[_Row]:
    packed = files("headrace.simulate").joinpath("data", "costmodel_llama31_hopper.csv.gz").read_bytes()
    rows = csv.DictReader(gzip.decompress(packed).decode().splitlines())
    return [
        (
            row["system"],
            row["model"],
            int(row["tp"]),
            row["phase"],
            int(row["batch"]),
            int(row["new_tokens_per_seq"]),
            int(row["context_per_seq"]),
            float(row["kernel_ms"]) / 1e3,
        )
        for row in rows
    ]


def _fitted(prefill: list[tuple[int, float]], decode: list[tuple[int, int, float]]) -> ServiceTimes:
    prefill_cost = PrefillCost(
        *_coefficients([(1.0, float(n), n * n / 2) for n, _ in prefill], [s for _, s in prefill])
    )
    features = [(1.0, float(batch), float(batch * context)) for batch, context, _ in decode]
    decode_cost = DecodeCost(*_coefficients(features, [seconds for *_, seconds in decode]))
    factors: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for batch, context, seconds in sorted(decode):
        factor = seconds / decode_cost.seconds(batch, batch * context)
        factors[batch].append((math.log(context), factor))
    return ServiceTimes(
        prefill_cost,
        decode_cost,
        Curve([(math.log(n), seconds / prefill_cost.seconds(n, 0)) for n, seconds in sorted(prefill)]),
        [(math.log(batch), Curve(points)) for batch, points in sorted(factors.items())],
    )


def _coefficients(features: list[tuple[float, float, float]], seconds: list[float]) -> list[float]:
    """Least squares of relative errors, never negative."""
    x, y = np.array(features), np.array(seconds)
    kept = list(range(x.shape[1]))
    while True:
        solution, *_ = np.linalg.lstsq(x[:, kept] / y[:, None], np.ones(len(y)), rcond=None)
        if solution.min() >= 0:
            break
        del kept[int(solution.argmin())]
    result = [0.0] * x.shape[1]
    for place, value in zip(kept, solution.tolist(), strict=True):
        result[place] = value
    return result
