"""The reader's side of one lease: READs of a peer's blocks into ours, and what makes them safe to use.

    hand-off:      Prefill ─▶ announcements ─┐
    prefix fetch:  Lease ────────────────────┴─▶ renew … ─▶ read … ─▶ settle ─▶ release

What was read may be used if the lease was good on our clock when the READ had ended, and the checksums, where asked
for, agree. Nothing goes back to a pool before `settle`, and the owner is told to let go only after that.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from headrace.clock import Clock, Deadline
from headrace.config import KvSettings
from headrace.errors import Code, DeadlineExceeded, HeadraceError, PeerError, TransferFailed
from headrace.rpc.status import errors_of
from headrace.rpc.v1 import kv_pb2
from kv_transfer.lease import ReaderLease
from kv_transfer.metrics import Failure, KvMetrics
from kv_transfer.peers import Peer, Peers
from kv_transfer.transfer_thread import Transfer, TransferStats

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RemoteBlock:
    """A block at its owner, as the owner described it."""

    block_id: int
    generation: int
    checksum: int | None  # xxh3-64, where asked for


def described(message: kv_pb2.BlocksReady | kv_pb2.LeaseResponse) -> list[RemoteBlock]:
    """Raises TransferFailed for lists that do not fit each other."""
    num_blocks = len(message.block_ids)
    if len(message.generations) != num_blocks or len(message.checksums) not in (0, num_blocks):
        raise TransferFailed("the peer described its blocks with lists of different lengths")
    checksums = list(message.checksums) or [None] * num_blocks
    return [
        RemoteBlock(*block) for block in zip(message.block_ids, message.generations, checksums, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class ReadContext:
    """What every READ of this worker needs. `checksums` reads the bytes of our blocks."""

    peers: Peers
    kv: KvSettings
    clock: Clock
    checksums: Callable[[list[int]], list[int]]
    metrics: KvMetrics
    background: Callable[[asyncio.Task[None]], None]  # owns tasks that outlive the request they are for

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.background(asyncio.create_task(work))


class LeasedReads:
    """Used on the event loop. One of these for each attempt."""

    def __init__(self, context: ReadContext, peer: Peer, lease_id: str) -> None:
        self.peer = peer
        self.lease_id = lease_id
        self.lease = ReaderLease(context.kv.lease_ttl_s, context.clock)
        self.verifies = random.random() < context.kv.checksum
        self._context = context
        self._transfers: list[Transfer] = []
        self._read: dict[int, int] = {}  # generation by remote block id
        self._released = False

    async def renew(self, on_held: Callable[[], None] = lambda: None) -> None:
        """Keep the lease alive, until cancelled. Raises what the owner answers when it is over.

        The first renewal goes out at once: a prompt may have queued for longer than a lease, so the reader's view
        starts with this request, not with the one that asked for the prefill.
        """
        kv = self._context.kv
        while True:
            sent_at = self.lease.sending()
            try:
                with errors_of(self.peer.worker_id):
                    await self.peer.stub.Renew(
                        kv_pb2.RenewRequest(
                            lease_id=self.lease_id,
                            incarnation=self.peer.incarnation,
                            reader=self._context.peers.own.incarnation,
                        ),
                        timeout=kv.lease_ttl_s / 3,
                    )
            except DeadlineExceeded:
                continue  # the lease itself decides how long this may go on
            self.lease.acknowledged(sent_at)
            on_held()
            await asyncio.sleep(kv.lease_ttl_s / 3)

    async def read(
        self, remote: Sequence[RemoteBlock], local_ids: list[int], timeout_s: float
    ) -> TransferStats:
        """Read blocks into ours, and check that they may be used. Raises TransferFailed."""
        transfer = self._context.peers.transfers.read(
            self.peer.incarnation, [block.block_id for block in remote], local_ids
        )
        self._transfers.append(transfer)
        self._read.update((block.block_id, block.generation) for block in remote)
        try:
            async with asyncio.timeout(timeout_s):
                stats = await asyncio.shield(transfer.done)
        except TransferFailed as error:
            # The link is broken even if the peer answers: the next attempt starts with a new handshake.
            self._context.start(self._context.peers.drop(self.peer.incarnation))
            raise self.failed(Failure.TRANSFER, str(error)) from None
        except TimeoutError:
            raise self.failed(
                Failure.TIMEOUT,
                f"READ of {len(remote)} blocks from {self.peer.worker_id} took over {timeout_s:g} s",
            ) from None
        self.check_lease()
        await self._verify(remote, local_ids)
        self._note(len(remote), stats)
        return stats

    def check_lease(self) -> None:
        """Raises TransferFailed when the owner may have let go of the blocks."""
        if not self.lease.valid():
            raise self.failed(
                Failure.LEASE_OVER, f"the lease at {self.peer.worker_id} ended before the blocks were here"
            )

    def failed(self, reason: Failure, message: str) -> TransferFailed:
        """The error to be raised, counted."""
        self._context.metrics.failures.labels(reason).inc()
        return TransferFailed(message)

    async def settle(self) -> None:
        """Returns when no READ can write into our blocks any more.

        One that is still under way when the owner's hold has ended anyway is ended with its connection, for as long as
        it takes: a transport that hangs may go on later.
        """
        while True:
            try:
                async with asyncio.timeout(self._context.kv.lease_ttl_s):
                    for transfer in self._transfers:
                        await transfer.settled()
                return
            except TimeoutError:
                log.warning("READ does not end, dropping the peer", peer=self.peer.worker_id)
            try:
                await self._context.peers.drop(self.peer.incarnation)
            except HeadraceError as error:
                log.error("peer not dropped", peer=self.peer.worker_id, error=str(error))

    async def release(self) -> bool:
        """Let the owner's blocks go; once is enough. False if it says that a block was recycled while we read it.

        An owner that is gone, or whose hold is over already, needs no release.
        """
        if self._released:
            return True
        self._released = True
        request = kv_pb2.ReleaseRequest(
            lease_id=self.lease_id,
            incarnation=self.peer.incarnation,
            reader=self._context.peers.own.incarnation,
            block_ids=list(self._read),
            generations=list(self._read.values()),
        )
        try:
            with errors_of(self.peer.worker_id):
                await self.peer.stub.Release(request, timeout=self._context.kv.lease_ttl_s)
        except PeerError as error:
            if error.code == Code.FAILED_PRECONDITION:
                self.failed(Failure.STALE, str(error))
                log.error(
                    "blocks were recycled while they were read", peer=self.peer.worker_id, error=str(error)
                )
                return False
        except HeadraceError as error:
            log.debug("lease not released", peer=self.peer.worker_id, error=str(error))
        return True

    async def _verify(self, remote: Sequence[RemoteBlock], local_ids: list[int]) -> None:
        if not self.verifies:
            return
        found = await asyncio.to_thread(self._context.checksums, local_ids)
        wrong = [block.block_id for block, own in zip(remote, found, strict=True) if block.checksum != own]
        if wrong:
            log.error("checksums differ", peer=self.peer.worker_id, lease=self.lease_id, blocks=wrong[:8])
            raise self.failed(
                Failure.CHECKSUM,
                f"checksums of blocks {wrong[:8]} differ from those of {self.peer.worker_id}",
            )

    def _note(self, num_blocks: int, stats: TransferStats) -> None:
        metrics, peer = self._context.metrics, self.peer.worker_id
        metrics.read_bytes.labels(peer).inc(stats.bytes)
        metrics.read_blocks.labels(peer).inc(num_blocks)
        metrics.read_descriptors.labels(peer).inc(num_blocks * self.peer.descriptors_per_block)
        metrics.read_seconds.observe(stats.seconds)


def budget_s(deadline: Deadline, limit_s: float) -> float:
    """For a wait within an attempt that another way can follow. Raises DeadlineExceeded when nothing is left."""
    share = deadline.share_s(limit_s)
    if share <= 0:
        raise DeadlineExceeded("the request's deadline passed")
    return share
