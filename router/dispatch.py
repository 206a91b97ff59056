"""Requests through the fleet: each is placed (snapshot, policy, session with the chosen decode worker), run, and placed
again when its worker is lost. `request_run.py` has the life of one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from zlib import crc32

import structlog
import xxhash

from headrace.block_hash import HashRoot, block_hashes
from headrace.clock import Deadline
from headrace.config import RouterSettings
from headrace.directory.view import DirectoryView
from headrace.errors import DeadlineExceeded, Unavailable, WorkerGone
from headrace.rpc.convert import sampling_to_proto
from headrace.rpc.v1 import inference_pb2, worker_pb2
from headrace.sampling_params import SamplingParams
from router.admission import Admission, check_fits
from router.breakers import Breakers
from router.costs import FleetCosts
from router.explain import explained
from router.fleet import Fleet
from router.ledger import Charge, Ledger
from router.metrics import RouterMetrics
from router.policy.views import (
    MAX_ALTERNATES,
    ClusterView,
    Plan,
    Policy,
    RequestView,
    Targets,
    WorkerView,
    sources,
)
from router.request_run import Dispatch, Phase, Progress, RequestRun, Update
from router.requests import GenerationRequest, ServedModel
from router.retry_budget import RetryBudget
from router.sessions import Sessions, WorkerSession

log = structlog.get_logger()

_POLL_S = 0.05
_RETRY_AFTER_S = 1.0
_PREFIX_KEY_TOKENS = 256


class Dispatcher:
    """Used on the event loop only."""

    def __init__(  # noqa: PLR0913 - the parts of a router
        self,
        view: DirectoryView,
        sessions: Sessions,
        breakers: Breakers,
        policy: Policy,
        model: ServedModel,
        settings: RouterSettings,
        metrics: RouterMetrics | None = None,
    ) -> None:
        self.ledger = Ledger()
        self.costs = FleetCosts()
        self.admission = Admission(
            settings, self._cost_ms, self.ledger.clock, least_prefill_ms=self._least_prefill_ms
        )
        self._metrics = metrics or RouterMetrics()
        self._view = view
        self._sessions = sessions
        self._breakers = breakers
        self._policy = policy
        self._model = model
        self._settings = settings
        self._retries = RetryBudget(settings.max_inflight_requests)
        # Routers that start together must not break ties alike.
        self._num_requests = crc32(view.router_id.encode())
        self._fleet: Fleet | None = None

    async def generate(self, request: GenerationRequest, progress: Progress) -> AsyncGenerator[Update]:
        """Updates until all choices have ended. Raises HeadraceError. Closing the iterator cancels the request."""
        check_fits(request, self._current_fleet().records)
        async with self.admission.admitted(request) as admitted:
            progress.admitted_at = time.monotonic()
            progress.span.phase("admission", progress.arrived_at, progress.admitted_at)
            run = RequestRun(admitted, self._model.tokenizer, self, progress)
            try:
                while run.phase is not Phase.ENDED:
                    for update in await run.advance():
                        yield update
            finally:
                run.close()

    def smallest_capacity_tokens(self) -> int:
        """Of the KV pools of all workers that a request can be sent to now; 0: it can be sent to none."""
        return self._current_fleet().smallest_capacity_tokens(self._breakers.set_aside)

    def explain(self, request: GenerationRequest) -> inference_pb2.RoutingPlan:
        """Where it would go now, and why. Nothing is run or charged. Raises Unavailable."""
        plan, cluster, _ = self.decide(request)
        return explained(self._request_view(request, len(request.token_ids)), cluster, plan)

    def decide(
        self,
        request: GenerationRequest,
        hashes: Sequence[bytes] | None = None,
        run: RequestRun | None = None,
    ) -> tuple[Plan, ClusterView, Sequence[bytes]]:
        """Snapshot and policy, nothing else; and the hashes of the blocks, made here if not given. `run`: a request
        that is under way may have tokens, and workers that failed it. Raises Unavailable.
        """
        token_ids = request.token_ids if run is None else run.token_ids
        cluster, hashes = self._snapshot(request, token_ids, hashes, set() if run is None else run.failed_at)
        self._num_requests += 1
        return self._policy(self._request_view(request, len(token_ids)), cluster), cluster, hashes

    async def place(self, run: RequestRun) -> Dispatch:
        """A worker that can not be reached is marked gone, and another is tried."""
        give_up = Deadline.after(run.deadline.share_s(self._settings.placement_timeout_s), run.deadline.clock)
        while True:
            plan, cluster, hashes = await self._planned(run, give_up)
            worker = plan.decode
            with ExitStack() as resources:
                charge = self._charged(run, plan, hashes, resources)
                try:
                    session = await self._sessions.get(worker.worker_id, worker.incarnation, worker.address)
                    return self._started(run, plan, sources(plan, cluster), session, charge, resources)
                except WorkerGone as error:
                    log.warning(
                        "decode worker unreachable",
                        request_id=run.request.label,
                        id=run.request.id,
                        error=str(error),
                    )
            if not run.deadline.remaining_s():
                raise DeadlineExceeded(
                    "the request's deadline passed before a decode worker could be reached"
                )

    def may_retry(self) -> bool:
        return self._retries.take()

    def report(self, plan: Plan, end: worker_pb2.SequenceEnd) -> None:
        """Prefill workers are asked in the plan's order: those before the one that did it have failed."""
        self._learn(plan, end)
        self._breakers.succeeded(plan.decode.incarnation)
        for worker in plan.prefill[: end.failed_attempts]:
            self._breakers.failed(worker.incarnation)
        for worker in plan.prefill[end.failed_attempts :]:
            if worker.worker_id == end.prefill_worker:
                self._breakers.succeeded(worker.incarnation)

    async def _planned(self, run: RequestRun, give_up: Deadline) -> tuple[Plan, ClusterView, Sequence[bytes]]:
        """As soon as there is a decode worker. Raises Unavailable when none came in time."""
        while True:
            started = time.monotonic()
            try:
                plan, cluster, hashes = self.decide(run.request, run=run)
                break
            except Unavailable:
                if not give_up.remaining_s():
                    raise
            await asyncio.sleep(_POLL_S)
        plan = _going_on(run, plan, cluster)
        decided = time.monotonic()
        self._metrics.decision_seconds.observe(decided - started)
        run.progress.span.phase("decision", started, decided, reason=plan.reason)
        self._assume(plan, hashes)  # at once: other requests are planned while this one is sent
        if run.request.explain:
            view = self._request_view(run.request, len(run.token_ids))
            run.progress.explanation = explained(view, cluster, plan)
        return plan, cluster, hashes

    def _charged(self, run: RequestRun, plan: Plan, hashes: Sequence[bytes], resources: ExitStack) -> Charge:
        """From now on, not from when a connection is there: what is planned meanwhile has to see it."""
        resources.callback(
            lambda: None if run.progress.first_token_at else self._forget_assumed(plan, hashes)
        )
        return resources.enter_context(self.ledger.charged(plan, len(run.token_ids)))

    def _started(
        self,
        run: RequestRun,
        plan: Plan,
        holders: list[WorkerView],
        session: WorkerSession,
        charge: Charge,
        resources: ExitStack,
    ) -> Dispatch:
        log.debug("planned", request_id=run.request.label, decode=plan.decode.worker_id, reason=plan.reason)
        span = run.progress.span.child("dispatch", decode_worker=plan.decode.worker_id)
        start = _start_message(run, plan, holders, self._view.router_id)
        start.traceparent = span.traceparent
        stream = session.start(start)
        return Dispatch(plan, session, stream, charge, resources.pop_all(), span)

    def _request_view(self, request: GenerationRequest, num_tokens: int) -> RequestView:
        settings, ttft_s, itl_s = self._settings, request.ttft_target_s, request.itl_target_s
        # Equal in all routers: the requests of a session break ties, and are hashed to workers, alike.
        session = xxhash.xxh3_64_intdigest(request.session_id.encode()) if request.session_id else None
        return RequestView(
            num_prompt_tokens=num_tokens,
            seed=self._num_requests if session is None else session,
            prefix_key=hash(tuple(request.token_ids[:_PREFIX_KEY_TOKENS])) if session is None else session,
            targets=Targets(
                settings.ttft_target_s if ttft_s is None else ttft_s,
                settings.itl_target_s if itl_s is None else itl_s,
            ),
        )

    def _assume(self, plan: Plan, hashes: Sequence[bytes]) -> None:
        for worker in (*plan.prefill[:1], plan.decode):
            self._view.assume(worker.worker_id, worker.incarnation, hashes)

    def _forget_assumed(self, plan: Plan, hashes: Sequence[bytes]) -> None:
        for worker in (*plan.prefill[:1], plan.decode):
            self._view.forget_assumed(worker.worker_id, worker.incarnation, hashes)

    def _learn(self, plan: Plan, end: worker_pb2.SequenceEnd) -> None:
        """What the request's report tells of caches and speed. An empty one: the worker did not report in time."""
        if not end.ByteSize():
            return
        predicted = plan.predicted_cached_tokens + plan.prediction.fetched_tokens  # what was fetched is found
        self._metrics.predicted(predicted, end.cached_tokens)
        workers, decode = self._view.workers, plan.decode.worker_id
        self.costs.observe(workers.get(end.prefill_worker or decode), workers.get(decode), end)

    def _hashes(
        self, request: GenerationRequest, token_ids: Sequence[int], block_size: int, kv_dtype: str
    ) -> list[bytes]:
        """Of the full blocks."""
        files = self._model.files
        root = HashRoot(
            files.fingerprint, files.tokenizer_fingerprint, block_size, kv_dtype, salt=request.cache_salt
        )
        return block_hashes(root, token_ids)

    def _snapshot(
        self,
        request: GenerationRequest,
        token_ids: Sequence[int],
        hashes: Sequence[bytes] | None,
        failed_at: Set[str],
    ) -> tuple[ClusterView, Sequence[bytes]]:
        """Workers that can serve this model with one another, what each has of this prompt, and its block hashes.

        A decode worker that has failed this request is a candidate only while there is no other. Raises Unavailable
        when there is none at all.
        """
        fleet = self._current_fleet()
        if not fleet.peers:
            raise Unavailable(f"no worker that serves {self._model.name!r} is alive", _RETRY_AFTER_S)
        block_size, kv_dtype = fleet.peers[0].block_size_tokens, fleet.peers[0].kv_dtype
        if hashes is None:
            hashes = self._hashes(request, token_ids, block_size, kv_dtype)
        # A worker computes one token at least, so a last block that ends the prompt does not count.
        num_usable = (len(token_ids) - 1) // block_size
        if request.sampling.prompt_logprobs is not None:  # for these the whole prompt is computed
            num_usable = 0
        matches = self._view.match(hashes[:num_usable])
        cluster = fleet.cluster(matches, self.costs, self._breakers.set_aside, failed_at)
        if cluster is None:
            raise Unavailable(
                f"no decode worker that serves {self._model.name!r} is alive and well", _RETRY_AFTER_S
            )
        return cluster, hashes

    def _cost_ms(self, request: GenerationRequest) -> float:
        sampling = request.sampling
        return 1e3 * self.costs.request_s(len(request.token_ids), sampling.max_tokens, sampling.n)

    def _least_prefill_ms(self, request: GenerationRequest) -> float:
        return 1e3 * self.costs.least_prefill_s(len(request.token_ids))

    def _current_fleet(self) -> Fleet:
        if self._fleet is None or self._fleet.version != self._view.version:
            self._fleet = Fleet(self._view, self._model.files.fingerprint, self.ledger)
        return self._fleet


def _going_on(run: RequestRun, plan: Plan, cluster: ClusterView) -> Plan:
    """For a request that has tokens: the worker that computed its prompt has that in its cache, whatever the index says
    yet. Several choices with tokens share no hand-off: the decode worker computes, and fetches the prompt.
    """
    before = run.progress.plan
    if not run.has_tokens or before is None:
        return plan
    if len(run.choices) > 1:
        return replace(plan, prefill=())
    did_it = [
        worker
        for worker in cluster.prefill
        if worker.incarnation in {p.incarnation for p in before.prefill[:1]}
    ]
    others = [worker for worker in plan.prefill if worker not in did_it]
    return replace(plan, prefill=(*did_it, *others)[: 1 + MAX_ALTERNATES])


def _fitting(request: GenerationRequest, capacity_tokens: int) -> SamplingParams:
    """An answer without a limit of the caller's own ends where the worker's KV pool does."""
    room = max(1, capacity_tokens - len(request.token_ids))
    if not request.open_ended or request.sampling.max_tokens <= room:
        return request.sampling
    return replace(request.sampling, max_tokens=room)


def _start_message(
    run: RequestRun, plan: Plan, holders: list[WorkerView], router_id: str
) -> worker_pb2.StartRequest:
    request = run.request
    return worker_pb2.StartRequest(
        # New for each dispatch: a worker that was given up can still be busy with the one before.
        request_id=f"{request.id}.{run.progress.num_dispatches}",
        token_ids=request.token_ids,
        sampling=sampling_to_proto(_fitting(request, plan.decode.capacity_tokens)),
        timeout_s=run.deadline.remaining_s(),
        cache_salt=request.cache_salt,
        priority=request.priority,
        router_id=router_id,
        label=request.label,
        prefill_workers=[_ref(worker) for worker in plan.prefill],
        sources=[
            worker_pb2.Source(
                worker=_ref(worker), num_blocks=worker.reported_tokens // worker.block_size_tokens
            )
            for worker in holders
        ],
        delivered=[
            worker_pb2.DeliveredChoice(choice=number, token_ids=choice.token_ids, finished=choice.is_over)
            for number, choice in enumerate(run.choices)
            if choice.token_ids
        ],
    )


def _ref(worker: WorkerView) -> worker_pb2.PeerRef:
    return worker_pb2.PeerRef(
        worker_id=worker.worker_id, address=worker.address, incarnation=worker.incarnation
    )
