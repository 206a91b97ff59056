"""What work costs in seconds: three small models, and how they are learned from what workers report.

    prefill     a + b·n + c·n·(p + n/2)     n tokens to compute behind p that are cached
    decode      a + b·batch + d·context     one step; context: tokens of all sequences in the batch
    transfer    l + bytes / bandwidth       one hand-off or fetch

Formulas: DistServe's estimators and Mooncake's conductor, as compared in the literature on cluster scheduling. The
dispatcher owns one `FleetCosts`; policies read it through the snapshot.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from dataclasses import astuple, dataclass
from operator import mul

from headrace.clock import Clock, SystemClock
from headrace.directory.records import WorkerRecord
from headrace.rpc.v1 import worker_pb2

_Matrix = list[list[float]]


@dataclass(frozen=True, slots=True)
class PrefillCost:
    base_s: float
    token_s: float
    attention_s: float  # per token and token of context before it

    def seconds(self, num_tokens: float, context_tokens: float) -> float:
        """Of computing `num_tokens` behind `context_tokens` cached ones; 0 for nothing to compute."""
        if num_tokens <= 0:
            return 0.0
        return (
            self.base_s
            + self.token_s * num_tokens
            + self.attention_s * num_tokens * (context_tokens + num_tokens / 2)
        )


@dataclass(frozen=True, slots=True)
class DecodeCost:
    base_s: float
    sequence_s: float
    context_s: float

    def seconds(self, batch: float, context_tokens: float) -> float:
        """Of one step: the inter-token latency of every sequence in it."""
        return self.base_s + self.sequence_s * batch + self.context_s * context_tokens


@dataclass(frozen=True, slots=True)
class TransferCost:
    latency_s: float
    byte_s: float

    def seconds(self, num_bytes: float) -> float:
        """0 for nothing to move."""
        return self.latency_s + self.byte_s * num_bytes if num_bytes > 0 else 0.0


@dataclass(frozen=True, slots=True)
class WorkerCosts:
    """Of one kind of worker."""

    prefill: PrefillCost
    decode: DecodeCost


_DEFAULT_TOKENS_PER_S = 2000.0  # before anything is known; the first reports move it
_DEFAULT_BYTES_PER_S = 1e9
_DEFAULT_LATENCY_S = 1e-3


def prior_costs(prefill_tokens_per_s: float) -> WorkerCosts:
    """What is assumed of a worker that prefills so fast (0: unknown), before it reported anything.

    The ratios are those of Llama 8B on one H200: attention as dear as the rest at 20,000 tokens of context, a decode
    step as long as 200 tokens of prefill, one more sequence in it half a token, its context 1/600 token per token.
    """
    token_s = 1 / (prefill_tokens_per_s or _DEFAULT_TOKENS_PER_S)
    return WorkerCosts(
        PrefillCost(base_s=50 * token_s, token_s=token_s, attention_s=5e-5 * token_s),
        DecodeCost(base_s=200 * token_s, sequence_s=token_s / 2, context_s=token_s / 600),
    )


class RecursiveFit:
    """Least squares with forgetting, coefficients never negative, drawn towards a prior where data say nothing.

    In units of the prior: coefficient i is prior[i]·u[i], and u minimises

        Σ age-weighted (x·(prior∘u) / predicted - y / predicted)² + ridge·|u - 1|²        u >= 0

    Errors are relative, so that long and short observations count alike; one that is far off counts less (Huber).
    Where observations are too alike to tell coefficients apart, they move as little as they have to.
    """

    def __init__(self, prior: tuple[float, ...], *, memory: int = 200, ridge: float = 0.05) -> None:
        """`prior` > 0. An observation's weight has fallen to 1/e after `memory` others."""
        self.prior = prior
        self.num_observations = 0
        self._keep = 1 - 1 / memory
        self._ridge = ridge
        self._normal = [[0.0] * len(prior) for _ in prior]
        self._target = [0.0] * len(prior)
        self._scale = [1.0] * len(prior)
        self.coefficients = prior

    def observe(self, features: tuple[float, ...], seconds: float) -> None:
        """Nothing happens for what is not a positive, finite time."""
        x = [feature * prior for feature, prior in zip(features, self.prior, strict=True)]
        predicted = sum(map(mul, x, self._scale))
        if not (0 < seconds < math.inf and predicted > 0):
            return
        error = abs(seconds / predicted - 1)
        weight = min(1.0, 1.0 / error) if error else 1.0
        for row, each in zip(self._normal, x, strict=True):
            factor = weight * each / predicted / predicted
            row[:] = [self._keep * old + factor * other for old, other in zip(row, x, strict=True)]
        factor = weight * seconds / predicted / predicted
        self._target = [self._keep * old + factor * each for old, each in zip(self._target, x, strict=True)]
        self.num_observations += 1
        self._scale = self._solved()
        self.coefficients = tuple(map(mul, self.prior, self._scale))

    def _solved(self) -> list[float]:
        normal = [list(row) for row in self._normal]
        for place, row in enumerate(normal):
            row[place] += self._ridge
        target = [each + self._ridge for each in self._target]
        best = _solution(normal, target)
        return best if min(best) >= 0 else _non_negative(normal, target)


def _non_negative(normal: _Matrix, target: list[float]) -> list[float]:
    """The minimiser of u·N·u/2 - t·u over u >= 0: the best of those that set some coefficients to 0."""
    size = len(target)
    best, best_value = [0.0] * size, 0.0
    for count in range(1, size):
        for chosen in itertools.combinations(range(size), count):
            wanted = [target[i] for i in chosen]
            part = _solution([[normal[i][j] for j in chosen] for i in chosen], wanted)
            value = -sum(map(mul, part, wanted)) / 2
            if min(part) >= 0 and value < best_value:
                best, best_value = [0.0] * size, value
                for place, each in zip(chosen, part, strict=True):
                    best[place] = each
    return best


def _solution(normal: _Matrix, target: list[float]) -> list[float]:
    """Of N·u = t by elimination; N is positive definite, so no pivot is 0. Of so few unknowns numpy's call alone takes
    several times as long, and this runs at each report.
    """
    rows = [[*row, each] for row, each in zip(normal, target, strict=True)]
    size = len(rows)
    for place, pivot in enumerate(rows):
        for row in rows[place + 1 :]:
            factor = row[place] / pivot[place]
            for column in range(place, size + 1):
                row[column] -= factor * pivot[column]
    solution = [0.0] * size
    for place in reversed(range(size)):
        row = rows[place]
        known = sum(row[column] * solution[column] for column in range(place + 1, size))
        solution[place] = (row[size] - known) / row[place]
    return solution


class _KindFit:
    """The fits of one kind of worker, or of all."""

    def __init__(self, prior: WorkerCosts) -> None:
        self.prefill = RecursiveFit((prior.prefill.base_s, prior.prefill.token_s, prior.prefill.attention_s))
        self.decode = RecursiveFit((prior.decode.base_s, prior.decode.sequence_s, prior.decode.context_s))

    @property
    def costs(self) -> WorkerCosts:
        return WorkerCosts(PrefillCost(*self.prefill.coefficients), DecodeCost(*self.decode.coefficients))


def _above_zero(costs: WorkerCosts) -> WorkerCosts:
    """Fit to be a prior, which only scales: a coefficient of 0 would stay 0 for ever."""
    floor = prior_costs(1 / costs.prefill.token_s if costs.prefill.token_s else 0.0)
    mine, least = ((*astuple(each.prefill), *astuple(each.decode)) for each in (costs, floor))
    raised = [max(own, 0.1 * low) for own, low in zip(mine, least, strict=True)]
    return WorkerCosts(PrefillCost(*raised[:3]), DecodeCost(*raised[3:]))


_MAX_PAIRS = 4096
_MAX_KINDS = 256
_PAIR_WEIGHT = 0.2  # of a new report in a pair's speed, at least
_PAIR_HALF_LIFE_S = 5.0  # of what was reported before
_LENGTH_WEIGHT = 0.02  # of a new answer in the mean length
_DEFAULT_OUTPUT_TOKENS = 128.0


@dataclass(frozen=True, slots=True)
class _PairSpeed:
    factor: float  # times the fleet's cost
    at: float  # when it was last reported


class FleetCosts:
    """Costs by kind of worker (`WorkerRecord.kind`), and of transfers by pair of workers. Used on one event loop.

    A kind that reported little is predicted from the rate that its workers publish; without one, as the whole fleet.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._fleet = _KindFit(prior_costs(0))
        self._mean_output_tokens = _DEFAULT_OUTPUT_TOKENS
        self._kinds: dict[str, _KindFit] = {}
        self._costs: dict[str, WorkerCosts] = {}  # what `of` answers, until the next report
        self._transfer = RecursiveFit((_DEFAULT_LATENCY_S, 1 / _DEFAULT_BYTES_PER_S))
        self._pairs: OrderedDict[tuple[str, str], _PairSpeed] = OrderedDict()  # by (owner, reader)

    def of(self, record: WorkerRecord) -> WorkerCosts:
        known = self._costs.get(record.kind)
        if known is not None:
            return known
        fit = self._kinds.get(record.kind)
        rate = record.load.prefill_tokens_per_s
        if fit is None and rate:
            fit = self._add_kind(record.kind, prior_costs(rate))
        costs = self._costs[record.kind] = (fit or self._fleet).costs
        return costs

    def request_s(self, num_prompt_tokens: int, max_output_tokens: int, num_choices: int = 1) -> float:
        """What a request takes of any worker's time: its prompt, and its own part of the steps that decode it. Nothing
        of the prompt is counted as cached, and answers as long as they have been lately.
        """
        costs = self._fleet.costs
        num_tokens = min(max_output_tokens, self._mean_output_tokens)
        context = num_prompt_tokens + num_tokens / 2
        token_s = costs.decode.sequence_s + costs.decode.context_s * context
        return costs.prefill.seconds(num_prompt_tokens, 0) + num_choices * num_tokens * token_s

    def least_prefill_s(self, num_prompt_tokens: int) -> float:
        """Of a prompt that is cached but for its last token."""
        return self._fleet.costs.prefill.seconds(1, num_prompt_tokens - 1)

    def observe(
        self, prefill: WorkerRecord | None, decode: WorkerRecord | None, end: worker_pb2.SequenceEnd
    ) -> None:
        """Learn from one request's report. A worker that is gone by now teaches the fleet's costs alone."""
        if end.prefill_tokens and not end.failed_attempts:
            tokens, context = end.prefill_tokens, end.context_tokens
            features = (1.0, float(tokens), tokens * (context + tokens / 2))
            for fit in self._fits(prefill):
                fit.prefill.observe(features, end.prefill_s)
        if end.decode_tokens:
            self._mean_output_tokens += _LENGTH_WEIGHT * (end.decode_tokens - self._mean_output_tokens)
            features = (1.0, end.mean_batch, end.mean_batch_context_tokens)
            for fit in self._fits(decode):
                fit.decode.observe(features, end.decode_s / end.decode_tokens)
        if end.bytes_moved and prefill is not None and decode is not None and prefill is not decode:
            self._observe_transfer((prefill.worker_id, decode.worker_id), end.bytes_moved, end.transfer_s)
        self._costs.clear()

    def transfer(self, owner: str, reader: str) -> TransferCost:
        """Between two workers, by their ids."""
        latency_s, byte_s = self._transfer.coefficients
        speed = self._pairs.get((owner, reader))
        factor = 1.0 if speed is None else speed.factor
        return TransferCost(latency_s * factor, byte_s * factor)

    def observe_link(self, reader: str, link: worker_pb2.Link) -> None:
        """Learn from what a worker measured by itself, of a way that requests do not take: else it stayed for ever what
        it was when they were turned away from it.
        """
        if link.bytes:
            self._observe_transfer((link.worker_id, reader), link.bytes, link.seconds)

    def _observe_transfer(self, pair: tuple[str, str], num_bytes: int, seconds: float) -> None:
        if seconds <= 0:
            return
        now = self._clock.now()
        before = self._pairs.pop(pair, _PairSpeed(1.0, now))
        predicted = TransferCost(*self._transfer.coefficients).seconds(num_bytes)
        weight = max(_PAIR_WEIGHT, 1 - 0.5 ** ((now - before.at) / _PAIR_HALF_LIFE_S))
        factor = before.factor + weight * (seconds / predicted - before.factor)
        self._pairs[pair] = _PairSpeed(factor, now)
        if len(self._pairs) > _MAX_PAIRS:
            self._pairs.popitem(last=False)
        self._transfer.observe((1.0, float(num_bytes)), seconds)

    def _fits(self, record: WorkerRecord | None) -> list[_KindFit]:
        """Those that a report of this worker teaches."""
        if record is None:
            return [self._fleet]
        fit = self._kinds.get(record.kind) or self._add_kind(record.kind, _above_zero(self._fleet.costs))
        return [self._fleet, fit]

    def _add_kind(self, kind: str, prior: WorkerCosts) -> _KindFit:
        if len(self._kinds) >= _MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]  # the oldest
        fit = self._kinds[kind] = _KindFit(prior)
        return fit
