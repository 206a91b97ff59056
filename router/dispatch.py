"""One request through the fleet: admission, snapshot, policy, session with the chosen decode worker, text out.

The way of the text, for each choice: token ids ─▶ bytes ─▶ whole characters ─▶ stop strings ─▶ update.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import structlog

from headrace.block_hash import HashRoot, block_hashes
from headrace.directory.prefix_index import Match
from headrace.directory.records import Role, WorkerRecord
from headrace.directory.view import DirectoryView
from headrace.errors import HeadraceError, InternalError, Unavailable, WorkerGone
from headrace.rpc.convert import sampling_to_proto
from headrace.rpc.v1 import inference_pb2, worker_pb2
from headrace.sampling_params import FinishReason, SamplingParams
from headrace.tokenizer import IncrementalDetokenizer
from router.admission import Admission, check_fits
from router.costs import FleetCosts
from router.explain import explained
from router.ledger import Charge, Ledger
from router.metrics import RouterMetrics
from router.policy.views import (
    NO_TARGETS,
    ClusterView,
    Plan,
    Policy,
    RequestView,
    Targets,
    WorkerView,
    sources,
)
from router.requests import GenerationRequest, ServedModel
from router.sessions import AnswerStream, ChoiceDelta, Delta, Sessions, WorkerSession

log = structlog.get_logger()

_MAX_DISPATCHES = 3  # decode workers tried before the first token
_ABORT_TIMEOUT_S = 2.0
_PREFIX_KEY_TOKENS = 256


@dataclass(slots=True)
class Update:
    """New text and tokens of one choice. Its last one has `finish_reason`; the last of all choices has `end`."""

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[inference_pb2.TokenLogprobs]  # one for each token, where asked for
    finish_reason: FinishReason | None = None
    end: worker_pb2.SequenceEnd | None = None


@dataclass(slots=True)
class Progress:
    """Times of one request on this process's monotonic clock, and what was produced."""

    arrived_at: float = field(default_factory=time.monotonic)
    planned_at: float = 0.0
    first_token_at: float = 0.0
    ended_at: float = 0.0
    num_output_tokens: int = 0
    plan: Plan | None = None
    explanation: inference_pb2.RoutingPlan | None = None  # where asked for


class Dispatcher:
    """Used on the event loop only."""

    def __init__(  # noqa: PLR0913 - the parts of a router
        self,
        view: DirectoryView,
        sessions: Sessions,
        policy: Policy,
        model: ServedModel,
        admission: Admission,
        targets: Targets = NO_TARGETS,
        metrics: RouterMetrics | None = None,
    ) -> None:
        """`targets` are those of requests whose service class sets none."""
        self.ledger = Ledger()
        self.costs = FleetCosts()
        self.admission = admission
        self._targets = targets
        self._metrics = metrics or RouterMetrics()
        self._view = view
        self._sessions = sessions
        self._policy = policy
        self._model = model
        self._num_requests = 0

    async def generate(self, request: GenerationRequest, progress: Progress) -> AsyncIterator[Update]:
        """Updates until all choices have ended. Raises HeadraceError. Closing the iterator cancels the request."""
        check_fits(request, self._records())
        async with self.admission.admitted(request) as request:
            plan, start, session, hashes = await self._place(request, progress)
            progress.plan, progress.planned_at = plan, time.monotonic()
            with self.ledger.charged(plan, len(request.token_ids)) as charge:
                stream = session.start(start)
                try:
                    async for update in self._updates(request, session, stream, charge, progress):
                        yield update
                finally:
                    if not progress.first_token_at:
                        self._forget_assumed(plan, hashes)
                    if not stream.ended:
                        session.abort(request.id)
                    session.forget(request.id)

    def explain(self, request: GenerationRequest) -> inference_pb2.RoutingPlan:
        """Where it would go now, and why. Nothing is run or charged."""
        plan, cluster, _ = self.decide(request)
        return explained(self._request_view(request), cluster, plan)

    async def _place(
        self, request: GenerationRequest, progress: Progress
    ) -> tuple[Plan, worker_pb2.StartRequest, WorkerSession, Sequence[bytes]]:
        """A plan whose decode worker answers. A worker that can not be reached is marked gone and not asked again.

        The prompt's block hashes come with it; its workers are assumed to have them from now on.
        """
        for _ in range(_MAX_DISPATCHES):
            started = time.perf_counter()
            plan, cluster, hashes = self.decide(request)
            self._metrics.decision_seconds.observe(time.perf_counter() - started)
            if request.explain:
                progress.explanation = explained(self._request_view(request), cluster, plan)
            self._assume(plan, hashes)  # at once: other requests are planned while this one is sent
            worker = plan.decode
            try:
                session = await self._sessions.get(worker.worker_id, worker.incarnation, worker.address)
            except WorkerGone as error:
                log.warning("decode worker unreachable", request_id=request.label, error=str(error))
                self._forget_assumed(plan, hashes)
                continue
            log.debug("planned", request_id=request.label, decode=worker.worker_id, reason=plan.reason)
            return plan, _start_message(request, plan, sources(plan, cluster)), session, hashes
        raise Unavailable(f"{_MAX_DISPATCHES} decode workers in a row could not be reached")

    def decide(
        self, request: GenerationRequest, hashes: Sequence[bytes] | None = None
    ) -> tuple[Plan, ClusterView, Sequence[bytes]]:
        """Snapshot and policy, nothing else; and the hashes of the prompt's blocks, made here if not given.

        Raises Unavailable.
        """
        self._num_requests += 1
        cluster, hashes = self._snapshot(request, hashes)
        return self._policy(self._request_view(request), cluster), cluster, hashes

    def _request_view(self, request: GenerationRequest) -> RequestView:
        ttft_s, itl_s = request.ttft_target_s, request.itl_target_s
        return RequestView(
            num_prompt_tokens=len(request.token_ids),
            seed=self._num_requests,
            prefix_key=hash(tuple(request.token_ids[:_PREFIX_KEY_TOKENS])),
            targets=Targets(
                self._targets.ttft_s if ttft_s is None else ttft_s,
                self._targets.itl_s if itl_s is None else itl_s,
            ),
        )

    def _assume(self, plan: Plan, hashes: Sequence[bytes]) -> None:
        for worker in (*plan.prefill[:1], plan.decode):
            self._view.assume(worker.worker_id, worker.incarnation, hashes)

    def _forget_assumed(self, plan: Plan, hashes: Sequence[bytes]) -> None:
        for worker in (*plan.prefill[:1], plan.decode):
            self._view.forget_assumed(worker.worker_id, worker.incarnation, hashes)

    def _note_prediction(self, plan: Plan | None, end: worker_pb2.SequenceEnd) -> None:
        if plan is not None and end.ByteSize():  # an empty one: the worker did not report in time
            self._metrics.predicted(plan.predicted_cached_tokens, end.cached_tokens)

    def _snapshot(
        self, request: GenerationRequest, hashes: Sequence[bytes] | None
    ) -> tuple[ClusterView, Sequence[bytes]]:
        """Workers that can serve this model with one another, what each has of this prompt, and its block hashes."""
        records = self._records()
        layouts = Counter(_layout(record) for record in records if not record.draining)
        if not layouts:
            raise Unavailable(f"no worker that serves {self._model.name!r} is alive")
        layout = layouts.most_common(1)[0][0]
        block_size, kv_dtype, _ = layout
        if hashes is None:
            hashes = self._hashes(request, block_size, kv_dtype)
        # A worker computes one token at least, so a last block that ends the prompt does not count.
        matched = self._view.match(hashes[: (len(request.token_ids) - 1) // block_size])
        now_s = self.ledger.clock.now()
        peers = [
            (record, self._worker_view(record, matched.get(record.worker_id), now_s))
            for record in records
            if _layout(record) == layout
        ]
        serving = [(record.role, view) for record, view in peers if not record.draining]
        decode = tuple(view for role, view in serving if role in (Role.DECODE, Role.BOTH))
        if not decode:
            raise Unavailable(f"no decode worker that serves {self._model.name!r} is alive")
        cluster = ClusterView(
            prefill=tuple(view for role, view in serving if role == Role.PREFILL),
            decode=decode,
            holders=tuple(view for _, view in peers if view.reported_tokens),
            token_bytes=max(record.block_bytes for record, _ in peers) / block_size,
            transfer=self.costs.transfer,
        )
        return cluster, hashes

    def _records(self) -> list[WorkerRecord]:
        """Workers that serve this model."""
        fingerprint = self._model.files.fingerprint
        return [record for record in self._view.workers.values() if record.model_fingerprint == fingerprint]

    def _hashes(self, request: GenerationRequest, block_size: int, kv_dtype: str) -> list[bytes]:
        """Of the prompt's full blocks."""
        files = self._model.files
        root = HashRoot(
            files.fingerprint, files.tokenizer_fingerprint, block_size, kv_dtype, salt=request.cache_salt
        )
        return block_hashes(root, request.token_ids)

    def _worker_view(self, record: WorkerRecord, match: Match | None, now_s: float) -> WorkerView:
        account = self.ledger.of(record.incarnation)
        return WorkerView(
            worker_id=record.worker_id,
            incarnation=record.incarnation,
            address=record.address,
            cached_tokens=match.num_blocks * record.block_size_tokens if match else 0,
            assumed_tokens=match.num_assumed_blocks * record.block_size_tokens if match else 0,
            block_size_tokens=record.block_size_tokens,
            capacity_tokens=record.num_blocks * record.block_size_tokens,
            queue_s=account.queue_s(now_s),
            pending_prefill_tokens=account.pending_prefill_tokens,
            num_requests=account.num_requests,
            active_sequences=account.active_sequences,
            active_tokens=account.active_tokens,
            costs=self.costs.of(record),
        )

    def _learn(self, plan: Plan | None, end: worker_pb2.SequenceEnd) -> None:
        """What the request's report tells of its workers' speed."""
        if plan is not None:
            workers, decode = self._view.workers, plan.decode.worker_id
            self.costs.observe(workers.get(end.prefill_worker or decode), workers.get(decode), end)

    async def _updates(
        self,
        request: GenerationRequest,
        session: WorkerSession,
        stream: AnswerStream,
        charge: Charge,
        progress: Progress,
    ) -> AsyncIterator[Update]:
        running = {
            choice: IncrementalDetokenizer(self._model.tokenizer, request.sampling.stop_strings)
            for choice in range(request.sampling.n)
        }
        while running:
            delta = await stream.next()
            if delta.choices and not progress.first_token_at:
                progress.first_token_at = time.monotonic()
                charge.prefilled()
            for choice, news in delta.choices.items():
                if choice not in running:
                    continue  # a stop string ended it, and the worker did not know yet
                update = _update(choice, running[choice], news)
                progress.num_output_tokens += len(update.token_ids)
                charge.generated(len(update.token_ids))
                if update.finish_reason is not None:
                    del running[choice]
                    if not running:
                        update.end = delta.end or await _aborted(session, stream)
                        self._note_prediction(progress.plan, update.end)
                        progress.ended_at = time.monotonic()
                        self._learn(progress.plan, update.end)
                    elif news.finish_reason is None:
                        session.abort(request.id, choice)
                yield update
            if delta.end is not None and running:
                raise InternalError(f"the worker ended the request, but not its choices {list(running)}")


def _update(choice: int, text: IncrementalDetokenizer, news: ChoiceDelta) -> Update:
    """What the news bring to the choice's text, and whether they end it."""
    token_ids, piece = _push(text, news.token_ids)
    reason = news.finish_reason
    if text.stopped:
        reason = FinishReason.STOP
    elif reason is not None:
        piece += text.finish()
    return Update(choice, piece, token_ids, news.logprobs[: len(token_ids)], reason)


def _push(text: IncrementalDetokenizer, token_ids: list[int]) -> tuple[list[int], str]:
    """Tokens up to the one that completed a stop string, and the text they released."""
    if not text.can_stop:
        return token_ids, text.push(token_ids)
    pieces: list[str] = []
    for position, token_id in enumerate(token_ids, start=1):
        pieces.append(text.push([token_id]))
        if text.stopped:
            return token_ids[:position], "".join(pieces)
    return token_ids, "".join(pieces)


async def _aborted(session: WorkerSession, stream: AnswerStream) -> worker_pb2.SequenceEnd:
    """The answers are whole before the worker said so: stop it, and take its report with its last delta."""
    session.abort(stream.request_id)
    delta = Delta()
    try:
        async with asyncio.timeout(_ABORT_TIMEOUT_S):
            while delta.end is None:
                delta = await stream.take()
    except (TimeoutError, HeadraceError):
        return worker_pb2.SequenceEnd()  # the answers are whole without it
    return delta.end


def _fitting(request: GenerationRequest, capacity_tokens: int) -> SamplingParams:
    """An answer without a limit of the caller's own ends where the worker's KV pool does."""
    room = max(1, capacity_tokens - len(request.token_ids))
    if not request.open_ended or request.sampling.max_tokens <= room:
        return request.sampling
    return replace(request.sampling, max_tokens=room)


def _layout(record: WorkerRecord) -> tuple[int, str, str]:
    """What has to be equal for two workers to exchange blocks, as far as records tell."""
    return record.block_size_tokens, record.kv_dtype, record.transport


def _start_message(
    request: GenerationRequest, plan: Plan, holders: list[WorkerView]
) -> worker_pb2.StartRequest:
    return worker_pb2.StartRequest(
        request_id=request.id,
        token_ids=request.token_ids,
        sampling=sampling_to_proto(_fitting(request, plan.decode.capacity_tokens)),
        timeout_s=request.timeout_s,
        cache_salt=request.cache_salt,
        priority=request.priority,
        prefill_workers=[_ref(worker) for worker in plan.prefill],
        sources=[
            worker_pb2.Source(
                worker=_ref(worker), num_blocks=worker.reported_tokens // worker.block_size_tokens
            )
            for worker in holders
        ],
    )


def _ref(worker: WorkerView) -> worker_pb2.PeerRef:
    return worker_pb2.PeerRef(
        worker_id=worker.worker_id, address=worker.address, incarnation=worker.incarnation
    )
