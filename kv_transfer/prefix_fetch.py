"""Cached blocks of another worker instead of computing them again: at the start of a prompt, and at a neighbour's end.

    named as a source ─▶ worth it? ─▶ Lease ─▶ blocks of our own ─▶ READ ─▶ in our prefix tree: the prompt finds them
                             └ no, gone, no room, failed: the prompt computes them

What the index promised is a hint; the owner's answer to `Lease` counts. A source that failed is not asked again for
this prompt.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

import structlog

from headrace.clock import Deadline
from headrace.engine.block_pool import NamedBlock
from headrace.engine.engine import Engine
from headrace.errors import HeadraceError, StaleBlocks
from headrace.rpc.status import errors_of
from headrace.rpc.v1 import kv_pb2, worker_pb2
from kv_transfer.leased_reads import LeasedReads, ReadContext, budget_s, described
from kv_transfer.metrics import Failure, PrefixDecision
from kv_transfer.peers import Peer

log = structlog.get_logger()

T = TypeVar("T")

# Blocks that one Lease or Offer may name: the owner's engine looks up each between two of its steps.
MAX_NAMES = 1 << 16
_MAX_SOURCES = 2  # asked for one prompt
_FIRST_GUESS_S = 0.005  # of a call to an owner that was not asked yet
_CALL_WEIGHT = 0.3  # of each new measurement of it
# A source that keeps us waiting for longer than this is given up: computing would be done by then.
_PATIENCE = 4.0  # times the predicted time to compute
_MIN_PATIENCE_S = 1.0


class CallsEngine(Protocol):
    """What is used of `EngineClient`."""

    async def call(self, command: Callable[[Engine], T]) -> T: ...

    def post(self, command: Callable[[Engine], object]) -> None: ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch brought."""

    num_blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    worker_id: str = ""


class PrefixFetcher:
    """One per worker. Used on the event loop."""

    def __init__(
        self, context: ReadContext, engine: CallsEngine, block_bytes: int, block_size_tokens: int
    ) -> None:
        self._context = context
        self._engine = engine
        self._block_bytes = block_bytes
        self._block_size_tokens = block_size_tokens
        # An owner answers between two steps of its engine.
        self._call_s: WeakKeyDictionary[Peer, float] = WeakKeyDictionary()
        self._under_way: dict[bytes, asyncio.Task[Fetched]] = {}  # by the first block that is missing

    async def fetch(
        self, sources: Sequence[worker_pb2.Source], root: bytes, hashes: Sequence[bytes], deadline: Deadline
    ) -> Fetched:
        """Bring what a source has of the prompt's blocks and we lack, where that is predicted to beat computing.

        Never fails, and never takes much longer than computing would: then nothing was fetched. `hashes`: of all full
        blocks of the prompt. Two prompts that lack the same block fetch it once.
        """
        if not sources:
            return Fetched()
        have = await self._engine.call(lambda engine: engine.num_cached_blocks(list(hashes)))
        if have == len(hashes):
            return Fetched()
        missing = hashes[have]
        task = self._under_way.get(missing)
        if task is not None:
            await asyncio.wait([task], timeout=deadline.share_s(self._context.kv.transfer_timeout_s))
            return Fetched()
        names = _named(root, hashes)
        task = asyncio.create_task(self._from_one_of(sources, names, have, deadline), name="prefix fetch")
        self._under_way[missing] = task
        task.add_done_callback(lambda _: self._under_way.pop(missing, None))
        return await task  # cancelled with its prompt: others then compute

    async def adopt(
        self, owner: worker_pb2.PeerRef, names: Sequence[NamedBlock], deadline: Deadline
    ) -> Fetched:
        """Bring blocks that their owner wants to leave behind. Raises HeadraceError."""
        peer = await self._context.peers.connect(owner, deadline.remaining_s())
        return await self._import(peer, names, deadline.remaining_s())

    async def _from_one_of(
        self, sources: Sequence[worker_pb2.Source], names: Sequence[NamedBlock], have: int, deadline: Deadline
    ) -> Fetched:
        own = self._context.peers.own.incarnation
        useful = [s for s in sources if s.num_blocks > have and s.worker.incarnation != own]
        for source in useful[:_MAX_SOURCES]:
            try:
                wanted = names[have : min(source.num_blocks, have + MAX_NAMES)]
                fetched = await self._from(source, wanted, deadline)
            except HeadraceError as error:
                self._decided(PrefixDecision.FAILED)
                log.warning("prefix not fetched", source=source.worker.worker_id, error=str(error))
                continue
            if fetched.num_blocks:
                return fetched
        return Fetched()

    async def _from(
        self, source: worker_pb2.Source, names: Sequence[NamedBlock], deadline: Deadline
    ) -> Fetched:
        compute_s = await self._predicted_compute_s(len(names))
        patience_s = max(_MIN_PATIENCE_S, _PATIENCE * compute_s)
        peer = await self._context.peers.connect(source.worker, budget_s(deadline, patience_s))
        if compute_s <= self._predicted_fetch_s(peer, len(names)):
            self._decided(PrefixDecision.COMPUTE)
            return Fetched()
        return await self._import(peer, names, budget_s(deadline, patience_s))

    async def _predicted_compute_s(self, num_blocks: int) -> float:
        """Endless while the engine has not measured its rate: then fetching is taken to be cheaper."""
        rate = (await self._engine.call(lambda engine: engine.load())).prefill_tokens_per_s
        return num_blocks * self._block_size_tokens / rate if rate else float("inf")

    def _predicted_fetch_s(self, peer: Peer, num_blocks: int) -> float:
        """Two calls and the transfer, as measured with this peer; the calls alone while no transfer was measured."""
        bytes_per_s = self._context.peers.transfers.bytes_per_s(peer.incarnation)
        calls_s = 2 * self._call_s.get(peer, _FIRST_GUESS_S)
        return calls_s + (num_blocks * self._block_bytes / bytes_per_s if bytes_per_s else 0.0)

    async def _import(self, peer: Peer, names: Sequence[NamedBlock], timeout_s: float) -> Fetched:
        """Lease, READ, put into the tree. Raises HeadraceError."""
        reads = LeasedReads(self._context, peer, uuid.uuid4().hex)
        owner, renew = reads.lease_id, None
        try:
            async with asyncio.timeout(timeout_s):
                remote = described(await self._lease(reads, names))
                if not remote:
                    self._decided(PrefixDecision.GONE)
                    return Fetched()
                local = await self._engine.call(lambda engine: engine.begin_import(owner, len(remote)))
                if not local:
                    self._decided(PrefixDecision.NO_ROOM)
                    return Fetched()
                renew = asyncio.create_task(reads.renew(), name="renew")
                stats = await reads.read(remote[: len(local)], local, self._context.kv.transfer_timeout_s)
                if not await reads.release():
                    raise StaleBlocks(f"blocks of {peer.worker_id} were recycled while they were read")
                reads.check_lease()
                await self._engine.call(lambda engine: engine.finish_import(owner, names[: len(local)]))
        except TimeoutError:
            raise reads.failed(
                Failure.TIMEOUT, f"{peer.worker_id} gave no prefix within {timeout_s:.3g} s"
            ) from None
        finally:
            if renew is not None:
                renew.cancel()
            self._engine.post(lambda engine: engine.abandon_import(owner))  # nothing, when it is finished
            self._context.start(self._clean_up(reads))
        self._decided(PrefixDecision.FETCH)
        return Fetched(len(local), stats.bytes, stats.seconds, peer.worker_id)

    async def _lease(self, reads: LeasedReads, names: Sequence[NamedBlock]) -> kv_pb2.LeaseResponse:
        sent_at = reads.lease.sending()
        with errors_of(reads.peer.worker_id):
            response = await reads.peer.stub.Lease(
                kv_pb2.LeaseRequest(
                    lease_id=reads.lease_id,
                    reader=self._context.peers.own,
                    expected_incarnation=reads.peer.incarnation,
                    names=[name.digest for name in names],
                    lease_ttl_s=self._context.kv.lease_ttl_s,
                    checksum=reads.verifies,
                ),
                timeout=self._context.kv.lease_ttl_s,
            )
        reads.lease.acknowledged(sent_at)
        self._note_call(reads.peer, self._context.clock.now() - sent_at)
        return response

    def _note_call(self, peer: Peer, seconds: float) -> None:
        known = self._call_s.get(peer, seconds)
        self._call_s[peer] = known + _CALL_WEIGHT * (seconds - known)

    async def _clean_up(self, reads: LeasedReads) -> None:
        await reads.settle()
        self._engine.post(lambda engine: engine.settle(reads.lease_id))
        await reads.release()

    def _decided(self, decision: PrefixDecision) -> None:
        self._context.metrics.prefix_decisions.labels(decision).inc()


def _named(root: bytes, hashes: Sequence[bytes]) -> list[NamedBlock]:
    return [NamedBlock(digest, parent) for digest, parent in zip(hashes, [root, *hashes], strict=False)]
