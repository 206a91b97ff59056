"""What a policy sees and what it answers. Plain data: no I/O, no clock; randomness only through the request's seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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


@dataclass(
    slots=True, unsafe_hash=True
)  # not frozen, for one is made per worker and request; changed by nobody
class WorkerView:
    """One worker at this moment. Loads are the router's own ledger: counted at selection, not when metrics arrive."""

    worker_id: str
    incarnation: str
    address: str
    cached_tokens: int  # of this request's prompt, by the prefix index
    block_size_tokens: int
    capacity_tokens: int  # of its KV pool
    assumed_tokens: int = 0  # of `cached_tokens`: sent there, and not yet reported by the worker
    queue_s: float = 0.0  # predicted time until it has computed the prompts that it was sent
    pending_prefill_tokens: int = 0  # of them
    num_requests: int = 0  # that it computes or decodes for this router
    active_sequences: int = (
        0  # of the requests that it decodes for this router, those still prefilled included
    )
    active_tokens: int = 0  # of these
    costs: WorkerCosts = _PRIOR

    @property
    def reported_tokens(self) -> int:
        """What others can fetch from it."""
        return self.cached_tokens - self.assumed_tokens


def _any_transfer(owner: str, reader: str) -> TransferCost:
    del owner, reader
    return TransferCost(1e-3, 1e-9)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Workers that can take requests now."""

    prefill: tuple[WorkerView, ...]
    decode: tuple[WorkerView, ...]
    holders: tuple[WorkerView, ...] = ()  # of the first blocks of the prompt, those that end soon among them
    token_bytes: float = 0.0  # KV of one token; 0: not known, and transfers are predicted by their latency
    transfer: Callable[[str, str], TransferCost] = _any_transfer  # from owner to reader, by worker id


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
