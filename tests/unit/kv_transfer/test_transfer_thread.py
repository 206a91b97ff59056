"""The thread between the event loop and the transport, over the in-process transport with faults."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np
import pytest

from headrace.errors import TransferFailed, Unavailable
from kv_transfer.faulty_transport import Faults, FaultyTransport
from kv_transfer.local_transport import LocalFabric, LocalTransport
from kv_transfer.transfer_thread import TransferStats, TransferThread
from kv_transfer.transport import BlockRegion
from tests.support.parts import part

SIZE = NUM_BLOCKS, BLOCK_BYTES = 8, 256
TIMEOUT_S = 20.0


class Worker:
    """Blocks and their transfer thread; faults apply to its own READs."""

    def __init__(self, name: str, fabric: LocalFabric) -> None:
        self.name = name
        self.faults = Faults()
        self.memory = np.full((NUM_BLOCKS + 1, BLOCK_BYTES), len(name), np.uint8)
        self.blocks = self.memory[:NUM_BLOCKS]
        # The last row is scratch.
        region = BlockRegion(self.blocks.ctypes.data, NUM_BLOCKS, BLOCK_BYTES, num_scratch=1)

        def factory():
            self.created_on = threading.current_thread()
            return FaultyTransport(LocalTransport(name, [region], fabric), self.faults)

        self.transfers = TransferThread(factory)

    async def connect(self, other: Worker) -> None:
        await self.transfers.connect(
            other.name, [part(await other.transfers.metadata(), BLOCK_BYTES)], TIMEOUT_S
        )


@pytest.fixture
async def start():
    fabric, workers = LocalFabric(), []

    async def run(name: str) -> Worker:
        workers.append(Worker(name, fabric))
        await workers[-1].transfers.start()
        return workers[-1]

    yield run
    for worker in workers:
        await worker.transfers.close()


@pytest.fixture
async def pair(start):
    reader, owner = await start("d"), await start("owner")
    await reader.connect(owner)
    return reader, owner


async def soon(awaitable):
    return await asyncio.wait_for(awaitable, TIMEOUT_S)


def is_settled(transfer) -> bool:
    coroutine = transfer.settled()
    try:
        coroutine.send(None)
    except StopIteration:
        return True
    finally:
        coroutine.close()
    return False


async def passed(thread: TransferThread) -> None:
    """The thread has looked at everything at least once more."""
    for _ in range(2):
        await soon(thread.metadata())


async def test_the_transport_lives_on_a_thread_of_its_own(pair):
    reader, _ = pair
    assert reader.created_on is not threading.main_thread()
    assert reader.created_on.daemon


async def test_a_read_brings_the_bytes_and_refines_the_rate(pair):
    reader, _ = pair
    assert reader.transfers.bytes_per_s("owner") == 0
    transfer = reader.transfers.read("owner", [1, 2], [5, 3])
    stats = await soon(transfer.done)
    assert isinstance(stats, TransferStats)
    assert stats.bytes == 2 * BLOCK_BYTES
    await soon(transfer.settled())
    assert [row[0] for row in reader.blocks] == [1, 1, 1, 5, 1, 5, 1, 1]
    assert reader.transfers.bytes_per_s("owner") == pytest.approx(stats.bytes / stats.seconds)


async def test_many_reads_at_once(pair):
    reader, owner = pair
    owner.blocks[:] = np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None]
    transfers = [reader.transfers.read("owner", [i], [NUM_BLOCKS - 1 - i]) for i in range(NUM_BLOCKS)]
    await soon(asyncio.gather(*(transfer.done for transfer in transfers)))
    assert list(reader.blocks[:, 0]) == list(range(NUM_BLOCKS))[::-1]


async def test_a_failing_read_fails_alone(pair):
    reader, _ = pair
    reader.faults.fail_next = 1
    failing = reader.transfers.read("owner", [1], [1])
    good = reader.transfers.read("owner", [2], [2])
    with pytest.raises(TransferFailed, match="injected"):
        await soon(failing.done)
    await soon(failing.settled())
    await soon(good.done)


@pytest.mark.parametrize(("remote", "local"), [([NUM_BLOCKS], [0]), ([0], [-1])])
async def test_ids_out_of_range_fail_and_settle(pair, remote, local):
    reader, _ = pair
    transfer = reader.transfers.read("owner", remote, local)
    with pytest.raises(TransferFailed, match="does not exist"):
        await soon(transfer.done)
    await soon(transfer.settled())


async def test_a_failure_that_nobody_awaits_makes_no_noise(pair):
    reader, _ = pair
    noise = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
    reader.faults.fail_next = 1
    await soon(reader.transfers.read("owner", [1], [1]).settled())
    gc.collect()
    await asyncio.sleep(0)
    assert not noise


async def test_a_stalled_read_is_unsettled_and_writes_late(pair):
    reader, _ = pair
    reader.faults.stall = True
    transfer = reader.transfers.read("owner", [1], [1])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(transfer.done), 0.01)
    await passed(reader.transfers)
    assert not is_settled(transfer)
    assert (reader.blocks == 1).all()
    reader.faults.stall = False
    await soon(transfer.settled())
    assert (reader.blocks[1] == 5).all()


async def test_a_read_that_was_cancelled_still_settles_by_its_bytes(pair):
    reader, _ = pair
    reader.faults.stall = True
    transfer = reader.transfers.read("owner", [1], [1])
    transfer.done.cancel()
    await passed(reader.transfers)
    assert not is_settled(transfer)
    reader.faults.stall = False
    await soon(transfer.settled())
    assert (reader.blocks[1] == 5).all()


async def test_a_disconnect_ends_stalled_reads_of_that_peer_only(pair, start):
    reader, _ = pair
    other = await start("second")
    await reader.connect(other)
    reader.faults.stall = True
    torn, kept = (reader.transfers.read(peer, [1], [i]) for i, peer in enumerate(["owner", "second"]))
    await soon(reader.transfers.disconnect("owner"))
    with pytest.raises(TransferFailed, match="owner was disconnected"):
        await soon(torn.done)
    await soon(torn.settled())
    assert not is_settled(kept)
    reader.faults.stall = False
    await soon(kept.done)
    assert [row[0] for row in reader.blocks[:2]] == [1, 6]  # nothing came late


async def test_a_read_after_a_disconnect_fails(pair):
    reader, owner = pair
    await soon(reader.transfers.disconnect("owner"))
    with pytest.raises(TransferFailed, match="not connected"):
        await soon(reader.transfers.read("owner", [1], [1]).done)
    await reader.connect(owner)
    await soon(reader.transfers.read("owner", [1], [1]).done)


async def test_a_disconnect_of_a_stranger_does_nothing(pair):
    await soon(pair[0].transfers.disconnect("stranger"))


async def test_a_refused_connection_says_why(pair):
    with pytest.raises(TransferFailed, match="not of this transport"):
        await pair[0].transfers.connect("other", [part(b"?", BLOCK_BYTES)], TIMEOUT_S)


async def test_a_connection_in_vain_ends_by_its_deadline(pair):
    reader, _ = pair
    release = threading.Event()
    hold = asyncio.create_task(reader.transfers._call(lambda: release.wait(TIMEOUT_S), TIMEOUT_S))
    await asyncio.sleep(0)
    with pytest.raises(TransferFailed, match=r"within 0\.01 s"):
        await reader.transfers.connect("other", [], 0.01)
    release.set()
    await hold
    with pytest.raises(TransferFailed, match="not connected"):  # it was not made later either
        await soon(reader.transfers.read("other", [0], [0]).done)


async def test_closing_ends_reads_and_the_thread(pair):
    reader, _ = pair
    reader.faults.stall = True
    transfer = reader.transfers.read("owner", [1], [1])
    queued = reader.transfers.read("owner", [2], [2])
    await soon(reader.transfers.close())
    assert not reader.created_on.is_alive()
    for each in (transfer, queued):
        with pytest.raises(TransferFailed, match="closed"):
            await soon(each.done)
        await soon(each.settled())
    reader.faults.stall = False
    assert (reader.blocks == 1).all()


async def test_a_closed_thread_refuses_and_closes_again(pair):
    reader, _ = pair
    await soon(reader.transfers.close())
    await soon(reader.transfers.close())
    with pytest.raises(Unavailable, match="closed"):
        await reader.transfers.metadata()
    transfer = reader.transfers.read("owner", [1], [1])
    with pytest.raises(TransferFailed, match="closed"):
        await transfer.done
    await soon(transfer.settled())


async def test_starting_raises_what_the_factory_raised():
    def factory():
        raise RuntimeError("no such device")

    transfers = TransferThread(factory)
    with pytest.raises(RuntimeError, match="no such device"):
        await transfers.start()
    await soon(transfers.close())


class Breaking:
    """A transport whose every call raises what a transport should not, once told to."""

    name = "breaking"
    regions = (BlockRegion(0, NUM_BLOCKS, BLOCK_BYTES),)

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.calls: list[str] = []

    def __getattr__(self, method):
        def call(*_):
            self.calls.append(method)
            if method in self.broken:
                raise OSError(f"{method} broke")
            return self

        return call


@pytest.fixture
async def breaking():
    transport = Breaking()
    transfers = TransferThread(lambda: transport)
    await transfers.start()
    await transfers.connect("owner", [], TIMEOUT_S)
    yield transport, transfers
    await transfers.close()


@pytest.mark.parametrize("method", ["read", "poll"])
async def test_an_unforeseen_failure_of_a_read_tears_the_peer_down_before_it_settles(breaking, method):
    transport, transfers = breaking
    transport.broken = {method}
    transfer = transfers.read("owner", [1], [1])
    with pytest.raises(TransferFailed, match=f"{method} broke"):
        await soon(transfer.done)
    assert "disconnect" in transport.calls
    transport.broken = set()
    await soon(transfers.read("owner", [1], [1]).done)


async def test_the_rate_of_a_peer_is_that_of_its_connection(pair):
    reader, owner = pair
    await soon(reader.transfers.read("owner", [1], [1]).done)
    measured = reader.transfers.bytes_per_s("owner")
    await reader.connect(owner)  # a handshake in the other direction
    assert reader.transfers.bytes_per_s("owner") == measured > 0
    await soon(reader.transfers.disconnect("owner"))
    assert reader.transfers.bytes_per_s("owner") == 0


async def test_a_thread_that_fails_closes_the_transport_and_ends_everything(breaking):
    transport, transfers = breaking
    transport.broken = {"progress"}
    transfer = transfers.read("owner", [1], [1])
    with pytest.raises(TransferFailed, match="closed"):
        await soon(transfer.done)
    await soon(transfer.settled())
    assert "close" in transport.calls
    with pytest.raises(Unavailable):
        await transfers.metadata()


async def test_a_reader_is_looked_after_by_an_owner_that_reads_from_nobody(breaking):
    """It gave up reading from the peer; the peer's lease goes on."""
    transport, transfers = breaking
    await soon(transfers.disconnect("owner"))
    transport.calls.clear()
    transfers.serve_for(TIMEOUT_S)
    async with asyncio.timeout(TIMEOUT_S):
        while "progress" not in transport.calls:
            await asyncio.sleep(0.01)
