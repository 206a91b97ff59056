"""A reader of two ranks, one of them asked over a socket, and an owner of one: bytes, failures, the end of a rank."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import numpy as np
import pytest

from headrace.errors import TransferFailed
from kv_transfer import rank_transfers
from kv_transfer.faulty_transport import Faults, FaultyTransport
from kv_transfer.layout import KvLayout
from kv_transfer.local_transport import LocalFabric, LocalTransport
from kv_transfer.rank_transfers import RemoteRank
from kv_transfer.slices import pairing
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transfers import Transfers
from kv_transfer.transport import BlockRegion, Part

TIMEOUT_S = 20.0
NUM_BLOCKS = 6
LAYOUT = KvLayout(
    model_fingerprint="abc",
    num_layers=3,
    num_kv_heads=4,
    head_dim=4,
    dtype="float32",
    row_bytes=16,
    block_size_tokens=2,
    transport="local",
)


class Rank:
    """A transport around blocks of its own, the last of which is scratch."""

    def __init__(self, name: str, fabric: LocalFabric, block_bytes: int) -> None:
        self.blocks = np.random.default_rng(len(name)).integers(
            0, 256, (NUM_BLOCKS + 1, block_bytes), dtype=np.uint8
        )
        region = BlockRegion(self.blocks.ctypes.data, NUM_BLOCKS, block_bytes, num_scratch=1)
        self.faults = Faults()
        self.transfers = TransferThread(
            lambda: FaultyTransport(LocalTransport(name, [region], fabric), self.faults)
        )


class Readers:
    """Both ranks of the reader, and its owner, which are connected."""

    def __init__(self) -> None:
        fabric = LocalFabric()
        self.owner = Rank("owner", fabric, LAYOUT.block_bytes)
        layouts = [replace(LAYOUT, tp_size=2, tp_rank=rank) for rank in range(2)]
        self.ranks = [Rank(f"reader/{n}", fabric, layout.block_bytes) for n, layout in enumerate(layouts)]
        self.slices = [pairing(layout, LAYOUT) for layout in layouts]
        self.gone = asyncio.Event()

    async def __aenter__(self) -> Readers:
        for rank in (self.owner, *self.ranks):
            await rank.transfers.start()
        ours, theirs = socket.socketpair()
        checksums = lambda block_ids: [10 + block_id for block_id in block_ids]  # noqa: E731
        self.serving = asyncio.create_task(rank_transfers.serve(theirs, self.ranks[1].transfers, checksums))
        self.remote = await RemoteRank.open(ours, self.gone.set)
        self.transfers = Transfers(self.ranks[0].transfers, [self.remote])
        metadata = await self.owner.transfers.metadata()
        parts = [[Part(metadata, piece) for piece in slices] for slices in self.slices]
        await self.transfers.connect("owner", parts, TIMEOUT_S)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.remote.close()
        await asyncio.gather(self.serving, return_exceptions=True)
        for rank in (self.owner, *self.ranks):
            await rank.transfers.close()

    def expected(self, rank: int) -> np.ndarray:
        """The owner's blocks as the rank has them."""
        planes = self.owner.blocks.reshape(NUM_BLOCKS + 1, 2 * LAYOUT.num_layers, LAYOUT.num_kv_heads, -1)
        heads = replace(LAYOUT, tp_size=2, tp_rank=rank).heads
        return planes[:, :, heads.start : heads.stop].reshape(NUM_BLOCKS + 1, -1)


async def soon(awaitable):
    async with asyncio.timeout(TIMEOUT_S):
        return await awaitable


async def test_each_rank_reads_its_own_slices():
    async with Readers() as readers:
        assert await readers.transfers.metadata() == [
            await rank.transfers.metadata() for rank in readers.ranks
        ]
        probe = await soon(readers.transfers.probe("owner"))
        assert probe.bytes_per_s == pytest.approx(LAYOUT.block_bytes / probe.latency_s)
        stats = await soon(readers.transfers.read("owner", [4, 0, 5], [1, 3, 2]).done)
        assert stats.bytes == 3 * LAYOUT.block_bytes
        assert readers.transfers.bytes_per_s("owner") > 0
        for number, rank in enumerate(readers.ranks):
            assert np.array_equal(rank.blocks[[1, 3, 2]], readers.expected(number)[[4, 0, 5]])
        assert await readers.remote.checksums([3, 1]) == [13, 11]
        await readers.transfers.disconnect("owner")
        assert readers.transfers.bytes_per_s("owner") == 0


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_read_that_fails_at_one_rank_fails_and_is_over_when_the_other_is(rank):
    async with Readers() as readers:
        readers.ranks[rank].faults.fail_next = 1
        readers.ranks[1 - rank].faults.stall = True
        transfer = readers.transfers.read("owner", [1], [1])
        with pytest.raises(TransferFailed, match="injected"):
            await soon(asyncio.shield(transfer.done))
        settled = asyncio.create_task(transfer.settled())
        await readers.transfers.metadata()  # a round through both ranks' threads
        assert not settled.done()
        await readers.transfers.disconnect("owner")
        await soon(settled)


async def test_what_a_rank_refuses_is_said():
    async with Readers() as readers:
        with pytest.raises(TransferFailed, match="sent the metadata of owner"):
            await soon(
                readers.remote.connect(
                    "another",
                    [Part(await readers.owner.transfers.metadata(), readers.slices[1][0])],
                    TIMEOUT_S,
                )
            )


async def test_nobody_waits_for_a_rank_that_is_gone():
    async with Readers() as readers:
        readers.ranks[1].faults.stall = True
        transfer = readers.transfers.read("owner", [1], [1])
        await readers.transfers.metadata()
        readers.serving.cancel()
        await asyncio.gather(readers.serving, return_exceptions=True)
        with pytest.raises(TransferFailed, match="rank of this worker is gone"):
            await soon(transfer.done)
        await soon(transfer.settled())
        await soon(readers.gone.wait())
        with pytest.raises(TransferFailed, match="gone"):
            await readers.transfers.metadata()
        assert readers.transfers.bytes_per_s("owner") == 0
        readers.transfers.serve_for(1.0)
