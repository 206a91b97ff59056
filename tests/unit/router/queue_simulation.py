"""A fleet of queues in virtual time, for comparing policies: real policy, ledger, cost fits, view and index; workers
are arithmetic.

    arrival ─▶ a router: snapshot ─▶ policy ─▶ P: one prompt at a time, first come first served ─▶ token ─▶ D: decodes
                   ▲                           └ its cache: whole blocks, least recently used out                │
                   └── events, late or lost ◀── blocks and load, published at intervals ◀──┘     report ─▶ fits ◀┘

Workers take `TRUE` times with noise; the policy knows them only from reports. Routers share nothing but what workers
publish. Deterministic by seed.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from statistics import fmean, quantiles

from headrace.clock import VirtualClock
from headrace.directory.base import BlockSnapshot
from headrace.directory.records import DirectoryEvent, Role, RouterShare, WorkerLoad, WorkerRecord
from headrace.directory.view import DirectoryView
from headrace.rpc.v1 import worker_pb2
from headrace.tier import Tier
from router.costs import DecodeCost, FleetCosts, PrefillCost, TransferCost, WorkerCosts
from router.fleet import Fleet
from router.ledger import Charge, Ledger
from router.policy import load_policy
from router.policy.views import ClusterView, Plan, RequestView, Targets

BLOCK = 16
TOKEN_BYTES = 100_000
TRUE = WorkerCosts(PrefillCost(5e-3, 1e-4, 5e-9), DecodeCost(8e-3, 2e-4, 1e-8))
LINK = TransferCost(1e-3, 1e-10)


@dataclass(frozen=True)
class Arrival:
    at_s: float
    blocks: tuple[int, ...]  # ids of the prompt's blocks, each standing for itself and what is before it
    num_output: int


@dataclass(frozen=True)
class Events:
    """How what workers publish reaches the routers."""

    interval_s: float | None = 0.05  # None: never
    delay_s: float = 0.003  # from the worker to a router's view
    lost: float = 0.0  # fraction


@dataclass(frozen=True)
class Prompt:
    router_id: str
    num_tokens: int
    num_computed: int  # here
    from_s: float
    until_s: float

    def num_pending(self, now_s: float) -> int:
        share = (self.until_s - now_s) / (self.until_s - self.from_s)
        return round(self.num_computed * min(1.0, max(0.0, share)))


@dataclass
class Worker:
    record: WorkerRecord
    num_blocks: int
    free_at_s: float = 0.0
    busy_s: float = 0.0
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    batch: int = 0
    context: int = 0
    changed: set[int] = field(default_factory=set)  # blocks that came or went since the last event
    sequence: int = 1
    told: tuple[RouterShare, ...] = ()  # with the last event
    prompts: list[Prompt] = field(default_factory=list)  # that it has not finished
    decoding: Counter[str] = field(default_factory=Counter)  # sequences by router
    decoding_tokens: Counter[str] = field(default_factory=Counter)

    def cached_blocks(self, blocks: tuple[int, ...]) -> int:
        return len(list(itertools.takewhile(self.cache.__contains__, blocks)))

    def keep(self, blocks: tuple[int, ...]) -> None:
        for block in reversed(blocks):  # the beginning is used last, as in a tree whose leaves go first
            self.cache.pop(block, None)
            self.cache[block] = None
        self.changed.update(blocks)
        while len(self.cache) > self.num_blocks:
            self.changed.add(self.cache.popitem(last=False)[0])

    def event(self, shares: tuple[RouterShare, ...]) -> DirectoryEvent:
        self.sequence += 1
        stored = {digest(b): Tier.DEVICE for b in self.changed if b in self.cache}
        removed = tuple(digest(b) for b in self.changed if b not in self.cache)
        self.changed.clear()
        return DirectoryEvent(
            self.record.worker_id,
            self.record.incarnation,
            self.sequence,
            stored,
            removed,
            shares=shares,
        )

    def shares(self, now_s: float) -> tuple[RouterShare, ...]:
        pending: Counter[str] = Counter()
        prompts = Counter(prompt.router_id for prompt in self.prompts)
        tokens = Counter(self.decoding_tokens)
        for prompt in self.prompts:
            pending[prompt.router_id] += prompt.num_pending(now_s)
            tokens[prompt.router_id] += prompt.num_tokens
        return tuple(
            RouterShare(name, prompts[name] + self.decoding[name], tokens[name], pending[name])
            for name in sorted(prompts.keys() | +self.decoding)
        )

    def snapshot(self) -> BlockSnapshot:
        """As the directory has it: as of the last event."""
        current = self.cache.keys() - self.changed
        return BlockSnapshot(self.sequence, {digest(block): Tier.DEVICE for block in current})


class Router:
    """What a router process has for itself."""

    def __init__(self, name: str, workers: list[Worker], clock: VirtualClock) -> None:
        self.view = DirectoryView(clock, router_id=name)
        self.ledger = Ledger(clock)
        self.costs = FleetCosts(clock)
        for worker in workers:
            self.view.admit(worker.record)
            self.view.load(worker.record.worker_id, worker.record.incarnation, worker.snapshot())
        self.fleet = Fleet(self.view, "m", self.ledger)


@dataclass(frozen=True)
class Result:
    ttfts_s: tuple[float, ...]
    hit_rate: float  # of prompt tokens
    balance: float  # busiest prefill worker over the mean
    costs: FleetCosts  # as the first router learned them

    @property
    def mean_s(self) -> float:
        return fmean(self.ttfts_s)

    @property
    def p95_s(self) -> float:
        return quantiles(self.ttfts_s, n=20)[-1]


def shared_prefixes(
    seed: int, *, num_requests: int, rate: float, num_groups: int = 40, common_blocks: int = 4
) -> list[Arrival]:
    """Poisson arrivals of prompts with a beginning that all share, one of their group's, popular ones more, and an own
    end. A third goes on from an earlier prompt of its group, as a next turn does.
    """
    random = Random(seed)
    ids = itertools.count()
    common = tuple(next(ids) for _ in range(common_blocks))
    groups = [
        common + tuple(next(ids) for _ in range(random.choice((16, 32, 64, 128)))) for _ in range(num_groups)
    ]
    popularity = [1 / (1 + rank) for rank in range(num_groups)]
    last: dict[int, tuple[int, ...]] = {}
    arrivals, at_s = [], 0.0
    for _ in range(num_requests):
        at_s += random.expovariate(rate)
        [group] = random.choices(range(num_groups), popularity)
        start = last.get(group, groups[group]) if random.random() < 1 / 3 else groups[group]
        if len(start) > 400:
            start = groups[group]
        prompt = last[group] = start + tuple(next(ids) for _ in range(random.choice((4, 8, 16, 32, 64))))
        arrivals.append(Arrival(at_s, prompt, random.randint(8, 64)))
    return arrivals


class Simulation:
    def __init__(
        self,
        policy: str,
        *,
        num_prefill: int = 6,
        num_decode: int = 3,
        num_routers: int = 1,
        cache_blocks: int = 1500,
        noise: float = 0.1,
        seed: int = 1,
        events: Events = Events(),
    ) -> None:
        self.clock = VirtualClock()
        self.policy = load_policy(policy)
        self.random = Random(seed)
        self.noise = noise
        self.published = events
        self.prefill = [
            Worker(_record(f"p{n}", Role.PREFILL, cache_blocks), cache_blocks) for n in range(num_prefill)
        ]
        self.decode = [
            Worker(_record(f"d{n}", Role.DECODE, cache_blocks), cache_blocks) for n in range(num_decode)
        ]
        self.workers = [*self.prefill, *self.decode]
        self.by_id = {worker.record.worker_id: worker for worker in self.workers}
        self.routers = [Router(f"r{n}", self.workers, self.clock) for n in range(num_routers)]
        self.num_cached = self.num_tokens = 0
        self.num_left = 0  # requests that are not over
        self.ttfts_s: list[float] = []
        self.events: list[tuple[float, int, Iterator[float]]] = []
        self.numbers = itertools.count(1)

    def run(self, arrivals: list[Arrival]) -> Result:
        self.num_left = len(arrivals)
        for arrival in arrivals:
            self._later(arrival.at_s, self._life(arrival))
        if self.published.interval_s is not None:
            for number, worker in enumerate(self.workers):  # not all at the same time
                self._later(self.published.interval_s * number / len(self.workers), self._publishing(worker))
        while self.events:
            at_s, _, life = heapq.heappop(self.events)
            self.clock.advance(at_s - self.clock.now())
            for until_s in life:
                self._later(until_s, life)
                break
        assert not any(router.ledger.accounts for router in self.routers)
        busy = [worker.busy_s for worker in self.prefill]
        return Result(
            tuple(self.ttfts_s),
            self.num_cached / self.num_tokens,
            max(busy) / max(fmean(busy), 1e-9),
            self.routers[0].costs,
        )

    def _later(self, at_s: float, life: Iterator[float]) -> None:
        heapq.heappush(self.events, (at_s, next(self.numbers), life))

    def _publishing(self, worker: Worker) -> Iterator[float]:
        while self.num_left:
            self._publish(worker)
            yield self.clock.now() + (self.published.interval_s or 0.0)

    def _publish(self, worker: Worker) -> None:
        """If there is anything to tell."""
        shares = worker.shares(self.clock.now())
        if self.published.interval_s is None or not (worker.changed or shares != worker.told):
            return
        worker.told = shares
        event = worker.event(shares)
        arrives_at = self.clock.now() + self.published.delay_s
        for router in self.routers:
            if self.random.random() >= self.published.lost:
                self._later(arrives_at, self._delivery(router, worker, event))

    def _delivery(self, router: Router, worker: Worker, event: DirectoryEvent) -> Iterator[float]:
        router.view.report_age_s = self.published.delay_s
        if not router.view.apply(event):
            router.view.load(event.worker_id, event.incarnation, worker.snapshot())
        yield from ()

    def _life(self, arrival: Arrival) -> Iterator[float]:
        """One request; yields the times until which it has to wait."""
        num_tokens = len(arrival.blocks) * BLOCK
        router = self.random.choice(self.routers)
        request = RequestView(num_tokens, next(self.numbers), hash(arrival.blocks[:16]), Targets(2.0, 0.1))
        plan = self.policy(request, self._snapshot(router, arrival.blocks))
        for worker in (*plan.prefill[:1], plan.decode):
            router.view.assume(worker.worker_id, worker.incarnation, digests(arrival.blocks))
        end = worker_pb2.SequenceEnd()
        with ExitStack() as stack:
            charge = stack.enter_context(router.ledger.charged(plan, num_tokens))
            yield from self._prefill(plan, arrival, end, router.view.router_id)
            self.ttfts_s.append(self.clock.now() - arrival.at_s)
            charge.prefilled()
            yield from self._decode(plan, arrival, charge, end, router.view.router_id)
        decode = self.by_id[plan.decode.worker_id].record
        router.costs.observe(
            self.by_id[end.prefill_worker].record if end.prefill_worker else decode, decode, end
        )
        self.num_left -= 1

    def _prefill(
        self, plan: Plan, arrival: Arrival, end: worker_pb2.SequenceEnd, router_id: str
    ) -> Iterator[float]:
        chosen = plan.prefill[0] if plan.prefill else plan.decode
        worker = self.by_id[chosen.worker_id]
        num_tokens = len(arrival.blocks) * BLOCK
        cached = min(
            worker.cached_blocks(arrival.blocks) * BLOCK + plan.prediction.fetched_tokens, num_tokens - 1
        )
        fetch_s = LINK.seconds(plan.prediction.fetched_tokens * TOKEN_BYTES)
        took_s = TRUE.prefill.seconds(num_tokens - cached, cached) * self._noise()
        start_s = max(self.clock.now(), worker.free_at_s)
        worker.free_at_s = start_s + took_s + fetch_s
        worker.busy_s += took_s + fetch_s
        worker.keep(arrival.blocks)
        self.num_cached += cached
        self.num_tokens += num_tokens
        end.prefill_s, end.prefill_tokens, end.context_tokens = took_s, num_tokens - cached, cached
        end.prefill_worker = chosen.worker_id if plan.prefill else ""
        prompt = Prompt(router_id, num_tokens, num_tokens - cached, start_s, worker.free_at_s)
        worker.prompts.append(prompt)
        self._publish(worker)  # a prompt that arrives is told at once
        yield worker.free_at_s
        worker.prompts.remove(prompt)

    def _decode(
        self, plan: Plan, arrival: Arrival, charge: Charge, end: worker_pb2.SequenceEnd, router_id: str
    ) -> Iterator[float]:
        worker = self.by_id[plan.decode.worker_id]
        num_tokens = len(arrival.blocks) * BLOCK
        missing = num_tokens - worker.cached_blocks(arrival.blocks) * BLOCK
        if plan.prefill:
            end.bytes_moved = missing * TOKEN_BYTES
            end.transfer_s = LINK.seconds(end.bytes_moved) * self._noise()
        worker.batch += 1
        worker.context += num_tokens
        step_s = TRUE.decode.seconds(worker.batch, worker.context) * self._noise()
        end.mean_batch, end.mean_batch_context_tokens = worker.batch, worker.context
        end.decode_tokens, end.decode_s = arrival.num_output, step_s * arrival.num_output
        worker.decoding[router_id] += 1
        worker.decoding_tokens[router_id] += num_tokens
        yield self.clock.now() + end.transfer_s + end.decode_s
        worker.decoding[router_id] -= 1
        worker.decoding_tokens[router_id] -= num_tokens
        charge.generated(arrival.num_output)
        worker.keep(arrival.blocks)
        worker.batch -= 1
        worker.context -= num_tokens

    def _snapshot(self, router: Router, blocks: tuple[int, ...]) -> ClusterView:
        # The last block is computed in any case.
        matches = router.view.match(digests(blocks[:-1]))
        cluster = router.fleet.cluster(matches, router.costs, set(), set())
        assert cluster is not None
        return cluster

    def _noise(self) -> float:
        return self.random.lognormvariate(0, self.noise)


@lru_cache(maxsize=1 << 17)
def digest(block: int) -> bytes:
    return hashlib.md5(block.to_bytes(8, "little")).digest()


def digests(blocks: Iterable[int]) -> list[bytes]:
    return [digest(block) for block in blocks]


def _record(name: str, role: Role, num_blocks: int = 1000) -> WorkerRecord:
    return WorkerRecord(
        worker_id=name,
        role=role,
        address=f"{name}:1",
        incarnation=f"{name}.1",
        model_name="m",
        model_fingerprint="m",
        tokenizer_fingerprint="t",
        kv_dtype="bfloat16",
        block_size_tokens=BLOCK,
        num_blocks=num_blocks,
        max_model_tokens=1 << 20,
        vocab_size=1000,
        transport="local",
        draining=False,
        load=WorkerLoad(0, 0, 0, 0, 0, prefill_tokens_per_s=7000.0),
        block_bytes=BLOCK * TOKEN_BYTES,
        kind="simulated",
    )
