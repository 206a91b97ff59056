"""Real processes over NIXL that die or stop in the middle of READs: what fails, what waits, and what never comes late.

READs stall in two ways: over TCP, where the owner sends each byte, and over whatever UCX takes (CMA here, which copies
by itself) as long as the connection is not made yet.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.errors import TransferFailed
from kv_transfer.nixl_transport import ucx_environment
from tests.fault.nixl_reader import NixlReader
from tests.support.nodes import network

pytestmark = pytest.mark.slow

PEER_PROGRAM = Path(__file__).with_name("nixl_peer.py")
ROOT = PEER_PROGRAM.parents[2]
NUM_BLOCKS = 32
BLOCK_BYTES = 512 * 1024
ALL = range(NUM_BLOCKS)
TIMEOUT_S = 30.0
STAND_STILL_S = 4.5  # more than an owner takes for a moment
OVER_TCP = "tcp,self"
OVER_ANYTHING = "all"


class PeerProcess:
    """`tests/fault/nixl_peer.py`. Its blocks hold `value`."""

    def __init__(
        self, name: str, value: int, *, read_from: str = "", prefix: Sequence[str] = (), **environment: str
    ) -> None:
        self.name = name
        arguments = [name, str(value), str(NUM_BLOCKS), str(BLOCK_BYTES), *([read_from] if read_from else [])]
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, str(PEER_PROGRAM), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )

    async def line(self) -> str:
        return (await asyncio.wait_for(asyncio.to_thread(self.popen.stdout.readline), TIMEOUT_S)).strip()

    async def metadata(self) -> bytes:
        return bytes.fromhex(await self.line())

    def write(self, line: str) -> None:
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    async def runs(self) -> bool:
        """Whether it does something again; False if it ended instead."""
        try:
            self.write("ping")
        except BrokenPipeError:
            return False
        return (await self.line()).startswith("ping")

    def send(self, signum: signal.Signals) -> None:
        self.popen.send_signal(signum)
        if signum == signal.SIGSTOP:
            os.waitpid(self.popen.pid, os.WUNTRACED)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait(TIMEOUT_S)
        self.popen.stdin.close()
        self.popen.stdout.close()


@pytest.fixture
def start_peer():
    with ExitStack() as stack:

        def start(name: str, value: int, **options) -> PeerProcess:
            peer = PeerProcess(name, value, **options)
            stack.callback(peer.end)
            return peer

        yield start


@pytest.fixture(params=[OVER_TCP, OVER_ANYTHING])
def ucx_transports(request, monkeypatch) -> str:
    for name, value in {**ucx_environment(), "UCX_TLS": request.param}.items():
        monkeypatch.setenv(name, value)
    return request.param


@pytest.fixture(scope="module")
def readers() -> Iterator[dict[str, NixlReader]]:
    """By what UCX takes: it looks at that once per process."""
    readers: dict[str, NixlReader] = {}
    yield readers
    for reader in readers.values():
        reader.kill()


@pytest.fixture
async def reader(ucx_transports, readers) -> NixlReader:
    if ucx_transports not in readers or not readers[ucx_transports].is_alive:
        readers[ucx_transports] = NixlReader(2 * NUM_BLOCKS, BLOCK_BYTES)
    reader = readers[ucx_transports]
    await reader.begin()
    return reader


async def connect(reader: NixlReader, peer: PeerProcess) -> None:
    peer.write((await reader.connect(peer.name, await peer.metadata())).hex())


async def read_one(reader: NixlReader, peer: PeerProcess, local: int = 0) -> int:
    """The value that the peer's blocks hold. Makes the connection, if it is the first READ."""
    await reader.done(await reader.read(peer.name, [0], [local]))
    [value] = await reader.values([local])
    return value


async def stall(reader: NixlReader, peer: PeerProcess, over: str) -> int:
    """A READ of all blocks from a peer that is stopped."""
    if over == OVER_TCP:
        await read_one(reader, peer)
    peer.send(signal.SIGSTOP)
    await reader.clear()
    return await reader.read(peer.name, ALL, ALL)


async def assert_failed(reader: NixlReader, transfer: int) -> None:
    with pytest.raises(TransferFailed, match=r"^(?!unexpected)"):
        await reader.done(transfer)
    await reader.settled(transfer)


async def test_a_killed_peer_fails_the_next_read(reader, start_peer):
    peers = [start_peer(f"p{number}", 7) for number in range(3)]
    for peer in peers:
        await connect(reader, peer)
        assert await read_one(reader, peer) == 7
        peer.popen.kill()
        peer.popen.wait(TIMEOUT_S)
        for _ in range(2):
            await assert_failed(reader, await reader.read(peer.name, ALL, ALL))


async def test_a_peer_killed_before_the_first_read_fails_it(reader, start_peer):
    peer = start_peer("p", 7)
    await connect(reader, peer)
    peer.popen.kill()
    peer.popen.wait(TIMEOUT_S)
    await assert_failed(reader, await reader.read("p", ALL, ALL))
    assert await reader.values(ALL) == {0}


async def test_a_peer_killed_in_the_middle_fails_its_reads_and_no_others(reader, ucx_transports, start_peer):
    peer, other = start_peer("p", 7), start_peer("q", 9)
    await connect(reader, peer)
    await connect(reader, other)
    transfers = [await stall(reader, peer, ucx_transports)]
    transfers.append(await reader.read("p", [1], [1]))
    assert await reader.is_under_way(transfers[0])
    peer.popen.kill()
    for transfer in transfers:
        await assert_failed(reader, transfer)
    assert await read_one(reader, other) == 9


async def test_a_restarted_peer_is_read_under_its_new_incarnation(reader, start_peer):
    peer = start_peer("p-1", 7)
    await connect(reader, peer)
    assert await read_one(reader, peer) == 7
    peer.popen.kill()
    peer.popen.wait(TIMEOUT_S)
    successor = start_peer("p-2", 8)
    await reader.disconnect("p-1")
    await connect(reader, successor)
    assert await read_one(reader, successor) == 8


async def test_a_stopped_peer_keeps_its_reads_unsettled_and_nobody_else_waiting(
    reader, ucx_transports, start_peer
):
    peer, other = start_peer("p", 7), start_peer("q", 9)
    await connect(reader, peer)
    await connect(reader, other)
    stalled = await stall(reader, peer, ucx_transports)
    assert await read_one(reader, other, local=NUM_BLOCKS) == 9
    assert await reader.is_under_way(stalled)
    peer.send(signal.SIGCONT)
    assert await reader.done(stalled) == NUM_BLOCKS * BLOCK_BYTES
    await reader.settled(stalled)
    assert await reader.values(ALL) == {7}


async def test_after_a_disconnect_a_peer_that_wakes_up_writes_nothing(reader, ucx_transports, start_peer):
    """NIXL alone does not keep this promise: neither removing the agent nor releasing the handle stops the bytes."""
    peer, other = start_peer("p", 7), start_peer("q", 9)
    await connect(reader, peer)
    await connect(reader, other)
    stalled = await stall(reader, peer, ucx_transports)
    assert await reader.is_under_way(stalled)
    await reader.disconnect("p")
    await assert_failed(reader, stalled)
    await reader.clear()
    peer.send(signal.SIGCONT)
    # Over TCP, UCX 1.x ends a process that sends READ bytes to somebody who is gone.
    assert await peer.runs() or ucx_transports == OVER_TCP
    for local in range(NUM_BLOCKS, 2 * NUM_BLOCKS):  # gives late bytes every chance
        assert await read_one(reader, other, local) == 9
    assert await reader.values(ALL) == {0}


@pytest.mark.parametrize("ucx_transports", [OVER_TCP], indirect=True)
async def test_an_owner_that_stood_still_for_long_outlives_readers_that_gave_it_up(reader, start_peer):
    """UCX would end it at the first request that it looks at: it looks at none of them."""
    peer, other = start_peer("p", 7), start_peer("q", 9)
    await connect(reader, peer)
    await connect(reader, other)
    stalled = await stall(reader, peer, OVER_TCP)
    stopped_at = time.monotonic()
    while time.monotonic() < stopped_at + STAND_STILL_S:
        assert await read_one(reader, other, local=NUM_BLOCKS) == 9
    assert await reader.is_under_way(stalled)
    await reader.disconnect("p")
    await assert_failed(reader, stalled)
    peer.send(signal.SIGCONT)
    assert await peer.runs()
    peer.write("metadata")
    await reader.connect("p", await peer.metadata())
    assert await read_one(reader, peer) == 7


async def test_a_disconnect_leaves_stalled_reads_from_others_under_way(reader, ucx_transports, start_peer):
    peer, other = start_peer("p", 7), start_peer("q", 9)
    await connect(reader, peer)
    await connect(reader, other)
    torn = await stall(reader, peer, ucx_transports)
    kept = await stall(reader, other, ucx_transports)
    assert await reader.is_under_way(torn)
    await reader.disconnect("p")
    await assert_failed(reader, torn)
    assert await reader.is_under_way(kept)
    other.send(signal.SIGCONT)
    await reader.done(kept)
    assert await reader.values(ALL) == {9}


@pytest.mark.parametrize(
    "ucx_transports", [OVER_ANYTHING], indirect=True
)  # over TCP, UCX may end the owner too
async def test_an_owner_outlives_readers_that_are_killed(reader, start_peer):
    owner = start_peer("p", 7)
    metadata = await owner.metadata()
    greedy = start_peer("greedy", 0, read_from="p")
    await greedy.metadata()
    greedy.write(metadata.hex())
    owner.write((await reader.metadata()).hex())
    greedy.write("reads")
    while int((await greedy.line()).split()[1]) < 3:
        greedy.write("reads")
    greedy.popen.kill()
    assert await owner.runs()
    await reader.connect("p", metadata)
    assert await read_one(reader, owner) == 7


async def counts(peer: PeerProcess) -> tuple[int, int]:
    """READs that ended, and those of them that failed."""
    peer.write("counts")
    line = await peer.line()
    assert line, "the process ended"
    _, reads, failed = line.split()
    return int(reads), int(failed)


async def test_a_network_that_is_cut_fails_reads_within_seconds(start_peer, monkeypatch):
    for name, value in {**ucx_environment(), "UCX_TLS": OVER_TCP}.items():
        monkeypatch.setenv(name, value)
    with network() as net:
        there, here = net.add_node(), net.add_node()
        owner = start_peer("p", 7, prefix=there.prefix)
        reader = start_peer("reader", 0, read_from="p", prefix=here.prefix)
        metadata = await owner.metadata()
        owner.write(await reader.line())
        reader.write(metadata.hex())
        async with asyncio.timeout(TIMEOUT_S):
            while (await counts(reader))[0] < 3:
                await asyncio.sleep(0.01)
            assert (await counts(reader))[1] == 0
            there.set_link(up=False)
            while (await counts(reader))[1] == 0:
                await asyncio.sleep(0.01)
        assert await owner.runs()
