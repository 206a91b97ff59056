"""A fleet of queues in virtual time, for comparing policies: real policy, ledger and cost fits; workers are arithmetic.

    arrival ─▶ snapshot ─▶ policy ─▶ P: one prompt at a time, first come first served ─▶ first token ─▶ D: decodes
                                     └ its cache: whole blocks, least recently used out                 └ report ─▶ fits

Workers take `TRUE` times with noise; the policy knows them only from reports. Deterministic by seed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from statistics import fmean

from headrace.clock import VirtualClock
from headrace.directory.records import Role, WorkerLoad, WorkerRecord
from headrace.rpc.v1 import worker_pb2
from router.costs import DecodeCost, FleetCosts, PrefillCost, TransferCost, WorkerCosts
from router.ledger import Charge, Ledger
from router.policy import load_policy
from router.policy.views import ClusterView, Plan, Pool, RequestView, Targets, WorkerView

BLOCK = 16
TOKEN_BYTES = 100_000
TRUE = WorkerCosts(PrefillCost(5e-3, 1e-4, 5e-9), DecodeCost(8e-3, 2e-4, 1e-8))
LINK = TransferCost(1e-3, 1e-10)


@dataclass(frozen=True)
class Arrival:
    at_s: float
    blocks: tuple[int, ...]  # ids of the prompt's blocks, each standing for itself and what is before it
    num_output: int


@dataclass
class Worker:
    record: WorkerRecord
    num_blocks: int
    free_at_s: float = 0.0
    busy_s: float = 0.0
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    batch: int = 0
    context: int = 0

    def cached_blocks(self, blocks: tuple[int, ...]) -> int:
        return len(list(itertools.takewhile(self.cache.__contains__, blocks)))

    def keep(self, blocks: tuple[int, ...]) -> None:
        for block in reversed(blocks):  # the beginning is used last, as in a tree whose leaves go first
            self.cache.pop(block, None)
            self.cache[block] = None
        while len(self.cache) > self.num_blocks:
            self.cache.popitem(last=False)


@dataclass(frozen=True)
class Result:
    ttfts_s: tuple[float, ...]
    hit_rate: float  # of prompt tokens
    balance: float  # busiest prefill worker over the mean
    costs: FleetCosts

    @property
    def mean_s(self) -> float:
        return fmean(self.ttfts_s)


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
        cache_blocks: int = 1500,
        noise: float = 0.1,
        seed: int = 1,
    ) -> None:
        self.clock = VirtualClock()
        self.ledger = Ledger(self.clock)
        self.costs = FleetCosts()
        self.policy = load_policy(policy)
        self.random = Random(seed)
        self.noise = noise
        self.prefill = [Worker(_record(f"p{n}", Role.PREFILL), cache_blocks) for n in range(num_prefill)]
        self.decode = [Worker(_record(f"d{n}", Role.DECODE), cache_blocks) for n in range(num_decode)]
        self.by_id = {worker.record.worker_id: worker for worker in (*self.prefill, *self.decode)}
        self.num_cached = self.num_tokens = 0
        self.ttfts_s: list[float] = []
        self.events: list[tuple[float, int, Iterator[float]]] = []
        self.numbers = itertools.count(1)

    def run(self, arrivals: list[Arrival]) -> Result:
        for arrival in arrivals:
            self._later(arrival.at_s, self._life(arrival))
        while self.events:
            at_s, _, life = heapq.heappop(self.events)
            self.clock.advance(at_s - self.clock.now())
            for until_s in life:
                self._later(until_s, life)
                break
        assert not self.ledger.accounts
        busy = [worker.busy_s for worker in self.prefill]
        return Result(
            tuple(self.ttfts_s),
            self.num_cached / self.num_tokens,
            max(busy) / max(fmean(busy), 1e-9),
            self.costs,
        )

    def _later(self, at_s: float, life: Iterator[float]) -> None:
        heapq.heappush(self.events, (at_s, next(self.numbers), life))

    def _life(self, arrival: Arrival) -> Iterator[float]:
        """One request; yields the times until which it has to wait."""
        num_tokens = len(arrival.blocks) * BLOCK
        request = RequestView(num_tokens, next(self.numbers), hash(arrival.blocks[:16]), Targets(2.0, 0.1))
        cluster = self._snapshot(arrival.blocks)
        plan = self.policy(request, cluster)
        end = worker_pb2.SequenceEnd()
        with ExitStack() as stack:
            charge = stack.enter_context(self.ledger.charged(plan, num_tokens))
            yield self._prefilled_at(plan, arrival, end)
            self.ttfts_s.append(self.clock.now() - arrival.at_s)
            charge.prefilled()
            yield from self._decode(plan, arrival, charge, end)
        decode = self.by_id[plan.decode.worker_id].record
        self.costs.observe(
            self.by_id[end.prefill_worker].record if end.prefill_worker else decode, decode, end
        )

    def _prefilled_at(self, plan: Plan, arrival: Arrival, end: worker_pb2.SequenceEnd) -> float:
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
        return worker.free_at_s

    def _decode(
        self, plan: Plan, arrival: Arrival, charge: Charge, end: worker_pb2.SequenceEnd
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
        yield self.clock.now() + end.transfer_s + end.decode_s
        charge.generated(arrival.num_output)
        worker.keep(arrival.blocks)
        worker.batch -= 1
        worker.context -= num_tokens

    def _snapshot(self, blocks: tuple[int, ...]) -> ClusterView:
        prefill = tuple(self._view(worker, blocks) for worker in self.prefill)
        decode = tuple(self._view(worker, blocks) for worker in self.decode)
        holders = tuple(view for view in (*prefill, *decode) if view.cached_tokens)
        return ClusterView(Pool.of(prefill), Pool.of(decode), holders, TOKEN_BYTES, self.costs.transfer)

    def _view(self, worker: Worker, blocks: tuple[int, ...]) -> WorkerView:
        record = worker.record
        account = self.ledger.of(record.incarnation)
        return WorkerView(
            worker_id=record.worker_id,
            incarnation=record.incarnation,
            address=record.address,
            cached_tokens=worker.cached_blocks(blocks) * BLOCK,
            block_size_tokens=BLOCK,
            capacity_tokens=worker.num_blocks * BLOCK,
            queue_s=account.queue_s(self.clock.now()),
            pending_prefill_tokens=account.pending_prefill_tokens,
            num_requests=account.num_requests,
            active_sequences=account.active_sequences,
            active_tokens=account.active_tokens,
            costs=self.costs.of(record),
        )

    def _noise(self) -> float:
        return self.random.lognormvariate(0, self.noise)


def _record(name: str, role: Role, rate: float = 7000.0) -> WorkerRecord:
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
        num_blocks=1000,
        max_model_tokens=1 << 20,
        vocab_size=1000,
        transport="local",
        draining=False,
        load=WorkerLoad(0, 0, 0, 0, 0, prefill_tokens_per_s=rate),
        kind="simulated",
    )
