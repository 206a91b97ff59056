"""KvExchange: what a worker does for its readers.

handshake ─▶ Prefill ─▶ started ─▶ blocks ready … ─▶ first token of each choice ─▶ (reads go on) ─▶ Release
                └ stream ends early: the computation stops; the hold waits for Release or expiry
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog

from headrace.block_hash import extend
from headrace.clock import Deadline
from headrace.engine.block_pool import NamedBlock
from headrace.engine.sequence import (
    BlocksReady,
    Event,
    Failed,
    NewToken,
    PromptLogprobs,
    Sequence,
    Started,
)
from headrace.engine_client import EngineClient
from headrace.errors import (
    DeadlineExceeded,
    HeadraceError,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    StaleBlocks,
    WorkerGone,
)
from headrace.rpc.convert import logprobs_to_proto, prompt_logprobs_to_proto, sampling_from_proto
from headrace.rpc.tls import CALLER
from headrace.rpc.v1 import kv_pb2, kv_pb2_grpc, worker_pb2
from headrace.telemetry import WorkerTelemetry
from kv_transfer.leased_reads import ReadContext
from kv_transfer.metrics import Refusal
from kv_transfer.prefix_fetch import MAX_NAMES, PrefixFetcher
from prefill_worker.timing import PromptTiming

log = structlog.get_logger()

_LEASE_REASON = "cached prefix"
_MAX_LEASE_TTL_S = 600.0


class KvExchangeService(kv_pb2_grpc.KvExchangeServicer):
    """One per worker. `root_digest(salt)` starts the hash chain."""

    def __init__(
        self,
        engine: EngineClient,
        reads: ReadContext,
        fetcher: PrefixFetcher,
        root_digest: Callable[[str], bytes],
        block_size_tokens: int,
        telemetry: WorkerTelemetry,
    ) -> None:
        self._engine = engine
        self._reads = reads
        self._peers = reads.peers
        self._fetcher = fetcher
        self._root_digest = root_digest
        self._block_size_tokens = block_size_tokens
        self._telemetry = telemetry
        self._draining = False
        self._streams = 0
        self._named: dict[str, str] = {}  # incarnation of each worker whose certificate has a name, by it

    @property
    def num_streams(self) -> int:
        """Prompts being computed for readers."""
        return self._streams

    def drain(self) -> None:
        """Take no new prompts; those under way go on."""
        self._draining = True

    async def Handshake(
        self, request: kv_pb2.HandshakeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> kv_pb2.HandshakeResponse:
        self._check_incarnation(request.expected_incarnation)
        self._introduce(request.self)
        return await self._peers.accept(request)

    async def Prefill(
        self, request: kv_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[kv_pb2.PrefillEvent]:
        self._check_incarnation(request.expected_incarnation)
        self._check_reader(request.reader.incarnation)
        if self._draining:
            raise Overloaded(f"{self._peers.own.worker_id} is draining")
        sequence = self._sequence(request)
        events: asyncio.Queue[Event] = asyncio.Queue()  # bounded by the prompt's number of chunks
        deadline = Deadline.after(request.timeout_s, self._reads.clock)
        self._streams += 1
        timing = PromptTiming(self._telemetry, request)
        try:
            hashes = extend(sequence.root, sequence.token_ids, self._block_size_tokens)
            await self._fetcher.fetch(request.sources, sequence.root, hashes, deadline)
            self._peers.transfers.serve_for(request.lease_ttl_s)
            with self._engine.subscribed(sequence.id, events.put_nowait):
                try:
                    await self._engine.submit(sequence)
                    num_choices = len(sequence.choices)
                    async for message in self._follow(
                        events, num_choices, deadline, with_checksums=request.checksum
                    ):
                        timing.note(message)
                        yield message
                finally:
                    # Stops the computation if it still runs; the blocks stay held for reads under way.
                    self._engine.post(lambda engine: engine.abort(sequence.id))
        except HeadraceError as error:
            timing.failed(error)
            raise
        finally:
            timing.close()
            self._streams -= 1

    async def Lease(
        self, request: kv_pb2.LeaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> kv_pb2.LeaseResponse:
        self._check_incarnation(request.expected_incarnation)
        self._check_reader(request.reader.incarnation)
        _check_lease_request(request.lease_id, request.lease_ttl_s)
        _check_num_names("names", len(request.names))
        self._peers.transfers.serve_for(request.lease_ttl_s)
        held = await self._engine.call(
            lambda engine: engine.hold_cached(
                request.lease_id,
                _LEASE_REASON,
                request.reader.incarnation,
                list(request.names),
                request.lease_ttl_s,
            )
        )
        return kv_pb2.LeaseResponse(
            block_ids=held,
            generations=held.values(),
            checksums=await self._checksums(list(held)) if request.checksum else (),
        )

    async def Renew(
        self, request: kv_pb2.RenewRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> kv_pb2.RenewResponse:
        self._check_incarnation(request.incarnation)
        self._check_reader(request.reader)
        self._peers.transfers.serve_for(self._reads.kv.lease_ttl_s)
        renewed = self._engine.call(lambda engine: engine.renew_hold(request.lease_id, request.reader))
        await self._checked(request.lease_id, renewed)
        return kv_pb2.RenewResponse()

    async def Release(
        self, request: kv_pb2.ReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> kv_pb2.ReleaseResponse:
        self._check_incarnation(request.incarnation)
        self._check_reader(request.reader)
        if len(request.block_ids) != len(request.generations):
            raise InvalidRequest("generations", len(request.generations), "must be one for each of block_ids")
        told = dict(zip(request.block_ids, request.generations, strict=True))
        released = self._engine.call(
            lambda engine: engine.release_hold(request.lease_id, request.reader, told)
        )
        await self._checked(request.lease_id, released)
        return kv_pb2.ReleaseResponse()

    async def Offer(
        self, request: kv_pb2.OfferRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> kv_pb2.OfferResponse:
        self._check_incarnation(request.expected_incarnation)
        self._check_reader(request.owner.incarnation)
        if self._draining:
            raise Overloaded(f"{self._peers.own.worker_id} is draining")
        _check_num_names("blocks", len(request.blocks))
        deadline = Deadline.after(request.timeout_s, self._reads.clock)
        offered = [NamedBlock(block.digest, block.parent_digest) for block in request.blocks]
        missing = await self._engine.call(lambda engine: engine.missing(offered))
        num_present = len(offered) - len(missing)
        if missing:
            num_present += (await self._fetcher.adopt(request.owner, missing, deadline)).num_blocks
        return kv_pb2.OfferResponse(num_present=num_present)

    def _introduce(self, ref: worker_pb2.PeerRef) -> None:
        """A worker whose certificate has a name is that worker, and what it says it is here nobody else can say."""
        name = _name_of_caller()
        if name:
            others = (incarnation for other, incarnation in self._named.items() if other != name)
            if ref.worker_id != name or ref.incarnation in others:
                self._refused(Refusal.OTHER_READER)
                raise PermissionDenied(f"the certificate is of worker {name!r}, not of {ref.worker_id!r}")
            self._named[name] = ref.incarnation
        elif ref.worker_id in self._named or ref.incarnation in self._named.values():
            self._refused(Refusal.OTHER_READER)
            raise PermissionDenied(f"worker {ref.worker_id!r} has a certificate of its own")

    def _check_reader(self, incarnation: str) -> None:
        """Raises PermissionDenied when the caller's certificate, by its name, is another worker's."""
        name = _name_of_caller()
        allowed = self._named.get(name) == incarnation if name else incarnation not in self._named.values()
        if not allowed:
            self._refused(Refusal.OTHER_READER)
            raise PermissionDenied(f"incarnation {incarnation} did not shake hands as {name or 'nameless'!r}")

    async def _checked(self, lease_id: str, answer: Awaitable[bool]) -> None:
        """Raises what the reader is told when its lease is not what it thinks; counted by reason."""
        try:
            if await answer:
                return
        except PermissionDenied:
            self._refused(Refusal.OTHER_READER)
            raise
        except StaleBlocks as error:
            self._refused(Refusal.GENERATION)
            log.error("blocks under a lease were recycled", lease=lease_id, error=str(error))
            raise
        self._refused(Refusal.UNKNOWN_LEASE)
        raise NotFound(f"no lease {lease_id}: released or expired")

    def _refused(self, reason: Refusal) -> None:
        self._reads.metrics.refusals.labels(reason).inc()

    def _sequence(self, request: kv_pb2.PrefillRequest) -> Sequence:
        _check_lease_request(request.lease_id, request.lease_ttl_s)
        return Sequence(
            id=request.lease_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=len(request.token_ids) - request.num_output_tokens,
            sampling=sampling_from_proto(request.sampling),
            root=self._root_digest(request.cache_salt),
            hold_ttl_s=request.lease_ttl_s,
            reader=request.reader.incarnation,
            origin=request.router_id,
            priority=request.priority,
        )

    async def _follow(
        self, events: asyncio.Queue[Event], num_choices: int, deadline: Deadline, *, with_checksums: bool
    ) -> AsyncIterator[kv_pb2.PrefillEvent]:
        """The sequence's events as messages, up to the first token of each choice."""
        num_missing = num_choices
        while num_missing:
            try:
                async with asyncio.timeout(deadline.remaining_s()):
                    event = await events.get()
            except TimeoutError:
                raise DeadlineExceeded("the prompt was not computed before the request's deadline") from None
            match event:
                case Started():
                    yield kv_pb2.PrefillEvent(
                        started=kv_pb2.PrefillStarted(cached_tokens=event.num_cached_tokens)
                    )
                case BlocksReady():
                    blocks = await self._announcement(event, with_checksums=with_checksums)
                    yield kv_pb2.PrefillEvent(blocks_ready=blocks)
                case PromptLogprobs():
                    logprobs = prompt_logprobs_to_proto(event.first_index, event.entries)
                    yield kv_pb2.PrefillEvent(prompt_logprobs=logprobs)
                case NewToken():
                    logprobs = event.logprobs and logprobs_to_proto(event.logprobs)
                    token = kv_pb2.FirstToken(token_id=event.token_id, logprobs=logprobs, choice=event.choice)
                    yield kv_pb2.PrefillEvent(first_token=token)
                    num_missing -= 1
                case Failed():
                    raise event.error
                case _:
                    raise AssertionError(f"unexpected event {event}")

    async def _announcement(self, event: BlocksReady, *, with_checksums: bool) -> kv_pb2.BlocksReady:
        return kv_pb2.BlocksReady(
            first_index=event.first_index,
            block_ids=event.block_ids,
            generations=event.generations,
            checksums=await self._checksums(event.block_ids) if with_checksums else (),
        )

    async def _checksums(self, block_ids: list[int]) -> list[int]:
        return await asyncio.to_thread(self._reads.checksums, block_ids)

    def _check_incarnation(self, expected: str) -> None:
        own = self._peers.own
        if expected != own.incarnation:
            self._refused(Refusal.INCARNATION)
            raise WorkerGone(f"{own.worker_id} is incarnation {own.incarnation}, not {expected}")


def _name_of_caller() -> str:
    caller = CALLER.get()
    return caller.name if caller is not None else ""


def _check_lease_request(lease_id: str, ttl_s: float) -> None:
    if not lease_id:
        raise InvalidRequest("lease_id", "", "must name the lease")
    if not 0 < ttl_s <= _MAX_LEASE_TTL_S:
        raise InvalidRequest("lease_ttl_s", ttl_s, f"must lie in 0..{_MAX_LEASE_TTL_S:g}, 0 excluded")


def _check_num_names(field: str, number: int) -> None:
    if number > MAX_NAMES:
        raise InvalidRequest(field, f"{number} of them", f"at most {MAX_NAMES}")
