"""What a policy sees and what it answers. Plain data: no I/O, no clock; randomness only through the request's seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RequestView:
    num_prompt_tokens: int
    seed: int  # for ties


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at this moment. Loads are the router's own ledger: counted at selection, not when metrics arrive."""

    worker_id: str
    incarnation: str
    address: str
    cached_tokens: int  # of this request's prompt, by the prefix index
    pending_prefill_tokens: (
        int  # uncached prompt tokens that this router has sent it and that are not computed yet
    )
    active_tokens: int  # tokens of the requests that it decodes for this router
    capacity_tokens: int  # of its KV pool
    block_size_tokens: int
    assumed_tokens: int = 0  # of `cached_tokens`: sent there, and not yet reported by the worker

    @property
    def reported_tokens(self) -> int:
        """What others can fetch from it."""
        return self.cached_tokens - self.assumed_tokens


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Workers that can take requests now."""

    prefill: tuple[WorkerView, ...]
    decode: tuple[WorkerView, ...]
    holders: tuple[WorkerView, ...] = ()  # of the first blocks of the prompt, those that end soon among them


@dataclass(frozen=True, slots=True)
class Plan:
    """`prefill` is the first choice and its alternates; empty: the decode worker prefills itself."""

    decode: WorkerView
    prefill: tuple[WorkerView, ...]
    explanation: tuple[str, ...]  # one line per candidate: its terms, and why the winner won

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
