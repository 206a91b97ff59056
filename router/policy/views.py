"""What a policy sees and what it answers. Plain data: no I/O, no clock; randomness only through the request's seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray

from router.costs import TransferCost, WorkerCosts, prior_costs


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request's answer should keep to, in seconds."""

    ttft_s: float
    itl_s: float


NO_TARGETS = Targets(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class RequestView:
    num_prompt_tokens: int
    seed: int  # for ties
    prefix_key: int = 0  # equal for prompts that begin alike
    targets: Targets = NO_TARGETS


_PRIOR = prior_costs(0)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at this moment. Loads are charged when a plan is chosen, not when reports arrive; what other routers
    sent is in them as far as the worker has reported it.
    """

    worker_id: str
    incarnation: str
    address: str
    cached_tokens: int  # of this request's prompt, by the prefix index
    block_size_tokens: int
    capacity_tokens: int  # of its KV pool
    assumed_tokens: int = 0  # of `cached_tokens`: sent there, and not yet reported by the worker
    queue_s: float = 0.0  # predicted time until it has computed the prompts that it was sent
    pending_prefill_tokens: int = 0  # of them
    num_requests: int = 0  # that it computes or decodes
    active_sequences: int = 0  # that it decodes, those still prefilled included
    active_tokens: int = 0  # of these
    costs: WorkerCosts = _PRIOR

    @property
    def reported_tokens(self) -> int:
        """What others can fetch from it."""
        return self.cached_tokens - self.assumed_tokens


def _any_transfer(owner: str, reader: str) -> TransferCost:
    del owner, reader
    return TransferCost(1e-3, 1e-9)


Floats = NDArray[np.float64]


class Columns:
    """What n workers are scored by, [n] each: the same as in their views."""

    NUM_LOADS, NUM_COSTS = 5, 6

    def __init__(self, loads: Floats, costs: Floats) -> None:
        """`loads` [5, n]; `costs` [6, n], or [6, 1] for workers of one kind."""
        self.cached_tokens, self.queue_s, self.active_sequences, self.active_tokens, self.capacity_tokens = (
            loads
        )
        self._costs = costs

    def prefill_s(self, num_tokens: Floats | float, context_tokens: Floats | float) -> Floats:
        """As `PrefillCost.seconds`, for at least one token."""
        base_s, token_s, attention_s = self._costs[:3]
        return base_s + num_tokens * (token_s + attention_s * (context_tokens + num_tokens / 2))

    def decode_s(self, batch: Floats, context_tokens: Floats) -> Floats:
        """As `DecodeCost.seconds`."""
        base_s, sequence_s, context_s = self._costs[3:]
        return base_s + sequence_s * batch + context_s * context_tokens


class Pool(Sequence[WorkerView]):
    """Workers by number. They are scored by `columns`; the view of one is made when it is asked for."""

    def __init__(self, columns: Columns, make: Callable[[int], WorkerView]) -> None:
        self.columns = columns
        self._make = make
        self._views: dict[int, WorkerView] = {}

    @classmethod
    def of(cls, views: Iterable[WorkerView]) -> Pool:
        views = tuple(views)
        loads = [
            (v.cached_tokens, v.queue_s, v.active_sequences, v.active_tokens, v.capacity_tokens)
            for v in views
        ]
        costs = [cost_row(view.costs) for view in views]
        columns = Columns(
            np.array(loads, np.float64).reshape(-1, Columns.NUM_LOADS).T,
            np.array(costs, np.float64).reshape(-1, Columns.NUM_COSTS).T,
        )
        return cls(columns, views.__getitem__)

    def __len__(self) -> int:
        return len(self.columns.queue_s)

    @overload
    def __getitem__(self, index: int) -> WorkerView: ...

    @overload
    def __getitem__(self, index: slice) -> list[WorkerView]: ...

    def __getitem__(self, index: int | slice) -> WorkerView | list[WorkerView]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        view = self._views.get(number)
        if view is None:
            view = self._views[number] = self._make(number)
        return view


def cost_row(costs: WorkerCosts) -> tuple[float, ...]:
    """As `Columns` has them."""
    prefill, decode = costs.prefill, costs.decode
    return (
        prefill.base_s,
        prefill.token_s,
        prefill.attention_s,
        decode.base_s,
        decode.sequence_s,
        decode.context_s,
    )


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Workers that can take requests now."""

    prefill: Pool
    decode: Pool
    holders: tuple[
        WorkerView, ...
    ] = ()  # of the first blocks of the prompt those that have the most, the most first
    token_bytes: float = 0.0  # KV of one token; 0: not known, and transfers are predicted by their latency
    transfer: Callable[[str, str], TransferCost] = _any_transfer  # owner to reader, by worker id. "": any
    unseen_s: float = 0.0  # of work, a worker: what other routers may have sent that no report can tell yet


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one plan, term by term."""

    queue_s: float
    prefill_s: float  # computing what is neither cached nor fetched
    fetch_s: float  # of prefix blocks from a source; 0: not worth it
    transfer_s: float  # the whole hand-off, most of it while later chunks are computed
    exposed_s: float  # the part of it that delays the second token
    itl_s: float  # of the decode worker with this sequence added
    cached_tokens: int  # on the worker that prefills
    fetched_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.prefill_s + self.fetch_s


@dataclass(frozen=True, slots=True)
class Plan:
    """`prefill` is the first choice and its alternates; empty: the decode worker prefills itself."""

    decode: WorkerView
    prefill: tuple[WorkerView, ...]
    prediction: Prediction
    reason: str  # why the winner won

    @property
    def predicted_cached_tokens(self) -> int:
        """What the worker that prefills is predicted to find in its cache."""
        return self.prefill[0].cached_tokens if self.prefill else self.decode.cached_tokens


class Policy(Protocol):
    def __call__(self, request: RequestView, cluster: ClusterView) -> Plan:
        """Choose among `cluster.decode` (never empty) and `cluster.prefill` (may be empty)."""
        ...


MAX_ALTERNATES = 2
MAX_SOURCES = 2


def sources(plan: Plan, cluster: ClusterView) -> list[WorkerView]:
    """Workers that hold more of the prompt than the one that prefills it, the most first."""
    more = [worker for worker in cluster.holders if worker.reported_tokens > plan.predicted_cached_tokens]
    return sorted(more, key=lambda worker: worker.reported_tokens, reverse=True)[:MAX_SOURCES]
