"""The handshake between two workers, over real gRPC and the in-process transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import numpy as np
import pytest

from headrace.config import KvSettings, RpcSettings
from headrace.errors import LayoutMismatch, PeerError, TransferFailed
from headrace.rpc.server import RpcServer
from headrace.rpc.status import errors_of
from headrace.rpc.v1 import kv_pb2, kv_pb2_grpc, worker_pb2
from kv_transfer.carrier import Host, RdmaDevice
from kv_transfer.faulty_transport import Faults, FaultyTransport
from kv_transfer.layout import KvLayout
from kv_transfer.local_transport import LocalFabric, LocalTransport
from kv_transfer.peers import Peers
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transfers import Transfers
from kv_transfer.transport import BlockRegion

TIMEOUT_S = 20.0
NUM_BLOCKS = 3
LAYOUT = KvLayout(
    model_fingerprint="abc",
    num_layers=2,
    num_kv_heads=4,
    head_dim=4,
    dtype="float32",
    row_bytes=16,
    block_size_tokens=2,
    transport="local",
)
NIXL = replace(LAYOUT, transport="nixl")  # what the layouts say; the bytes go the same way
HOST = Host("boot-a", "pid:[1]", shared_memory=True, tcp_device="eth0")


class Worker(kv_pb2_grpc.KvExchangeServicer):
    """One side: its blocks, transfers, peers and server. The last block is scratch."""

    def __init__(self, name: str, fabric: LocalFabric, layout: KvLayout, kv: KvSettings, host: Host) -> None:
        self.faults = Faults(include_probes=True)
        self.blocks = np.full((NUM_BLOCKS + 1, layout.block_bytes), len(name), np.uint8)
        region = BlockRegion(self.blocks.ctypes.data, NUM_BLOCKS, layout.block_bytes, num_scratch=1)
        self.transfers = TransferThread(
            lambda: FaultyTransport(LocalTransport(name, [region], fabric), self.faults)
        )
        self.ref = worker_pb2.PeerRef(worker_id=f"worker {name}", incarnation=name)
        rpc = RpcSettings()
        self.peers = Peers(self.ref, layout, Transfers(self.transfers), kv, rpc, host)
        self.server = RpcServer(rpc, [])
        kv_pb2_grpc.add_KvExchangeServicer_to_server(self, self.server.grpc_server)

    async def Handshake(self, request, context) -> kv_pb2.HandshakeResponse:
        return await self.peers.accept(request)

    async def start(self) -> None:
        await self.transfers.start()
        self.ref.address = await self.server.start()

    async def stop(self) -> None:
        await self.peers.close()
        await self.server.stop(0)
        await self.transfers.close()


@asynccontextmanager
async def started(layouts=(LAYOUT, LAYOUT), hosts=(HOST, HOST), **kv) -> AsyncIterator[list[Worker]]:
    """A reader and an owner; `kv` are settings of both."""
    fabric, settings = LocalFabric(), KvSettings(**kv)
    workers = [
        Worker(name, fabric, layout, settings, host)
        for name, layout, host in zip(["d", "owner"], layouts, hosts, strict=True)
    ]
    try:
        for worker in workers:
            await worker.start()
        yield workers
    finally:
        for worker in workers:
            await worker.stop()


async def test_a_handshake_measures_the_way_and_touches_scratch_only():
    async with started() as [reader, owner], asyncio.timeout(TIMEOUT_S):
        peer = await reader.peers.connect(owner.ref)
        assert str(peer.carrier) == "local memory"
        assert peer.probe.latency_s > 0
        assert peer.probe.bytes_per_s == pytest.approx(LAYOUT.block_bytes / peer.probe.latency_s)
        assert [row[0] for row in reader.blocks] == [1] * NUM_BLOCKS + [5]
        assert reader.transfers.bytes_per_s("owner") > 0


async def test_a_peer_that_stalls_in_the_probe_fails_the_handshake_and_can_be_tried_again():
    async with started(connect_timeout_s=0.3) as [reader, owner], asyncio.timeout(TIMEOUT_S):
        reader.faults.stall = True
        with pytest.raises(TransferFailed, match=r"worker owner let no block be read within 0\.3 s"):
            await reader.peers.connect(owner.ref)
        reader.faults.stall = False
        with pytest.raises(TransferFailed, match="not connected"):
            await reader.transfers.read("owner", [0], [0]).done
        assert (reader.blocks[-1] == 1).all()
        await reader.peers.connect(owner.ref)


async def test_a_probe_that_fails_fails_the_handshake():
    async with started() as [reader, owner], asyncio.timeout(TIMEOUT_S):
        reader.faults.fail_next = 1
        with pytest.raises(TransferFailed, match="injected"):
            await reader.peers.connect(owner.ref)
        await reader.peers.connect(owner.ref)


@pytest.mark.parametrize("theirs", [replace(LAYOUT, tp_size=6), replace(LAYOUT, dtype="bfloat16")])
async def test_unsupported_pairings_are_refused_naming_the_field(theirs):
    async with started(layouts=(LAYOUT, theirs)) as [reader, owner], asyncio.timeout(TIMEOUT_S):
        field = "tp_size" if theirs.tp_size == 6 else "dtype"
        with pytest.raises((LayoutMismatch, PeerError), match=f"KV layout mismatch in {field}"):
            await reader.peers.connect(owner.ref)
        assert not (reader.transfers._peers or owner.transfers._peers)


async def test_a_peer_that_lacks_the_metadata_of_a_rank_is_refused():
    request = kv_pb2.HandshakeRequest(
        expected_incarnation="owner", layout=replace(LAYOUT, tp_size=2).to_proto(), transport_metadata=[b"1"]
    )
    request.self.worker_id = "x"
    async with started() as [_, owner], grpc.aio.insecure_channel(owner.ref.address) as channel:
        with (
            pytest.raises(PeerError, match="x has 2 ranks and sent the transport metadata of 1"),
            errors_of("o"),
        ):
            await kv_pb2_grpc.KvExchangeStub(channel).Handshake(request, timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("theirs", "refused"),
    [
        (HOST, False),  # one host
        (replace(HOST, boot_id="boot-b"), True),
        (replace(HOST, boot_id="boot-b", rdma_devices=(RdmaDevice("mlx5_7", "Ethernet"),)), True),
        (replace(HOST, boot_id="boot-b", rdma_devices=(RdmaDevice("mlx5_7", "InfiniBand"),)), False),
    ],
)
async def test_where_rdma_is_required_a_peer_without_is_refused(theirs, refused):
    ours = replace(HOST, rdma_devices=(RdmaDevice("mlx5_0", "InfiniBand"),))
    async with (
        started(layouts=(NIXL, NIXL), hosts=(ours, theirs), require_rdma=True) as [reader, owner],
        asyncio.timeout(TIMEOUT_S),
    ):
        if not refused:
            await reader.peers.connect(owner.ref)
            return
        with pytest.raises((LayoutMismatch, PeerError), match=r"rdma_devices.*kv\.require_rdma"):
            await reader.peers.connect(owner.ref)
        assert not (reader.transfers._peers or owner.transfers._peers)


async def test_without_the_requirement_tcp_will_do():
    hosts = (HOST, replace(HOST, boot_id="boot-b"))
    async with (
        started(layouts=(NIXL, NIXL), hosts=hosts) as [reader, owner],
        asyncio.timeout(TIMEOUT_S),
    ):
        assert str((await reader.peers.connect(owner.ref)).carrier) == "tcp eth0"


async def test_a_peer_that_is_gone_is_forgotten_and_one_that_answers_is_not():
    """Workers come and go for months; and a directory that lost its data knows nobody for a while."""
    async with started() as [reader, owner], asyncio.timeout(TIMEOUT_S):
        peer = await reader.peers.connect(owner.ref)
        await reader.peers.forget_absent(set())
        await owner.peers.forget_absent(set())
        await reader.transfers.read("owner", [0], [0]).done
        assert await reader.peers.connect(owner.ref) is peer
        await owner.server.stop(0)
        while reader.peers.statuses():
            await reader.peers.forget_absent(set())
            await asyncio.sleep(0.01)
        with pytest.raises(TransferFailed, match="not connected"):
            await reader.transfers.read("owner", [0], [0]).done


async def test_a_way_that_nobody_uses_is_measured_and_told():
    async with started() as [reader, owner], asyncio.timeout(TIMEOUT_S):
        told: list[worker_pb2.Link] = []
        reader.peers.on_measured = told.append
        await reader.peers.connect(owner.ref)
        await reader.peers.measure_unused(60.0)
        assert told == []  # the handshake has just read from it
        await reader.peers.measure_unused(0.0)
        [link] = told
        assert link.worker_id == "worker owner"
        assert link.bytes >= LAYOUT.block_bytes
        assert link.seconds > 0
        assert [row[0] for row in reader.blocks] == [1] * NUM_BLOCKS + [5]  # scratch alone


async def test_a_way_in_use_is_not_measured():
    async with started() as [reader, owner], asyncio.timeout(TIMEOUT_S):
        told: list[worker_pb2.Link] = []
        reader.peers.on_measured = told.append
        await reader.peers.connect(owner.ref)
        reader.faults.stall = True
        reader.transfers.read("owner", [0], [0])
        await reader.transfers.metadata()  # the READ is under way
        await reader.peers.measure_unused(0.0)
        assert told == []


async def test_a_peer_that_can_not_be_read_from_any_more_is_dropped():
    async with started(connect_timeout_s=0.3) as [reader, owner], asyncio.timeout(TIMEOUT_S):
        await reader.peers.connect(owner.ref)
        reader.faults.stall = True
        await reader.peers.measure_unused(0.0)
        assert reader.peers.statuses() == []
        reader.faults.stall = False
        await reader.peers.connect(owner.ref)
