"""Other workers, as this worker sees them: one connection and one handshake per incarnation.

The decode side opens peers (`connect`), the owner side learns of its readers when they shake hands (`accept`). A new
incarnation of a worker drops everything of the old one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace

import grpc
import structlog

from headrace.config import KvSettings, RpcSettings
from headrace.errors import HeadraceError, LayoutMismatch, TransferFailed
from headrace.rpc.channel import open_channel
from headrace.rpc.status import from_rpc_error
from headrace.rpc.v1 import kv_pb2, kv_pb2_grpc, worker_pb2
from kv_transfer.carrier import Carrier, Host, carrier_between
from kv_transfer.layout import KvLayout
from kv_transfer.slices import pairing
from kv_transfer.transfer_thread import Probe
from kv_transfer.transfers import Transfers
from kv_transfer.transport import Part

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Peer:
    """A worker we have shaken hands with; its blocks can be read."""

    worker_id: str
    incarnation: str
    channel: grpc.aio.Channel
    stub: kv_pb2_grpc.KvExchangeStub
    carrier: Carrier
    probe: Probe
    descriptors_per_block: int


class Peers:
    """All peers of this worker. Used on the event loop only."""

    def __init__(
        self,
        own: worker_pb2.PeerRef,
        layout: KvLayout,
        transfers: Transfers,
        kv: KvSettings,
        rpc: RpcSettings,
        host: Host,
    ) -> None:
        self.own = own
        self.layout = layout
        self.transfers = transfers
        self._kv = kv
        self._rpc = rpc
        self._host = host
        self._opening: dict[str, asyncio.Task[Peer]] = {}
        self._incarnations: dict[str, str] = {}  # worker id to the incarnation last seen
        self._refusals: dict[str, LayoutMismatch] = {}  # by worker id
        self.on_measured: Callable[[worker_pb2.Link], None] = lambda link: None

    async def connect(self, ref: worker_pb2.PeerRef, timeout_s: float | None = None) -> Peer:
        """The peer in this incarnation, after one handshake that all callers share: who waits for `timeout_s` only,
        leaves it to the others.

        Raises LayoutMismatch (or PeerError naming the field, when the peer noticed it), WorkerGone, TransferFailed.
        """
        task = self._opening.get(ref.incarnation)
        if task is None:
            task = asyncio.create_task(self._open(ref), name=f"handshake {ref.worker_id}")
            self._opening[ref.incarnation] = task
            task.add_done_callback(lambda done: self._forget_failed(ref.incarnation, done))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(task)
        except TimeoutError:
            raise TransferFailed(f"{ref.worker_id} did not shake hands within {timeout_s:.3g} s") from None

    async def accept(self, request: kv_pb2.HandshakeRequest) -> kv_pb2.HandshakeResponse:
        """A reader introduces itself. Raises LayoutMismatch."""
        ref = request.self
        parts, _ = self._compared(ref.worker_id, request)
        await self._replace_incarnation(ref.worker_id, ref.incarnation)
        await self.transfers.connect(ref.incarnation, parts, self._kv.connect_timeout_s)
        self.transfers.serve_for(self._kv.connect_timeout_s)
        return kv_pb2.HandshakeResponse(
            self=self.own,
            layout=self.layout.to_proto(),
            transport_metadata=await self.transfers.metadata(),
            host=self._host.to_proto(),
        )

    @property
    def refusals(self) -> Mapping[str, LayoutMismatch]:
        """By worker id: why blocks can not be exchanged with it."""
        return self._refusals

    def statuses(self) -> list[worker_pb2.PeerStatus]:
        """Those that are connected or refused. May be called from any thread."""
        connected = [task.result() for task in list(self._opening.values()) if _is_open(task)]
        return [
            worker_pb2.PeerStatus(
                worker_id=peer.worker_id,
                incarnation=peer.incarnation,
                connected=True,
                bytes_per_s=self.transfers.bytes_per_s(peer.incarnation),
                transport=peer.carrier.transport,
                device=peer.carrier.device,
                block_latency_s=peer.probe.latency_s,
            )
            for peer in connected
        ] + [
            worker_pb2.PeerStatus(
                worker_id=worker_id, incarnation=self._incarnations.get(worker_id, ""), refusal=str(refusal)
            )
            for worker_id, refusal in list(self._refusals.items())
        ]

    async def measure_unused(self, for_s: float) -> None:
        """Read a little from those that nothing was read from for so long, and tell `on_measured`: what routers know of
        a way that they do not choose stays as it was, else. A peer that can not be read from is dropped.
        """
        open_peers = [task.result() for task in list(self._opening.values()) if _is_open(task)]
        unused = [p for p in open_peers if self.transfers.unused_s(p.incarnation) >= for_s]
        await asyncio.gather(*(self._measure(peer) for peer in unused))

    async def forget_absent(self, worker_ids: Set[str]) -> None:
        """Only these are alive: nothing is kept of others. Except of those that we are connected to: a directory that
        lost its data knows nobody for a while.
        """
        for worker_id in self._refusals.keys() - worker_ids:
            del self._refusals[worker_id]
        for worker_id in self._incarnations.keys() - worker_ids:
            incarnation = self._incarnations[worker_id]
            if not self._is_in_touch(incarnation):
                del self._incarnations[worker_id]
                await self.drop(incarnation)

    async def drop(self, incarnation: str) -> None:
        """The peer is lost: close its channel, tear its transport down. Every READ from it is over afterwards."""
        task = self._opening.pop(incarnation, None)
        if task is not None and _is_open(task):
            await task.result().channel.close()
        await self.transfers.disconnect(incarnation)

    async def close(self) -> None:
        for incarnation in list(self._opening):
            await self.drop(incarnation)

    async def _open(self, ref: worker_pb2.PeerRef) -> Peer:
        channel = open_channel(ref.address, self._rpc)
        try:
            return await self._shake_hands(ref, channel)
        except grpc.aio.AioRpcError as error:
            await channel.close()
            refusal = from_rpc_error(error, ref.worker_id)
            if isinstance(refusal, LayoutMismatch):
                self._refusals[ref.worker_id] = refusal
            raise refusal from None
        except BaseException:
            await channel.close()
            raise

    async def _shake_hands(self, ref: worker_pb2.PeerRef, channel: grpc.aio.Channel) -> Peer:
        stub = kv_pb2_grpc.KvExchangeStub(channel)
        answer: kv_pb2.HandshakeResponse = await stub.Handshake(
            kv_pb2.HandshakeRequest(
                self=self.own,
                expected_incarnation=ref.incarnation,
                layout=self.layout.to_proto(),
                transport_metadata=await self.transfers.metadata(),
                host=self._host.to_proto(),
            ),
            timeout=self._kv.connect_timeout_s,
            wait_for_ready=False,
        )
        parts, carrier = self._compared(ref.worker_id, answer)
        # Not before the answer: what we were told may be older than the incarnation that we are connected to.
        await self._replace_incarnation(ref.worker_id, ref.incarnation)
        await self.transfers.connect(ref.incarnation, parts, self._kv.connect_timeout_s)
        probe = await self._probe(ref)
        log.info(
            "peer connected",
            peer=ref.worker_id,
            incarnation=ref.incarnation,
            transport=carrier.transport,
            device=carrier.device,
            first_read_s=probe.first_s,
            latency_s=probe.latency_s,
            bytes_per_s=probe.bytes_per_s,
        )
        num_pieces = sum(part.slice.count for of_rank in parts for part in of_rank)
        return Peer(ref.worker_id, ref.incarnation, channel, stub, carrier, probe, num_pieces)

    async def _probe(self, ref: worker_pb2.PeerRef) -> Probe:
        """Make the connection and measure it. A failure tears it down: a READ may still be under way."""
        timeout_s = self._kv.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self.transfers.probe(ref.incarnation)
        except TimeoutError:
            await self.transfers.disconnect(ref.incarnation)
            raise TransferFailed(f"{ref.worker_id} let no block be read within {timeout_s:g} s") from None
        except BaseException:
            await self.transfers.disconnect(ref.incarnation)
            raise

    async def _measure(self, peer: Peer) -> None:
        try:
            async with asyncio.timeout(self._kv.connect_timeout_s):
                stats = await self.transfers.measure(peer.incarnation)
        except (TransferFailed, TimeoutError) as error:
            log.warning("peer can not be read from", peer=peer.worker_id, error=str(error))
            await self.drop(peer.incarnation)
            return
        self.on_measured(worker_pb2.Link(worker_id=peer.worker_id, bytes=stats.bytes, seconds=stats.seconds))

    def _parts(self, introduction: kv_pb2.HandshakeRequest | kv_pb2.HandshakeResponse) -> list[list[Part]]:
        """By rank of ours: of each rank of the peer that it reads from. Raises LayoutMismatch."""
        theirs = KvLayout.from_proto(introduction.layout)
        slices = [pairing(replace(self.layout, tp_rank=rank), theirs) for rank in range(self.layout.tp_size)]
        if len(introduction.transport_metadata) != theirs.tp_size:
            raise TransferFailed(
                f"{introduction.self.worker_id} has {theirs.tp_size} ranks and sent the transport metadata of"
                f" {len(introduction.transport_metadata)}"
            )
        metadata = introduction.transport_metadata
        return [[Part(metadata[piece.owner_rank], piece) for piece in of_rank] for of_rank in slices]

    def _carrier(self, introduction: kv_pb2.HandshakeRequest | kv_pb2.HandshakeResponse) -> Carrier:
        """What will carry the bytes. Raises LayoutMismatch where it would be TCP and must not."""
        theirs = Host.from_proto(introduction.host)
        carrier = carrier_between(self._host, theirs, self.layout.transport)
        if self._kv.require_rdma and carrier.transport == "tcp":
            raise LayoutMismatch(
                "rdma_devices",
                self._host.described(),
                theirs.described(),
                "kv.require_rdma asks for a kind of link that both have, or for one host",
            )
        return carrier

    def _compared(
        self, worker_id: str, introduction: kv_pb2.HandshakeRequest | kv_pb2.HandshakeResponse
    ) -> tuple[list[list[Part]], Carrier]:
        """What is read of the peer, and over what. Raises LayoutMismatch, remembered while the worker lives."""
        try:
            found = self._parts(introduction), self._carrier(introduction)
        except LayoutMismatch as mismatch:
            self._refusals[worker_id] = mismatch
            raise
        self._refusals.pop(worker_id, None)
        return found

    async def _replace_incarnation(self, worker_id: str, incarnation: str) -> None:
        old = self._incarnations.get(worker_id)
        self._incarnations[worker_id] = incarnation
        if old is not None and old != incarnation:
            log.info("peer restarted", peer=worker_id, old=old, new=incarnation)
            await self.drop(old)

    def _is_in_touch(self, incarnation: str) -> bool:
        """Whether the peer answers, or is being asked."""
        task = self._opening.get(incarnation)
        if task is None or not _is_open(task):
            return task is not None
        return task.result().channel.get_state() == grpc.ChannelConnectivity.READY

    def _forget_failed(self, incarnation: str, task: asyncio.Task[Peer]) -> None:
        if task.cancelled() or task.exception() is not None:
            if self._opening.get(incarnation) is task:
                del self._opening[incarnation]
            if not task.cancelled():
                error = task.exception()
                known = isinstance(error, HeadraceError)
                log.warning(
                    "handshake failed",
                    incarnation=incarnation,
                    error=str(error),
                    exc_info=None if known else error,
                )


def _is_open(task: asyncio.Task[Peer]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
