"""One attempt to get a prompt's KV from a prefill worker.

    ask ─▶ started ─▶ reserve own blocks ─▶ pull what is announced, while later chunks compute ─▶ complete
                                                    first tokens: told to the caller the moment they come

Three things run side by side: following the stream, pulling into reserved blocks, renewing the lease. The first that
fails ends the attempt. Whatever happens, no block goes back to the pool while a READ may still write into it, and the
lease is released only when all READs are over.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from decode_worker.pace import DecodeBatch, Pace
from decode_worker.session import HandOffReport
from headrace.clock import Deadline
from headrace.engine.sequence import Event, Failed, Reserved, Sequence
from headrace.engine_client import EngineClient
from headrace.errors import Code, HeadraceError, InternalError, Overloaded, TransferFailed, WorkerGone
from headrace.rpc.convert import sampling_to_proto
from headrace.rpc.status import errors_of
from headrace.rpc.v1 import kv_pb2, worker_pb2
from headrace.telemetry import WorkerTelemetry
from headrace.tracing import Span
from kv_transfer.leased_reads import LeasedReads, ReadContext, RemoteBlock, budget_s, described
from kv_transfer.metrics import Failure
from kv_transfer.prefix_fetch import PrefixFetcher

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class DecodeContext:
    """What every request of this worker needs."""

    engine: EngineClient
    reads: ReadContext
    fetcher: PrefixFetcher
    root_digest: Callable[[str], bytes]
    eos_token_ids: frozenset[int]
    block_size_tokens: int
    telemetry: WorkerTelemetry
    batch: DecodeBatch = field(default_factory=DecodeBatch)


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """What is asked of a prefill worker, for which request. `span`: what this attempt is under."""

    sequence: Sequence
    start: worker_pb2.StartRequest
    span: Span
    deadline: Deadline
    pace: Pace  # told when it is asked for and when it starts
    on_prompt_logprobs: Callable[
        [worker_pb2.PromptLogprobs], None
    ]  # raises TransferFailed for what does not fit


class HandOff:
    """Use once: `run`, then either `adopted` was reached or the attempt failed and cleans up behind itself."""

    def __init__(self, context: DecodeContext, ref: worker_pb2.PeerRef, task: PrefillTask) -> None:
        self._context = context
        self._kv = context.reads.kv
        self._ref = ref
        self._task = task
        self.report = HandOffReport(prefill_worker=ref.worker_id)
        self._reservation: asyncio.Future[Reserved] = asyncio.get_running_loop().create_future()
        self._announced: dict[int, RemoteBlock] = {}  # by index in the prompt
        self._news = asyncio.Event()
        self._started = asyncio.Event()
        self._lease_held = asyncio.Event()
        self._asked = False

    async def run(
        self,
        on_first_token: Callable[[kv_pb2.FirstToken], None],
        going_on: Callable[[], dict[int, int]],
    ) -> None:
        """Bring the KV here and let the choices that go on join the decode batch.

        `on_first_token(token)` is called as soon as the token of a choice arrives. `going_on()` gives the first tokens
        of the choices that they did not end; once all are here and none goes on, nothing is adopted. Raises
        HeadraceError.
        """
        sequence = self._task.sequence
        peers = self._context.reads.peers
        peer = await peers.connect(self._ref, budget_s(self._task.deadline, self._kv.connect_timeout_s))
        reads = LeasedReads(self._context.reads, peer, uuid.uuid4().hex)
        adopted = False
        try:
            await self._exchange(reads, on_first_token, going_on)
            first_tokens = going_on()
            if first_tokens:
                reads.check_lease()
                await self._context.engine.call(lambda engine: engine.adopt(sequence.id, first_tokens))
                adopted = True
        except WorkerGone:
            # The connection broke: tear the transport down too, so that READs under way come to an end.
            self._context.reads.start(peers.drop(peer.incarnation))
            raise
        finally:
            if not adopted:
                self._context.engine.post(lambda engine: engine.abort(sequence.id))
            self._context.reads.start(self._clean_up(reads))

    def on_engine_event(self, event: Event) -> bool:
        """The engine's answer to the reservation. Returns whether the event was meant for this attempt."""
        if self._reservation.done():
            return False
        if isinstance(event, Reserved):
            self._reservation.set_result(event)
        elif isinstance(event, Failed):
            self._reservation.set_exception(event.error)
        return True

    async def _exchange(
        self,
        reads: LeasedReads,
        on_first_token: Callable[[kv_pb2.FirstToken], None],
        going_on: Callable[[], dict[int, int]],
    ) -> None:
        """Run the stream, the pull and the renewals; the stream decides how it ends."""
        pull = asyncio.create_task(self._pull(reads), name="pull")
        renew = asyncio.create_task(self._renew(reads), name="renew")
        follow = asyncio.create_task(self._follow(reads, on_first_token), name="follow")
        tasks = {pull, renew, follow}
        try:
            while not (follow.done() and pull.done()):
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises what ended the attempt
                if follow.done() and not going_on():
                    return
                tasks -= done
        finally:
            for task in (pull, renew, follow):
                task.cancel()
            await asyncio.gather(pull, renew, follow, return_exceptions=True)

    async def _follow(self, reads: LeasedReads, on_first_token: Callable[[kv_pb2.FirstToken], None]) -> None:
        """Read the prefill worker's stream to the first token of each choice."""
        peer = reads.peer
        self._asked = True
        self._task.pace.asked()
        missing = set(self._task.sequence.choices)
        with errors_of(
            peer.worker_id
        ):  # another request may just have found the peer lost, and closed its channel
            call = peer.stub.Prefill(self._request(reads), timeout=self._task.deadline.remaining_s())
        try:
            while (event := await self._next_event(reads, call)) is not grpc.aio.EOF:
                kind = event.WhichOneof("event")
                if kind == "started":
                    self.report.cached_tokens = event.started.cached_tokens
                    self._task.pace.started(event.started.cached_tokens)
                    self._started.set()
                elif kind == "blocks_ready":
                    self._note(reads, event.blocks_ready)
                elif kind == "prompt_logprobs":
                    self._task.on_prompt_logprobs(event.prompt_logprobs)
                elif kind == "first_token":
                    choice = event.first_token.choice
                    if choice not in missing:
                        raise reads.failed(Failure.REFUSED, f"{peer.worker_id} sent choice {choice} unasked")
                    missing.remove(choice)
                    on_first_token(event.first_token)
                    if not missing:
                        return
        finally:
            call.cancel()
        raise reads.failed(Failure.REFUSED, f"{peer.worker_id} ended its stream without a first token")

    async def _next_event(self, reads: LeasedReads, call: Any) -> Any:
        """Of the stream. A prompt may queue for as long as there is time for another way; once it has started, silence
        is a fault. So that is, of a worker whose engine hangs, the one thing that shows.
        """
        limit_s = self._kv.progress_timeout_s if self._started.is_set() else float("inf")
        timeout_s = budget_s(self._task.deadline, limit_s)
        try:
            with errors_of(reads.peer.worker_id):
                async with asyncio.timeout(timeout_s):
                    return await call.read()
        except TimeoutError:
            raise reads.failed(
                Failure.NO_PROGRESS, f"{reads.peer.worker_id} said nothing for {timeout_s:g} s"
            ) from None
        except HeadraceError:
            self._context.reads.metrics.failures.labels(Failure.REFUSED).inc()
            raise

    async def _pull(self, reads: LeasedReads) -> None:
        """Reserve blocks once the prefill has started, then read every announced block that is missing here."""
        sequence = self._task.sequence
        await self._started.wait()
        await self._context.engine.reserve(sequence)
        reserved = await self._reserved()
        needed = range(reserved.num_cached_blocks, len(reserved.block_ids))
        await self._lease_held.wait()
        began_s = self._context.reads.clock.now()
        done = needed.start
        while done < needed.stop:
            batch = [index for index in range(done, needed.stop) if index in self._announced]
            if not batch:
                await self._wait_for_news(reads)
                continue
            # Announcements come in order, so the batch is contiguous.
            stats = await reads.read(
                [self._announced[index] for index in batch],
                [reserved.block_ids[index] for index in batch],
                budget_s(self._task.deadline, self._kv.transfer_timeout_s),
            )
            self.report.blocks_moved += len(batch)
            self.report.bytes_moved += stats.bytes
            self.report.transfer_s += stats.seconds
            done = batch[-1] + 1
        self._task.span.phase(
            "transfer",
            began_s,
            self._context.reads.clock.now(),
            blocks=self.report.blocks_moved,
            bytes=self.report.bytes_moved,
            read_seconds=self.report.transfer_s,
        )

    async def _renew(self, reads: LeasedReads) -> None:
        await self._started.wait()
        await reads.renew(on_held=self._lease_held.set)

    async def _reserved(self) -> Reserved:
        """Blocks of our own. With a deadline: two workers of both roles, each out of blocks until the other has read,
        would wait for one another for ever.
        """
        timeout_s = budget_s(self._task.deadline, self._kv.progress_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._reservation)
        except TimeoutError:
            raise Overloaded(f"no KV blocks were free here for {timeout_s:g} s") from None

    async def _wait_for_news(self, reads: LeasedReads) -> None:
        self._news.clear()
        timeout_s = budget_s(self._task.deadline, self._kv.progress_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            raise reads.failed(
                Failure.NO_PROGRESS, f"{reads.peer.worker_id} announced no block for {timeout_s:g} s"
            ) from None

    async def _clean_up(self, reads: LeasedReads) -> None:
        """Wait until no READ can write any more, then free our blocks and the peer's."""
        sequence_id = self._task.sequence.id
        await reads.settle()
        self._context.engine.post(lambda engine: engine.settle(sequence_id))
        if self._asked and not await reads.release():
            error = InternalError("KV blocks were recycled while they were read")
            self._context.engine.post(lambda engine: engine.fail(sequence_id, error))

    def _request(self, reads: LeasedReads) -> kv_pb2.PrefillRequest:
        sequence, start = self._task.sequence, self._task.start
        return kv_pb2.PrefillRequest(
            lease_id=reads.lease_id,
            reader=self._context.reads.peers.own,
            expected_incarnation=self._ref.incarnation,
            token_ids=sequence.token_ids,
            num_output_tokens=sequence.num_output_tokens,
            sampling=sampling_to_proto(sequence.sampling),
            cache_salt=start.cache_salt,
            timeout_s=self._task.deadline.remaining_s(),
            lease_ttl_s=self._kv.lease_ttl_s,
            checksum=reads.verifies,
            sources=start.sources,
            priority=sequence.priority,
            router_id=sequence.origin,
            traceparent=self._task.span.traceparent,
            label=start.label,
            request_id=start.request_id,
        )

    def _note(self, reads: LeasedReads, ready: kv_pb2.BlocksReady) -> None:
        try:
            for index, block in enumerate(described(ready), start=ready.first_index):
                if self._announced.setdefault(index, block) != block:
                    raise TransferFailed(f"it announced prompt block {index} twice, differently")
        except TransferFailed as error:
            raise reads.failed(Failure.REFUSED, f"{self._ref.worker_id}: {error}") from None
        self._news.set()


def is_worth_retrying(error: HeadraceError) -> bool:
    """Whether another prefill worker, or prefilling here, can succeed where this failed."""
    return error.code not in {Code.INVALID_ARGUMENT, Code.CANCELLED}
