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
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from decode_worker.session import HandOffReport
from headrace.clock import Clock
from headrace.config import KvSettings
from headrace.engine.sequence import Event, Failed, Reserved, Sequence
from headrace.engine_client import EngineClient
from headrace.errors import Code, DeadlineExceeded, HeadraceError, Overloaded, TransferFailed, WorkerGone
from headrace.rpc.convert import sampling_to_proto
from headrace.rpc.status import errors_of
from headrace.rpc.v1 import kv_pb2, worker_pb2
from kv_transfer.lease import ReaderLease
from kv_transfer.peers import Peer, Peers
from kv_transfer.transfer_thread import Transfer

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class DecodeContext:
    """What every request of this worker needs."""

    engine: EngineClient
    peers: Peers
    kv: KvSettings
    clock: Clock
    root_digest: Callable[[str], bytes]
    checksums: Callable[[list[int]], list[int]]
    eos_token_ids: frozenset[int]
    block_size_tokens: int
    background: Callable[[asyncio.Task[None]], None]  # owns tasks that outlive their request


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """What is asked of a prefill worker."""

    sequence: Sequence
    cache_salt: str
    timeout_s: float


class HandOff:
    """Use once: `run`, then either `adopted` was reached or the attempt failed and cleans up behind itself."""

    def __init__(self, context: DecodeContext, ref: worker_pb2.PeerRef, task: PrefillTask) -> None:
        self._context = context
        self._ref = ref
        self._task = task
        self.report = HandOffReport(prefill_worker=ref.worker_id)
        self._lease_id = uuid.uuid4().hex
        self._lease = ReaderLease(context.kv.lease_ttl_s, context.clock)
        self._reservation: asyncio.Future[Reserved] = asyncio.get_running_loop().create_future()
        self._announced: dict[int, tuple[int, int | None]] = {}  # prompt block index to (remote id, checksum)
        self._news = asyncio.Event()
        self._started = asyncio.Event()
        self._lease_held = asyncio.Event()
        self._transfers: list[Transfer] = []
        self._asked = False

    async def run(
        self,
        on_first_token: Callable[[kv_pb2.FirstToken], None],
        going_on: Callable[[], dict[int, int]],
    ) -> None:
        """Bring the KV here and let the choices that go on join the decode batch.

        `on_first_token(token)` is called as soon as the token of a choice arrives. `going_on()` gives the first tokens
        of the choices that they did not end; once all are here and none goes on, nothing is adopted.

        Raises HeadraceError.
        """
        sequence = self._task.sequence
        peer = await self._context.peers.connect(self._ref)
        adopted = False
        try:
            await self._exchange(peer, on_first_token, going_on)
            first_tokens = going_on()
            if first_tokens:
                self._check_lease(peer)
                await self._context.engine.call(lambda engine: engine.adopt(sequence.id, first_tokens))
                adopted = True
        except WorkerGone:
            # The connection broke: tear the transport down too, so that READs under way come to an end.
            self._in_background(self._context.peers.drop(peer.incarnation))
            raise
        finally:
            if not adopted:
                self._context.engine.post(lambda engine: engine.abort(sequence.id))
            self._in_background(self._clean_up(peer))

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
        peer: Peer,
        on_first_token: Callable[[kv_pb2.FirstToken], None],
        going_on: Callable[[], dict[int, int]],
    ) -> None:
        """Run the stream, the pull and the renewals; the stream decides how it ends."""
        pull = asyncio.create_task(self._pull(peer), name="pull")
        renew = asyncio.create_task(self._renew(peer), name="renew")
        follow = asyncio.create_task(self._follow(peer, on_first_token), name="follow")
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

    async def _follow(self, peer: Peer, on_first_token: Callable[[kv_pb2.FirstToken], None]) -> None:
        """Read the prefill worker's stream to the first token of each choice."""
        self._asked = True
        num_missing = len(self._task.sequence.choices)
        call = peer.stub.Prefill(self._request(), timeout=self._task.timeout_s)
        try:
            with errors_of(peer.worker_id):
                async for event in call:
                    kind = event.WhichOneof("event")
                    if kind == "started":
                        self.report.cached_tokens = event.started.cached_tokens
                        self._started.set()
                    elif kind == "blocks_ready":
                        self._note(event.blocks_ready)
                    elif kind == "first_token":
                        on_first_token(event.first_token)
                        num_missing -= 1
                        if not num_missing:
                            return
        finally:
            call.cancel()
        raise TransferFailed(f"{peer.worker_id} ended its stream without a first token")

    async def _pull(self, peer: Peer) -> None:
        """Reserve blocks once the prefill has started, then read every announced block that is missing here."""
        sequence = self._task.sequence
        await self._started.wait()
        await self._context.engine.reserve(sequence)
        reserved = await self._reserved()
        needed = range(reserved.num_cached_blocks, len(reserved.block_ids))
        await self._lease_held.wait()
        done = needed.start
        while done < needed.stop:
            batch = [index for index in range(done, needed.stop) if index in self._announced]
            if not batch:
                await self._wait_for_news(peer)
                continue
            # Announcements come in order, so the batch is contiguous.
            await self._read(peer, batch, [reserved.block_ids[index] for index in batch])
            done = batch[-1] + 1

    async def _reserved(self) -> Reserved:
        """Blocks of our own. With a deadline: two workers of both roles, each out of blocks until the other has read,
        would wait for one another for ever.
        """
        timeout_s = self._context.kv.progress_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._reservation)
        except TimeoutError:
            raise Overloaded(f"no KV blocks were free here for {timeout_s:g} s") from None

    async def _read(self, peer: Peer, indices: list[int], local_ids: list[int]) -> None:
        remote_ids = [self._announced[index][0] for index in indices]
        transfer = self._context.peers.transfers.read(peer.incarnation, remote_ids, local_ids)
        self._transfers.append(transfer)
        timeout_s = self._context.kv.transfer_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                stats = await asyncio.shield(transfer.done)
        except TransferFailed:
            # The link is broken even if the peer answers: the next hand-off starts with a new handshake.
            self._in_background(self._context.peers.drop(peer.incarnation))
            raise
        except TimeoutError:
            raise TransferFailed(
                f"READ of {len(indices)} blocks from {peer.worker_id} took over {timeout_s:g} s"
            ) from None
        self._check_lease(peer)
        await self._verify(indices, local_ids)
        self.report.blocks_moved += len(indices)
        self.report.bytes_moved += stats.bytes
        self.report.transfer_s += stats.seconds

    async def _verify(self, indices: list[int], local_ids: list[int]) -> None:
        if not self._context.kv.checksum:
            return
        for index, found in zip(
            indices, await asyncio.to_thread(self._context.checksums, local_ids), strict=True
        ):
            if found != self._announced[index][1]:
                raise TransferFailed(f"checksum of prompt block {index} differs from the prefill worker's")

    async def _renew(self, peer: Peer) -> None:
        """Keep the lease alive for as long as this attempt lasts.

        The first renewal goes out at once: the prompt may have queued for longer than a lease, so the reader's view
        starts with this request, not with the one that asked for the prefill.
        """
        await self._started.wait()
        while True:
            sent_at = self._lease.sending()
            try:
                with errors_of(peer.worker_id):
                    await peer.stub.Renew(
                        kv_pb2.RenewRequest(lease_id=self._lease_id, incarnation=peer.incarnation),
                        timeout=self._context.kv.lease_ttl_s / 3,
                    )
            except DeadlineExceeded:
                continue  # the lease itself decides how long this may go on
            self._lease.acknowledged(sent_at)
            self._lease_held.set()
            await asyncio.sleep(self._context.kv.lease_ttl_s / 3)

    async def _wait_for_news(self, peer: Peer) -> None:
        self._news.clear()
        timeout_s = self._context.kv.progress_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            raise TransferFailed(f"{peer.worker_id} announced no block for {timeout_s:g} s") from None

    async def _clean_up(self, peer: Peer) -> None:
        """Wait until no READ can write any more, then free our blocks and the peer's.

        A READ that is still under way when the owner's hold has ended anyway is ended with its connection.
        """
        try:
            async with asyncio.timeout(self._context.kv.lease_ttl_s):
                for transfer in self._transfers:
                    await transfer.settled()
        except TimeoutError:
            log.warning("READ does not end, dropping the peer", peer=peer.worker_id)
            await self._context.peers.drop(peer.incarnation)
        self._context.engine.post(lambda engine: engine.settle(self._task.sequence.id))
        if not self._asked:
            return
        with suppress(grpc.aio.AioRpcError):  # gone, or the hold is over already: expiry frees it
            await peer.stub.Release(
                kv_pb2.ReleaseRequest(lease_id=self._lease_id, incarnation=peer.incarnation),
                timeout=self._context.kv.lease_ttl_s,
            )

    def _request(self) -> kv_pb2.PrefillRequest:
        sequence = self._task.sequence
        return kv_pb2.PrefillRequest(
            lease_id=self._lease_id,
            reader=self._context.peers.own,
            expected_incarnation=self._ref.incarnation,
            token_ids=sequence.token_ids,
            num_output_tokens=sequence.num_output_tokens,
            sampling=sampling_to_proto(sequence.sampling),
            cache_salt=self._task.cache_salt,
            timeout_s=self._task.timeout_s,
            lease_ttl_s=self._context.kv.lease_ttl_s,
            checksum=self._context.kv.checksum,
        )

    def _note(self, ready: kv_pb2.BlocksReady) -> None:
        checksums: list[int | None] = list(ready.checksums) or [None] * len(ready.block_ids)
        for offset, (block_id, checksum) in enumerate(zip(ready.block_ids, checksums, strict=True)):
            self._announced[ready.first_index + offset] = (block_id, checksum)
        self._news.set()

    def _check_lease(self, peer: Peer) -> None:
        if not self._lease.valid():
            raise TransferFailed(f"the lease at {peer.worker_id} ended before the blocks were here")

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        self._context.background(asyncio.create_task(work))


def is_worth_retrying(error: HeadraceError) -> bool:
    """Whether another prefill worker, or prefilling here, can succeed where this failed."""
    return error.code not in {Code.INVALID_ARGUMENT, Code.CANCELLED}
