"""Real processes over NIXL that die or stop in the middle of READs: what fails, what waits, and what never comes late.

READs stall in two ways: over TCP, where the owner sends each byte, and over whatever UCX takes (CMA here, which copies
by itself) as long as the connection is not made yet.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import TransferFailed
from kv_transfer.nixl_transport import NixlTransport, ucx_environment
from kv_transfer.transfer_thread import Transfer, TransferThread
from kv_transfer.transport import BlockRegion
from tests.support.parts import part

pytestmark = pytest.mark.slow

PEER_PROGRAM = Path(__file__).with_name("nixl_peer.py")
ROOT = PEER_PROGRAM.parents[2]
NUM_BLOCKS = 32
BLOCK_BYTES = 512 * 1024
ALL = range(NUM_BLOCKS)
TIMEOUT_S = 30.0
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


class Reader:
    """This process's side."""

    def __init__(self) -> None:
        self.blocks = np.zeros((2 * NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        region = BlockRegion(self.blocks.ctypes.data, *self.blocks.shape)
        self.transfers = TransferThread(lambda: NixlTransport("reader", [region]))

    async def connect(self, peer: PeerProcess) -> None:
        await self.transfers.connect(peer.name, [part(await peer.metadata(), BLOCK_BYTES)], TIMEOUT_S)
        peer.write((await self.transfers.metadata()).hex())

    async def read_one(self, peer: PeerProcess, local: int = 0) -> int:
        """The value that the peer's blocks hold. Makes the connection, if it is the first READ."""
        await soon(self.transfers.read(peer.name, [0], [local]).done)
        assert (self.blocks[local] == self.blocks[local, 0]).all()
        return int(self.blocks[local, 0])


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


@pytest.fixture
async def reader(ucx_transports):
    reader = Reader()
    await reader.transfers.start()
    yield reader
    await reader.transfers.close()


async def soon(awaitable):
    return await asyncio.wait_for(awaitable, TIMEOUT_S)


async def stall(reader: Reader, peer: PeerProcess, over: str) -> Transfer:
    """A READ of all blocks from a peer that is stopped."""
    if over == OVER_TCP:
        await reader.read_one(peer)
    peer.send(signal.SIGSTOP)
    reader.blocks[:] = 0
    return reader.transfers.read(peer.name, ALL, ALL)


async def is_under_way(transfer: Transfer, reader: Reader) -> bool:
    """Whether the READ is neither done nor settled once the thread has looked at it again and again."""
    settled = asyncio.create_task(transfer.settled())
    for _ in range(20):
        await reader.transfers.metadata()
    under_way = not (settled.done() or transfer.done.done())
    settled.cancel()
    return under_way


async def assert_failed(transfer: Transfer) -> None:
    with pytest.raises(TransferFailed, match=r"^(?!unexpected)"):
        await soon(transfer.done)
    await soon(transfer.settled())


async def test_a_killed_peer_fails_the_next_read(reader, start_peer):
    peer = start_peer("p", 7)
    await reader.connect(peer)
    assert await reader.read_one(peer) == 7
    peer.popen.kill()
    peer.popen.wait(TIMEOUT_S)
    for _ in range(2):
        await assert_failed(reader.transfers.read("p", ALL, ALL))


async def test_a_peer_killed_before_the_first_read_fails_it(reader, start_peer):
    peer = start_peer("p", 7)
    await reader.connect(peer)
    peer.popen.kill()
    peer.popen.wait(TIMEOUT_S)
    await assert_failed(reader.transfers.read("p", ALL, ALL))
    assert not reader.blocks.any()


async def test_a_peer_killed_in_the_middle_fails_its_reads_and_no_others(reader, ucx_transports, start_peer):
    peer, other = start_peer("p", 7), start_peer("q", 9)
    await reader.connect(peer)
    await reader.connect(other)
    transfers = [await stall(reader, peer, ucx_transports)]
    transfers.append(reader.transfers.read("p", [1], [1]))
    assert await is_under_way(transfers[0], reader)
    peer.popen.kill()
    for transfer in transfers:
        await assert_failed(transfer)
    assert await reader.read_one(other) == 9


async def test_a_restarted_peer_is_read_under_its_new_incarnation(reader, start_peer):
    peer = start_peer("p-1", 7)
    await reader.connect(peer)
    assert await reader.read_one(peer) == 7
    peer.popen.kill()
    peer.popen.wait(TIMEOUT_S)
    successor = start_peer("p-2", 8)
    await reader.transfers.disconnect("p-1")
    await reader.connect(successor)
    assert await reader.read_one(successor) == 8


async def test_a_stopped_peer_keeps_its_reads_unsettled_and_nobody_else_waiting(
    reader, ucx_transports, start_peer
):
    peer, other = start_peer("p", 7), start_peer("q", 9)
    await reader.connect(peer)
    await reader.connect(other)
    stalled = await stall(reader, peer, ucx_transports)
    assert await reader.read_one(other, local=NUM_BLOCKS) == 9
    assert await is_under_way(stalled, reader)
    peer.send(signal.SIGCONT)
    stats = await soon(stalled.done)
    assert stats.bytes == NUM_BLOCKS * BLOCK_BYTES
    await soon(stalled.settled())
    assert (reader.blocks[:NUM_BLOCKS] == 7).all()


async def test_after_a_disconnect_a_peer_that_wakes_up_writes_nothing(reader, ucx_transports, start_peer):
    """NIXL alone does not keep this promise: neither removing the agent nor releasing the handle stops the bytes."""
    peer, other = start_peer("p", 7), start_peer("q", 9)
    await reader.connect(peer)
    await reader.connect(other)
    stalled = await stall(reader, peer, ucx_transports)
    assert await is_under_way(stalled, reader)
    await soon(reader.transfers.disconnect("p"))
    await assert_failed(stalled)
    reader.blocks[:] = 0
    peer.send(signal.SIGCONT)
    # Over TCP, UCX 1.x ends a process that sends READ bytes to somebody who is gone.
    assert await peer.runs() or ucx_transports == OVER_TCP
    for local in range(NUM_BLOCKS, 2 * NUM_BLOCKS):  # gives late bytes every chance
        assert await reader.read_one(other, local) == 9
    assert not reader.blocks[:NUM_BLOCKS].any()


async def test_a_disconnect_leaves_stalled_reads_from_others_under_way(reader, ucx_transports, start_peer):
    peer, other = start_peer("p", 7), start_peer("q", 9)
    await reader.connect(peer)
    await reader.connect(other)
    torn = await stall(reader, peer, ucx_transports)
    kept = await stall(reader, other, ucx_transports)
    assert await is_under_way(torn, reader)
    await soon(reader.transfers.disconnect("p"))
    await assert_failed(torn)
    assert await is_under_way(kept, reader)
    other.send(signal.SIGCONT)
    await soon(kept.done)
    assert (reader.blocks[:NUM_BLOCKS] == 9).all()


@pytest.mark.parametrize(
    "ucx_transports", [OVER_ANYTHING], indirect=True
)  # over TCP, UCX may end the owner too
async def test_an_owner_outlives_readers_that_are_killed(reader, start_peer):
    owner = start_peer("p", 7)
    metadata = await owner.metadata()
    greedy = start_peer("greedy", 0, read_from="p")
    await greedy.metadata()
    greedy.write(metadata.hex())
    owner.write((await reader.transfers.metadata()).hex())
    greedy.write("reads")
    while int((await greedy.line()).split()[1]) < 3:
        greedy.write("reads")
    greedy.popen.kill()
    assert await owner.runs()
    await reader.transfers.connect("p", [part(metadata, BLOCK_BYTES)], TIMEOUT_S)
    assert await reader.read_one(owner) == 7


@dataclass(frozen=True)
class Wire:
    """A network of two: this process at one end, a namespace at the other."""

    name: str

    @property
    def inside(self) -> list[str]:
        """Runs a command at the other end."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """No packet gets there or back, and nobody is told."""
        ip("-n", self.name, "link", "set", f"{self.name}b", "down")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=TIMEOUT_S)


@pytest.fixture
def wire(monkeypatch) -> Iterator[Wire]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and `ip`")
    name = f"hr{os.getpid() % 10**8}"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.decode()}")
    try:
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        ip("addr", "add", "198.18.77.1/30", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        ip("-n", name, "addr", "add", "198.18.77.2/30", "dev", f"{name}b")
        ip("-n", name, "link", "set", f"{name}b", "up")
        ip("-n", name, "link", "set", "lo", "up")  # agents connect to themselves
        for variable, value in {**ucx_environment(), "UCX_TLS": OVER_TCP}.items():
            monkeypatch.setenv(variable, value)
        yield Wire(name)
    finally:
        subprocess.run(["ip", "link", "del", f"{name}a"], check=False, capture_output=True, timeout=TIMEOUT_S)
        ip("netns", "del", name)


async def counts(peer: PeerProcess) -> tuple[int, int]:
    """READs that ended, and those of them that failed."""
    peer.write("counts")
    while not (line := await peer.line()).startswith("counts "):  # a log in between
        assert peer.popen.poll() is None, "the process ended"
    _, reads, failed = line.split()
    return int(reads), int(failed)


async def test_a_network_that_is_cut_fails_reads_within_seconds(wire, start_peer):
    """Both ends are processes of their own: UCX looks for network devices once per process."""
    owner = start_peer("p", 7, prefix=wire.inside, UCX_NET_DEVICES=f"{wire.name}b")
    reader = start_peer("reader", 0, read_from="p", UCX_NET_DEVICES=f"{wire.name}a")
    metadata = await owner.metadata()
    owner.write(await reader.line())
    reader.write(metadata.hex())
    async with asyncio.timeout(TIMEOUT_S):
        while (await counts(reader))[0] < 3:
            await asyncio.sleep(0.01)
        assert (await counts(reader))[1] == 0
        wire.cut()
        while (await counts(reader))[1] == 0:
            await asyncio.sleep(0.01)
    assert await owner.runs()
