"""KvExchange: what a worker does for its readers.

handshake ─▶ Prefill ─▶ started ─▶ blocks ready … ─▶ first token of each choice ─▶ (reads go on) ─▶ Release
                └ stream ends early: the computation stops; the hold waits for Release or expiry
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from headrace.engine.sequence import BlocksReady, Event, Failed, NewToken, Sequence, Started
from headrace.engine_client import EngineClient
from headrace.errors import DeadlineExceeded, InvalidRequest, NotFound, Overloaded, WorkerGone
from headrace.rpc.convert import logprobs_to_proto, sampling_from_proto
from headrace.rpc.v1 import kv_pb2, kv_pb2_grpc
from kv_transfer.peers import Peers


class KvExchangeService(kv_pb2_grpc.KvExchangeServicer):
    """One per worker. `root_digest(salt)` starts the hash chain; `checksums(block_ids)` reads the blocks' bytes."""

    def __init__(
        self,
        engine: EngineClient,
        peers: Peers,
        root_digest: Callable[[str], bytes],
        checksums: Callable[[list[int]], list[int]],
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._root_digest = root_digest
        self._checksums = checksums
        self._draining = False
        self._streams = 0

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
        return await self._peers.accept(request)

    async def Prefill(
        self, request: kv_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[kv_pb2.PrefillEvent]:
        self._check_incarnation(request.expected_incarnation)
        if self._draining:
            raise Overloaded(f"{self._peers.own.worker_id} is draining")
        sequence = self._sequence(request)
        events: asyncio.Queue[Event] = asyncio.Queue()  # bounded by the prompt's number of chunks
        deadline = time.monotonic() + request.timeout_s
        self._streams += 1
        try:
            with self._engine.subscribed(sequence.id, events.put_nowait):
                await self._engine.submit(sequence)
                num_choices = len(sequence.choices)
                async for message in self._follow(
                    events, num_choices, deadline, with_checksums=request.checksum
                ):
                    yield message
        finally:
            self._streams -= 1
            # Stops the computation if it still runs; the blocks stay held for reads under way.
            self._engine.post(lambda engine: engine.abort(sequence.id))

    async def Renew(
        self, request: kv_pb2.RenewRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> kv_pb2.RenewResponse:
        self._check_incarnation(request.incarnation)
        if not await self._engine.call(lambda engine: engine.renew_hold(request.lease_id)):
            raise NotFound(f"no lease {request.lease_id}: released or expired")
        return kv_pb2.RenewResponse()

    async def Release(
        self, request: kv_pb2.ReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> kv_pb2.ReleaseResponse:
        self._check_incarnation(request.incarnation)
        if not await self._engine.call(lambda engine: engine.release_hold(request.lease_id)):
            raise NotFound(f"no lease {request.lease_id}: released or expired")
        return kv_pb2.ReleaseResponse()

    def _sequence(self, request: kv_pb2.PrefillRequest) -> Sequence:
        if not request.lease_id:
            raise InvalidRequest("lease_id", "", "must name the hand-off")
        return Sequence(
            id=request.lease_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=len(request.token_ids) - request.num_output_tokens,
            sampling=sampling_from_proto(request.sampling),
            root=self._root_digest(request.cache_salt),
            hold_ttl_s=request.lease_ttl_s,
        )

    async def _follow(
        self, events: asyncio.Queue[Event], num_choices: int, deadline: float, *, with_checksums: bool
    ) -> AsyncIterator[kv_pb2.PrefillEvent]:
        """The sequence's events as messages, up to the first token of each choice."""
        num_missing = num_choices
        while num_missing:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
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
        checksums = await asyncio.to_thread(self._checksums, event.block_ids) if with_checksums else []
        return kv_pb2.BlocksReady(
            first_index=event.first_index, block_ids=event.block_ids, checksums=checksums
        )

    def _check_incarnation(self, expected: str) -> None:
        own = self._peers.own
        if expected != own.incarnation:
            raise WorkerGone(f"{own.worker_id} is incarnation {own.incarnation}, not {expected}")
