"""A worker: prompts one after the other, first come first served, and a batch that decodes beside them.

    submit ──▶ queue ──▶ [blocks from a neighbour, from the host tier] ──▶ computed ──▶ first token
    join ──▶ room in the pool? ──▶ batch: a token a step for all in it ──▶ over

What a worker does both of shares its steps: a chunk of the prompt, and a token for each sequence of the batch. Times
between two changes of the batch are computed at once, from how large it is and how much context it has then.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from headrace.directory.records import WorkerRecord
from headrace.simulate.cache import BlockCache
from headrace.simulate.service_times import ServiceTimes
from headrace.traces.trace import TraceRequest
from router.ledger import Charge
from router.policy.prediction import CHUNK_TOKENS
from router.policy.views import Plan


@dataclass(slots=True, eq=False)
class Life:
    """One request on its way."""

    request: TraceRequest
    arrived_s: float
    blocks: tuple[int, ...]  # the full ones: those that can be cached
    router: int
    plan: Plan
    charge: Charge
    sources: tuple[int, ...] = ()  # workers to fetch from
    expected_s: float = 0.0  # of computing, by the worker's cache when it came
    num_cached: int = 0  # tokens, without those fetched
    num_fetched: int = 0
    num_host: int = 0  # of those cached: from the host tier
    started_s: float = 0.0  # computing
    first_token_s: float = 0.0
    over_s: float = 0.0
    ready_s: float = 0.0  # when the KV is where it decodes
    joined_s: float = 0.0
    prefill_s: float = 0.0
    num_moved: int = 0  # bytes handed over
    transfer_s: float = 0.0

    @property
    def num_computed(self) -> int:
        return self.request.num_input - self.num_cached - self.num_fetched

    @property
    def predicted_ttft_s(self) -> float:
        return self.plan.prediction.ttft_s

    @property
    def num_decoded(self) -> int:
        """Tokens behind the first."""
        return max(0, self.request.num_output - 1)


@dataclass(slots=True, eq=False)
class Worker:
    number: int
    record: WorkerRecord
    cache: BlockCache
    times: ServiceTimes
    capacity_tokens: int
    queue: deque[Life] = field(default_factory=deque)
    computing: Life | None = None
    free_at_s: float = 0.0  # of the prompt that is computed
    backlog_s: float = 0.0  # of those that wait, as it was when they came
    busy_s: float = 0.0
    num_computed: int = 0  # tokens
    out_free_s: float = 0.0  # the links
    in_free_s: float = 0.0
    sequence: int = 1  # of its last event
    is_publishing: bool = False
    batch: Batch = field(init=False)

    def __post_init__(self) -> None:
        self.batch = Batch(self)

    def pending(self, now_s: float) -> Iterator[tuple[Life, int]]:
        """Prompts that are not computed yet, and how many of their tokens."""
        if self.computing is not None:
            share = (self.free_at_s - now_s) / (self.free_at_s - self.computing.started_s)
            yield self.computing, round(self.computing.num_computed * min(1.0, share))
        for life in self.queue:
            known = self.cache.match(life.blocks) * self.record.block_size_tokens
            yield life, max(1, life.request.num_input - known)

    def queue_s(self, now_s: float) -> float:
        return self.backlog_s + (max(0.0, self.free_at_s - now_s) if self.computing else 0.0)


class Batch:
    """Sequences that decode: a clock that counts steps, and who leaves at which step."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._leaves: list[tuple[float, int, Life]] = []
        self._waiting: deque[Life] = deque()
        self._steps = 0.0
        self._context = 0.0  # tokens of all
        self._reserved = 0  # tokens, answers included
        self._at_s = 0.0
        self._step_s = 1.0
        self._number = 0
        self.version = 0  # a leave that was planned for another one is void

    def __len__(self) -> int:
        return len(self._leaves)

    def lives(self) -> Iterator[Life]:
        """Those that wait for room, too."""
        yield from (life for *_, life in self._leaves)
        yield from self._waiting

    @property
    def context_tokens(self) -> int:
        return round(self._context)

    def add(self, life: Life, now_s: float) -> bool:
        """False: it waits for room."""
        if self._waiting or not self._has_room(life):
            self._waiting.append(life)
            return False
        self._enter(life, now_s)
        return True

    def _has_room(self, life: Life) -> bool:
        return not self._leaves or self._reserved + _room(life) <= self._worker.capacity_tokens

    def _enter(self, life: Life, now_s: float) -> None:
        self._advance(now_s)
        life.joined_s = now_s
        self._number += 1
        heapq.heappush(self._leaves, (self._steps + life.num_decoded, self._number, life))
        self._context += life.request.num_input
        self._reserved += _room(life)

    def _advance(self, now_s: float) -> None:
        steps = (now_s - self._at_s) / self._step_s
        self._at_s = now_s
        if self._leaves:
            self._steps += steps
            self._context += steps * len(self._leaves)

    def take_out(self, now_s: float) -> tuple[Life, list[Life]]:
        """The one that is over, and those that come in for it."""
        self._advance(now_s)
        at, _, life = heapq.heappop(self._leaves)
        self._steps = at
        self._context -= life.request.num_input + life.num_decoded
        self._reserved -= _room(life)
        if not self._leaves:
            self._context = 0.0
        entered: list[Life] = []
        while self._waiting and self._has_room(self._waiting[0]):
            entered.append(self._waiting.popleft())
            self._enter(entered[-1], now_s)
        return life, entered

    def retime(self, now_s: float, chunk_s: float) -> float | None:
        """The batch or what runs beside it has changed: when the next one is over. None: nobody is there."""
        self._advance(now_s)
        self.version += 1
        if not self._leaves:
            return None
        self._step_s = self._worker.times.decode_s(len(self._leaves), self._context) + chunk_s
        return now_s + max(0.0, self._leaves[0][0] - self._steps) * self._step_s


def _room(life: Life) -> int:
    return life.request.num_input + life.request.num_output


Noise = Callable[[], float]


def noise_of(random: Random, sigma: float) -> Noise:
    """Factors on times."""
    return (lambda: random.lognormvariate(0.0, sigma)) if sigma else (lambda: 1.0)


def num_chunks(num_tokens: int) -> int:
    return -(-num_tokens // CHUNK_TOKENS)
