"""Requests through the fleet: each is placed (snapshot, policy, session with the chosen decode worker), run, and placed
again when its worker is lost. `request_run.py` has the life of one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace

import structlog

from headrace.block_hash import HashRoot, block_hashes
from headrace.clock import Deadline
from headrace.config import RouterSettings
from headrace.directory.prefix_index import Match
from headrace.directory.records import Role, WorkerRecord
from headrace.directory.view import DirectoryView
from headrace.errors import DeadlineExceeded, Overloaded, Unavailable, WorkerGone
from headrace.rpc.convert import sampling_to_proto
from headrace.rpc.v1 import worker_pb2
from headrace.sampling_params import SamplingParams
from router.breakers import Breakers
from router.ledger import Ledger
from router.policy.views import (
    MAX_ALTERNATES,
    ClusterView,
    Plan,
    Policy,
    RequestView,
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


class Dispatcher:
    """Used on the event loop only."""

    def __init__(
        self,
        view: DirectoryView,
        sessions: Sessions,
        breakers: Breakers,
        policy: Policy,
        model: ServedModel,
        settings: RouterSettings,
    ) -> None:
        self.ledger = Ledger()
        self.num_inflight = 0
        self._view = view
        self._sessions = sessions
        self._breakers = breakers
        self._policy = policy
        self._model = model
        self._settings = settings
        self._retries = RetryBudget(settings.max_inflight_requests)
        self._num_requests = 0

    async def generate(self, request: GenerationRequest, progress: Progress) -> AsyncIterator[Update]:
        """Updates until all choices have ended. Raises HeadraceError. Closing the iterator cancels the request."""
        limit = self._settings.max_inflight_requests
        if self.num_inflight >= limit:
            raise Overloaded(f"{self.num_inflight} requests are in flight, the limit is {limit}")
        self.num_inflight += 1
        run = RequestRun(request, self._model.tokenizer, self, progress)
        try:
            while run.phase is not Phase.ENDED:
                for update in await run.advance():
                    yield update
        finally:
            run.close()
            self.num_inflight -= 1

    async def place(self, run: RequestRun) -> Dispatch:
        """A worker that can not be reached is marked gone, and another is tried."""
        give_up = Deadline.after(run.deadline.share_s(self._settings.placement_timeout_s), run.deadline.clock)
        while True:
            plan, cluster = await self._planned(run, give_up)
            worker = plan.decode
            try:
                session = await self._sessions.get(worker.worker_id, worker.incarnation, worker.address)
                return self._started(run, plan, cluster, session)
            except WorkerGone as error:
                log.warning("decode worker unreachable", request_id=run.request.label, error=str(error))
            if not run.deadline.remaining_s():
                raise DeadlineExceeded(
                    "the request's deadline passed before a decode worker could be reached"
                )

    def may_retry(self) -> bool:
        return self._retries.take()

    def report(self, plan: Plan, end: worker_pb2.SequenceEnd) -> None:
        """Prefill workers are asked in the plan's order: those before the one that did it have failed."""
        self._breakers.succeeded(plan.decode.incarnation)
        for worker in plan.prefill[: end.failed_attempts]:
            self._breakers.failed(worker.incarnation)
        for worker in plan.prefill[end.failed_attempts :]:
            if worker.worker_id == end.prefill_worker:
                self._breakers.succeeded(worker.incarnation)

    async def _planned(self, run: RequestRun, give_up: Deadline) -> tuple[Plan, ClusterView]:
        """As soon as there is a decode worker. Raises Unavailable when none came in time."""
        while True:
            try:
                cluster = self._snapshot(run)
                break
            except Unavailable:
                if not give_up.remaining_s():
                    raise
            await asyncio.sleep(_POLL_S)
        self._num_requests += 1
        plan = self._policy(RequestView(len(run.token_ids), self._num_requests), cluster)
        return _going_on(run, plan, cluster), cluster

    def _started(self, run: RequestRun, plan: Plan, cluster: ClusterView, session: WorkerSession) -> Dispatch:
        log.debug("planned", request_id=run.request.label, plan=plan.explanation)
        stream = session.start(_start_message(run, plan, sources(plan, cluster)))
        resources = ExitStack()
        charge = resources.enter_context(self.ledger.charged(plan, len(run.token_ids)))
        return Dispatch(plan, session, stream, charge, resources)

    def _snapshot(self, run: RequestRun) -> ClusterView:
        """The workers that can serve this model with one another, and what each has of this prompt.

        A decode worker that has failed this request is a candidate only while there is no other. Raises Unavailable
        when there is none at all.
        """
        records = [
            record
            for record in self._view.workers.values()
            if record.model_fingerprint == self._model.files.fingerprint
        ]
        layouts = Counter(_layout(record) for record in records if not record.draining)
        if not layouts:
            raise Unavailable(f"no worker that serves {self._model.name!r} is alive", _RETRY_AFTER_S)
        layout = layouts.most_common(1)[0][0]
        block_size, kv_dtype, _ = layout
        root = HashRoot(
            self._model.files.fingerprint,
            self._model.files.tokenizer_fingerprint,
            block_size,
            kv_dtype,
            salt=run.request.cache_salt,
        )
        matched = self._view.index.match(block_hashes(root, run.token_ids))
        peers = [
            (record, self._worker_view(record, matched.get(record.worker_id)))
            for record in records
            if _layout(record) == layout
        ]
        serving = [
            (record.role, view)
            for record, view in peers
            if not record.draining and self._breakers.allows(record.incarnation)
        ]
        decode = tuple(view for role, view in serving if role in (Role.DECODE, Role.BOTH))
        if not decode:
            raise Unavailable(
                f"no decode worker that serves {self._model.name!r} is alive and well", _RETRY_AFTER_S
            )
        return ClusterView(
            prefill=tuple(view for role, view in serving if role == Role.PREFILL),
            decode=tuple(view for view in decode if view.incarnation not in run.failed_at) or decode,
            holders=tuple(view for _, view in peers if view.cached_tokens),
        )

    def _worker_view(self, record: WorkerRecord, match: Match | None) -> WorkerView:
        return WorkerView(
            worker_id=record.worker_id,
            incarnation=record.incarnation,
            address=record.address,
            cached_tokens=match.num_blocks * record.block_size_tokens if match else 0,
            block_size_tokens=record.block_size_tokens,
            pending_prefill_tokens=self.ledger.pending_prefill_tokens[record.incarnation],
            active_tokens=self.ledger.active_tokens[record.incarnation],
            capacity_tokens=record.num_blocks * record.block_size_tokens,
        )


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


def _layout(record: WorkerRecord) -> tuple[int, str, str]:
    """What has to be equal for two workers to exchange blocks, as far as records tell."""
    return record.block_size_tokens, record.kv_dtype, record.transport


def _start_message(run: RequestRun, plan: Plan, holders: list[WorkerView]) -> worker_pb2.StartRequest:
    request = run.request
    return worker_pb2.StartRequest(
        # New for each dispatch: a worker that was given up can still be busy with the one before.
        request_id=f"{request.id}.{run.progress.num_dispatches}",
        token_ids=request.token_ids,
        sampling=sampling_to_proto(_fitting(request, plan.decode.capacity_tokens)),
        timeout_s=run.deadline.remaining_s(),
        cache_salt=request.cache_salt,
        prefill_workers=[_ref(worker) for worker in plan.prefill],
        sources=[
            worker_pb2.Source(
                worker=_ref(worker), num_blocks=worker.cached_tokens // worker.block_size_tokens
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
