"""The events of a run, in order of their times.

    arrival ──▶ a router: view, ledger, costs ──▶ policy ──▶ plan
    plan ──▶ P: queue, fetch, compute ──▶ first token ──▶ hand-off ──▶ D: batch ──▶ over ──▶ report to the router's fits
    blocks that came or went ──▶ at most one event an interval ──▶ late, or lost ──▶ every router's view

A policy is given what its router knows, never what is true. Equal seeds give equal results.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random

from headrace.block_hash import DIGEST_BYTES
from headrace.clock import VirtualClock
from headrace.directory.base import BlockSnapshot
from headrace.directory.records import DirectoryEvent, Role, RouterShare, WorkerLoad, WorkerRecord
from headrace.rpc.v1 import worker_pb2
from headrace.simulate.cache import BlockCache
from headrace.simulate.routers import MODEL, SimulatedRouter
from headrace.simulate.schemes import Scheme
from headrace.simulate.service_times import ServiceTimes, service_times
from headrace.simulate.settings import HISTORY_TTL_S, FleetSettings, Sight
from headrace.simulate.workers import Life, Worker, noise_of, num_chunks
from headrace.tier import Tier
from headrace.traces.trace import Trace, TraceRequest, num_matched_tokens
from router.costs import TransferCost, WorkerCosts
from router.ledger import Charge
from router.policy.views import MAX_SOURCES, ClusterView, Pool, RequestView, Targets, WorkerView, sources

_KEY_BLOCKS = 2  # of a prompt's beginning, for policies that hash it: in some traces all share the first
_DEFAULT_TOKENS = 512  # a block, where the trace has none
TARGETS = Targets(2.0, 0.1)

_Action = Callable[[], None]


class Simulation:
    """Of one policy, once: `run`."""

    def __init__(self, trace: Trace, scheme: Scheme, settings: FleetSettings, seed: int) -> None:
        machine, times = service_times(settings.machine)
        self.trace = trace
        self.settings = settings
        self.lives: list[Life] = []  # those that are over
        self.clock = VirtualClock()
        self.block_tokens = trace.block_tokens or _DEFAULT_TOKENS
        self.token_bytes = machine.token_bytes
        self._scheme = scheme
        self._all_blocks = BlockCache(None) if scheme.one_cache else None
        self.link = TransferCost(settings.link_latency_s, 1 / settings.link_bytes_per_s)
        self.workers = [self._worker(number, role, times) for number, role in enumerate(_roles(settings))]
        self._routing, self._losses = Random(f"routing {seed}"), Random(f"losses {seed}")
        self._noise = noise_of(Random(f"noise {seed}"), settings.noise)
        self._events: list[tuple[float, int, _Action]] = []
        self._numbers = itertools.count()
        self._decisions = itertools.count(seed * 1_000_003)
        self._digests: dict[int, bytes] = {}
        self._by_id = {worker.record.worker_id: worker for worker in self.workers}
        self._turns = _later_turns(trace)
        ttl_s = HISTORY_TTL_S if settings.sight is Sight.HISTORY else 5.0
        self.routers = [
            SimulatedRouter(
                f"router-{number}",
                [worker.record for worker in self.workers],
                self.clock,
                ttl_s,
                locals_=settings.decode_prefills or not settings.num_decode,
            )
            for number in range(settings.num_routers)
        ]

    def run(self, on_progress: Callable[[int], None] | None = None) -> None:
        """`on_progress` is called with the number of requests that are over, now and then."""
        for request in self.trace.requests:
            if not self._follows(request):
                self._at(request.at_s, partial(self._arrive, request))
        clock, events = self.clock, self._events
        while events:
            at_s, _, action = heapq.heappop(events)
            clock.advance(at_s - clock.now())
            action()
            if on_progress is not None and not len(self.lives) % 64:
                on_progress(len(self.lives))
        assert len(self.lives) == len(self.trace.requests), "every request ends once"
        assert not any(router.ledger.accounts for router in self.routers), "ledgers are empty at the end"

    # --- arrival and decision

    def _follows(self, request: TraceRequest) -> bool:
        return request.think_s is not None

    def _arrive(self, request: TraceRequest) -> None:
        number = self._routing.randrange(len(self.routers)) if len(self.routers) > 1 else 0
        router = self.routers[number]
        blocks = request.blocks[: request.num_input // self.block_tokens]
        hashes = self._hashes(blocks)
        cluster = self._truth(blocks) if self._scheme.knows_all else router.cluster(hashes)
        plan = self._scheme.policy(self._view_of(request), cluster)
        router.assume(plan, hashes)
        charge = Charge(router.ledger, plan, request.num_input)
        life = Life(request, self.clock.now(), blocks, number, plan, charge)
        if self._scheme.fetches and plan.prediction.fetched_tokens:
            life.sources = tuple(self._by_id[view.worker_id].number for view in sources(plan, cluster))
        self._submit(life)

    def _view_of(self, request: TraceRequest) -> RequestView:
        """A session's requests have one seed and one key, as in the router."""
        key = _number_of(repr(request.blocks[:_KEY_BLOCKS]))
        seed = next(self._decisions)
        if request.session:
            key = seed = _number_of(request.session)
        return RequestView(request.num_input, seed, key, TARGETS)

    def _truth(self, blocks: Sequence[int]) -> ClusterView:
        """What no router can know."""
        views = {
            role: [self._true_view(worker, blocks) for worker in self.workers if worker.record.role == role]
            for role in Role
        }
        prefill, decode = views[Role.PREFILL], views[Role.DECODE] or views[Role.BOTH]
        most = sorted((*prefill, *decode), key=lambda view: view.cached_tokens, reverse=True)[
            : 1 + MAX_SOURCES
        ]
        return ClusterView(
            Pool.of(prefill),
            Pool.of(decode),
            tuple(view for view in most if view.cached_tokens),
            self.token_bytes if self._scheme.fetches else 0.0,
            lambda owner, reader: self.link,
        )

    def _true_view(self, worker: Worker, blocks: Sequence[int]) -> WorkerView:
        record, batch = worker.record, worker.batch
        computes = record.role != Role.DECODE
        return WorkerView(
            record.worker_id,
            record.incarnation,
            record.address,
            cached_tokens=worker.cache.match(blocks) * self.block_tokens,
            block_size_tokens=self.block_tokens,
            capacity_tokens=worker.capacity_tokens,
            queue_s=worker.queue_s(self.clock.now()) if computes else math.inf,
            active_sequences=len(batch),
            active_tokens=batch.context_tokens,
            costs=WorkerCosts(worker.times.prefill, worker.times.decode),
        )

    # --- prefill

    def _submit(self, life: Life) -> None:
        plan = life.plan
        worker = self._by_id[(plan.prefill[0] if plan.prefill else plan.decode).worker_id]
        worker.queue.append(life)
        life.expected_s = self._expected_s(worker, life)
        worker.backlog_s += life.expected_s
        if worker.computing is None:
            self._compute_next(worker)
        self._tell_load(worker)

    def _compute_next(self, worker: Worker) -> None:
        life = worker.computing = worker.queue.popleft() if worker.queue else None
        if life is None:
            return
        now_s = self.clock.now()
        worker.backlog_s = worker.backlog_s - life.expected_s if worker.queue else 0.0
        life.started_s = now_s
        tokens = life.request.num_input
        matched = worker.cache.match(life.blocks)
        wait_s = self._from_host(worker, life, matched)
        life.num_cached = min(num_matched_tokens(life.request, matched, self.block_tokens), tokens - 1)
        wait_s += self._fetch(worker, life, matched)
        worker.cache.keep(life.blocks[:matched])
        context = tokens - life.num_computed
        life.prefill_s = worker.times.prefill_s(life.num_computed, context) * self._noise()
        batch = worker.batch
        if len(batch):
            step_s = worker.times.decode_s(len(batch), batch.context_tokens)
            life.prefill_s += num_chunks(life.num_computed) * step_s
        worker.free_at_s = now_s + wait_s + life.prefill_s
        worker.busy_s += life.prefill_s
        worker.num_computed += life.num_computed
        self._hand_over(worker, life, now_s + wait_s)
        self._at(worker.free_at_s, partial(self._prefilled, worker, life))
        self._retime(worker)

    def _expected_s(self, worker: Worker, life: Life) -> float:
        """Of computing it with what is cached now."""
        known = worker.cache.match(life.blocks) * self.block_tokens
        missing = max(1, life.request.num_input - known)
        return worker.times.prefill_s(missing, life.request.num_input - missing)

    def _from_host(self, worker: Worker, life: Life, matched: int) -> float:
        """Seconds of copying up what is below the device."""
        num_blocks = worker.cache.num_on_host(life.blocks[:matched])
        life.num_host = num_blocks * self.block_tokens
        return num_blocks * self.block_tokens * self.token_bytes / self.settings.host_bytes_per_s

    def _fetch(self, worker: Worker, life: Life, matched: int) -> float:
        """Seconds until blocks of a neighbour are here, if one still has more of them."""
        held = [(self.workers[number].cache.match(life.blocks), number) for number in life.sources]
        most, number = max(held, default=(0, 0))
        if most <= matched:
            return 0.0
        reach = min(most * self.block_tokens, life.request.num_input - 1)
        life.num_fetched = reach - life.num_cached
        seconds, until_s = self._transfer(self.workers[number], worker, life.num_fetched * self.token_bytes)
        del seconds
        return until_s - self.clock.now()

    def _transfer(self, owner: Worker, reader: Worker, num_bytes: int) -> tuple[float, float]:
        """How long it takes by itself, and when it is over: links serve one at a time."""
        seconds = self.link.seconds(num_bytes) * self._noise()
        start_s = max(self.clock.now(), owner.out_free_s, reader.in_free_s)
        owner.out_free_s = reader.in_free_s = start_s + seconds
        return seconds, start_s + seconds

    def _hand_over(self, worker: Worker, life: Life, starts_s: float) -> None:
        """Blocks are read while later chunks are computed; the last chunk when it is there."""
        decode = self._by_id[life.plan.decode.worker_id]
        life.ready_s = worker.free_at_s
        if decode is worker or not life.num_decoded:
            return
        has = num_matched_tokens(life.request, decode.cache.match(life.blocks), self.block_tokens)
        missing = life.request.num_input - has
        life.num_moved = missing * self.token_bytes
        life.transfer_s, until_s = self._transfer(worker, decode, life.num_moved)
        last_s = life.transfer_s / max(1, num_chunks(missing))
        life.ready_s = max(until_s + starts_s - self.clock.now(), worker.free_at_s + last_s)

    def _prefilled(self, worker: Worker, life: Life) -> None:
        life.first_token_s = self.clock.now()
        life.charge.prefilled()
        worker.cache.keep(life.blocks)
        self._changed(worker)
        if life.num_decoded:
            self._at(life.ready_s, partial(self._join, life))
        else:
            self._over(life)
        self._compute_next(worker)
        if worker.computing is None:
            self._retime(worker)

    # --- decode

    def _join(self, life: Life) -> None:
        worker = self._by_id[life.plan.decode.worker_id]
        worker.cache.keep(life.blocks)
        self._changed(worker)
        if worker.batch.add(life, self.clock.now()):
            self._retime(worker)

    def _retime(self, worker: Worker) -> None:
        chunk_s = 0.0
        if worker.computing is not None and len(worker.batch):
            chunk_s = worker.computing.prefill_s / num_chunks(worker.computing.num_computed)
        leaves_s = worker.batch.retime(self.clock.now(), chunk_s)
        if leaves_s is not None:
            self._at(leaves_s, partial(self._leave, worker, worker.batch.version))

    def _leave(self, worker: Worker, version: int) -> None:
        if version != worker.batch.version:
            return
        life, _ = worker.batch.take_out(self.clock.now())
        self._retime(worker)
        self._over(life)

    def _over(self, life: Life) -> None:
        life.over_s = self.clock.now()
        self.lives.append(life)
        life.charge.close()
        router = self.routers[life.router]
        decode = self._by_id[life.plan.decode.worker_id].record
        prefill = self._by_id[life.plan.prefill[0].worker_id].record if life.plan.prefill else decode
        router.costs.observe(prefill, decode, self._report(life))
        turns = self._turns.get(life.request.session)
        if turns:
            following = turns.pop()
            self._at(self.clock.now() + (following.think_s or 0.0), partial(self._arrive, following))

    def _report(self, life: Life) -> worker_pb2.SequenceEnd:
        worker = self._by_id[life.plan.decode.worker_id]
        num_batch = len(worker.batch) + 1
        return worker_pb2.SequenceEnd(
            prefill_s=life.prefill_s,
            prefill_tokens=life.num_computed,
            context_tokens=life.request.num_input - life.num_computed,
            mean_batch=num_batch,
            mean_batch_context_tokens=worker.batch.context_tokens + life.request.num_input + life.num_decoded,
            decode_tokens=life.num_decoded,
            decode_s=self.clock.now() - life.joined_s if life.num_decoded else 0.0,
            bytes_moved=life.num_moved,
            transfer_s=life.transfer_s,
        )

    # --- what workers publish

    def _changed(self, worker: Worker) -> None:
        """Something to publish: with the worker's next event."""
        if worker.is_publishing or self.settings.sight is Sight.HISTORY or self._scheme.knows_all:
            return
        worker.is_publishing = True
        interval_s = self.settings.event_interval_s
        phase_s = interval_s * worker.number / len(self.workers)  # not all at the same time
        turns = (self.clock.now() - phase_s) // interval_s + 1
        self._at(phase_s + turns * interval_s, partial(self._publish, worker))

    def _publish(self, worker: Worker) -> None:
        worker.is_publishing = False
        cache = worker.cache
        worker.sequence += 1
        event = DirectoryEvent(
            worker.record.worker_id,
            worker.record.incarnation,
            worker.sequence,
            dict.fromkeys(self._hashes(cache.came), Tier.DEVICE),
            tuple(self._hashes(cache.went)),
            shares=self._shares(worker) if len(self.routers) > 1 else None,
        )
        cache.came.clear()
        cache.went.clear()
        for router in self.routers:
            if not self.settings.event_loss or self._losses.random() >= self.settings.event_loss:
                hear = partial(
                    router.hear, event, partial(self._snapshot, worker), self.settings.event_delay_s
                )
                self._at(self.clock.now() + self.settings.event_delay_s, hear)

    def _tell_load(self, worker: Worker) -> None:
        """Other routers are told of a prompt at once."""
        if len(self.routers) > 1 and self.settings.sight is Sight.EVENTS:
            self._publish(worker)
            worker.is_publishing = False

    def _shares(self, worker: Worker) -> tuple[RouterShare, ...]:
        now_s = self.clock.now()
        sums: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
        for life, pending in worker.pending(now_s):
            for place, more in enumerate((1, life.request.num_input, pending)):
                sums[life.router][place] += more
        for life in worker.batch.lives():
            for place, more in enumerate((1, life.request.num_input, 0)):
                sums[life.router][place] += more
        return tuple(
            RouterShare(self.routers[number].name, *counts) for number, counts in sorted(sums.items())
        )

    def _snapshot(self, worker: Worker) -> BlockSnapshot:
        return BlockSnapshot(worker.sequence, dict.fromkeys(self._hashes(worker.cache.before()), Tier.DEVICE))

    # --- the rest

    def _at(self, at_s: float, action: _Action) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), action))

    def _hashes(self, blocks: Iterable[int]) -> list[bytes]:
        known = self._digests
        result: list[bytes] = []
        for block in blocks:
            digest = known.get(block)
            if digest is None:
                data = block.to_bytes(8, "little")
                digest = known[block] = hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
            result.append(digest)
        return result

    def _worker(self, number: int, role: Role, times: ServiceTimes) -> Worker:
        settings = self.settings
        name = f"{role}-{number}"
        load = WorkerLoad(0, 0, 0, 0, 0, prefill_tokens_per_s=times.tokens_per_s)
        record = WorkerRecord(
            worker_id=name,
            role=role,
            address=name,
            incarnation=name,
            model_name=MODEL,
            model_fingerprint=MODEL,
            tokenizer_fingerprint=MODEL,
            kv_dtype="bfloat16",
            block_size_tokens=self.block_tokens,
            num_blocks=settings.blocks_per_worker,
            max_model_tokens=1 << 30,
            vocab_size=1,
            transport=MODEL,
            draining=False,
            load=load,
            # Unknown where blocks are not fetched: then no plan counts on it.
            block_bytes=self.token_bytes * self.block_tokens if self._scheme.fetches else 0,
            kind=settings.machine,
        )
        cache = self._all_blocks
        if cache is None:
            cache = BlockCache(settings.blocks_per_worker, settings.host_blocks_per_worker)
        return Worker(number, record, cache, times, settings.blocks_per_worker * self.block_tokens)


def _roles(settings: FleetSettings) -> list[Role]:
    if not settings.num_decode:
        return [Role.BOTH] * settings.num_prefill
    return [Role.PREFILL] * settings.num_prefill + [Role.DECODE] * settings.num_decode


def _later_turns(trace: Trace) -> dict[str, list[TraceRequest]]:
    """By session: the turns that follow an answer, the last one first."""
    return {
        session: [request for request in reversed(requests) if request.think_s is not None]
        for session, requests in trace.by_session().items()
    }


def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
