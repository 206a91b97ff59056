"""The one thread that uses the transport, and how the event loop talks to it.

    event loop ── commands ──▶ queue ──▶ thread: connect, disconnect, post READs, poll READs, make progress
               ◀─ futures ───────────────┘

A READ is over when its bytes are here, when it failed, or when its peer was disconnected; only then can it no longer
write into our blocks. A READ that stalls stays, and keeps nobody else waiting.
"""

from __future__ import annotations

import asyncio
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from headrace.errors import HeadraceError, TransferFailed, Unavailable
from kv_transfer.rate import Rate
from kv_transfer.transport import Part, Read, Transport

log = structlog.get_logger()

T = TypeVar("T")

_CLOSED = "the transport is closed"
_COMMAND_TIMEOUT_S = 30.0  # of commands that wait for nobody else: the thread itself may be busy with a copy
_CLOSE_TIMEOUT_S = 10.0
_MIN_SLEEP_S = 20e-6  # between polls while a READ is under way, doubling up to the limit
_MAX_SLEEP_S = 1e-3
# Peers' READs from us progress when we look.
_SERVING_WAIT_S = 1e-3  # somebody has a lease, or is about to connect
_CONNECTED_WAIT_S = 5e-3  # nobody has: each look costs some 40 us, which is what a worker takes when idle
_ALONE_WAIT_S = 0.1
_NUM_TIMED_PROBES = 3
_LONG_MEASUREMENT_S = 0.1  # one of these says enough
_MEASURED_BYTES = 256 << 10  # of one READ that measures a way which nobody uses; one block at least


@dataclass(frozen=True, slots=True)
class TransferStats:
    bytes: int
    seconds: float  # from posting to the last byte


@dataclass(frozen=True, slots=True)
class Probe:
    """What a few READs of one block said about the way to a peer."""

    first_s: float  # of the first one, which makes the connection
    latency_s: float  # of one block, the median of those after it
    bytes_per_s: float  # of one block in that time


class Transfer:
    """One READ. `done` gets its stats, or TransferFailed; cancelling it does not stop the READ."""

    def __init__(self, peer: str, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        self.peer = peer
        self.remote_block_ids = list(remote_block_ids)
        self.local_block_ids = list(local_block_ids)
        self.done: asyncio.Future[TransferStats] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(_retrieve)
        self._over = asyncio.Event()

    async def settled(self) -> None:
        """Returns once the READ can not write into our blocks any more."""
        await self._over.wait()

    def finish(self, result: TransferStats | HeadraceError) -> None:
        """On the event loop."""
        self._over.set()
        if isinstance(result, HeadraceError):
            self.fail(result)
        elif not self.done.done():
            self.done.set_result(result)

    def fail(self, error: HeadraceError) -> None:
        """It will not bring all its bytes, and is not over yet. On the event loop."""
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(slots=True, eq=False)
class _Running:
    transfer: Transfer
    read: Read
    posted_at: float


class TransferThread:
    """Used on one event loop. `factory` runs on the thread and makes the transport."""

    def __init__(self, factory: Callable[[], Transport]) -> None:
        self._factory = factory
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any] | None]] = queue.SimpleQueue()
        self._running: list[_Running] = []
        self._peers: dict[str, Rate] = {}  # connected; written by the thread, read by anybody
        self._read_at: dict[str, float] = {}  # by peer: when its last READ ended, on the monotonic clock
        self._closing = False
        self._door = threading.Lock()  # nothing enters the queue once `_closing` is set
        self._transport: Transport
        self._serves_until = 0.0
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    async def start(self) -> None:
        """Raises what making the transport raised."""
        self._thread.start()
        await self._call(self._create, _COMMAND_TIMEOUT_S)

    async def metadata(self) -> bytes:
        return await self._call(lambda: self._transport.metadata(), _COMMAND_TIMEOUT_S)

    def bytes_per_s(self, peer: str) -> float:
        """Of READs from it since it was connected, probes included; 0 while there were none."""
        rate = self._peers.get(peer)
        return rate.bytes_per_s if rate is not None else 0.0

    async def connect(self, peer: str, parts: Sequence[Part], timeout_s: float) -> None:
        """Raises TransferFailed."""

        def command() -> None:
            self._transport.connect(peer, parts)
            self._peers.setdefault(peer, Rate())

        await self._call(command, timeout_s)

    async def probe(self, peer: str) -> Probe:
        """Read block 0 of the peer a few times into our scratch block. The caller sees to the deadline, and disconnects
        when this fails or is cancelled: a READ may still be under way. Raises TransferFailed.
        """
        seconds: list[float] = []
        for _ in range(1 + _NUM_TIMED_PROBES):
            transfer = Transfer(peer, [0], [self._transport.regions[0].num_blocks])
            self._start(transfer)
            stats = await transfer.done
            seconds.append(stats.seconds)
        latency_s = statistics.median(seconds[1:])
        return Probe(seconds[0], latency_s, self._block_bytes / latency_s)

    def unused_s(self, peer: str) -> float:
        """Since the last READ from it ended; 0 while one is under way."""
        if any(running.transfer.peer == peer for running in list(self._running)):
            return 0.0
        return time.monotonic() - self._read_at.get(peer, 0.0)

    async def measure(self, peer: str) -> TransferStats:
        """As `probe`, of a way that was not used for a while: the best of a few READs, since the owner looks after them
        every few ms only.
        """
        count = max(1, _MEASURED_BYTES // self._block_bytes)
        best: TransferStats | None = None
        for _ in range(_NUM_TIMED_PROBES):
            transfer = Transfer(peer, [0] * count, [self._transport.regions[0].num_blocks] * count)
            self._start(transfer)
            stats = await transfer.done
            best = stats if best is None or stats.seconds < best.seconds else best
            if stats.seconds > _LONG_MEASUREMENT_S:
                break
        assert best is not None
        return best

    async def disconnect(self, peer: str) -> None:
        """All READs from the peer are over afterwards. Nothing for an unknown peer."""
        await self._call(lambda: self._disconnect(peer), _COMMAND_TIMEOUT_S)

    def read(self, peer: str, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> Transfer:
        """Start a READ of equally many blocks."""
        assert len(remote_block_ids) == len(local_block_ids)
        transfer = Transfer(peer, remote_block_ids, local_block_ids)
        self._start(transfer)
        return transfer

    def serve_for(self, seconds: float) -> None:
        """A peer may read from us within that time: look after it often."""
        self._serves_until = max(self._serves_until, time.monotonic() + seconds)
        self._send(lambda: None, None)  # it may sleep for longer than that

    async def close(self) -> None:
        """End all READs and the thread."""
        self._send(lambda: None, None)  # wakes it
        self._shut_door()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                log.error("transfer thread did not stop in time", seconds=_CLOSE_TIMEOUT_S)

    def _start(self, transfer: Transfer) -> None:
        if not self._send(lambda: self._post(transfer), None):
            transfer.finish(TransferFailed(_CLOSED))

    async def _call(self, command: Callable[[], T], timeout_s: float) -> T:
        future: Future[T] = Future()
        if not self._send(command, future):
            raise Unavailable(_CLOSED)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise TransferFailed(f"the transport did not answer within {timeout_s:g} s") from None

    def _send(self, command: Callable[[], Any], future: Future[Any] | None) -> bool:
        with self._door:
            if not self._closing:
                self._commands.put((command, future))
            return not self._closing

    def _shut_door(self) -> None:
        with self._door:
            self._closing = True

    # --- on the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop_until_closed()
        except Exception as error:  # every READ is told; the worker goes on without transfers
            log.critical("transfer thread failed", exc_info=error)
        finally:
            self._shut_door()
            self._shut_down()

    def _loop_until_closed(self) -> None:
        sleep_s = _MIN_SLEEP_S
        while not self._closing:
            self._execute_commands(0.0 if self._running else self._idle_wait_s())
            moved = self._poll()
            if self._running:
                sleep_s = _MIN_SLEEP_S if moved else min(2 * sleep_s, _MAX_SLEEP_S)
                time.sleep(sleep_s)

    def _idle_wait_s(self) -> float:
        if time.monotonic() < self._serves_until:
            return _SERVING_WAIT_S
        return _CONNECTED_WAIT_S if self._peers else _ALONE_WAIT_S

    def _create(self) -> None:
        """The first command."""
        self._transport = self._factory()

    @property
    def _block_bytes(self) -> int:
        return self._transport.regions[0].block_bytes

    def _execute_commands(self, wait_s: float) -> None:
        try:
            command, future = self._commands.get(block=wait_s > 0, timeout=wait_s)
            while True:
                _execute(command, future)
                command, future = self._commands.get_nowait()
        except queue.Empty:
            pass

    def _post(self, transfer: Transfer) -> None:
        posted_at = time.perf_counter()
        if self._closing:
            self._tell(transfer, TransferFailed(_CLOSED))
            return
        try:
            read = self._transport.read(transfer.peer, transfer.remote_block_ids, transfer.local_block_ids)
        except Exception as error:  # noqa: BLE001 - this READ fails, the thread goes on
            self._fail(transfer, error)
            return
        self._running.append(_Running(transfer, read, posted_at))

    def _poll(self) -> bool:
        """Look after all READs and let peers read from us. Returns whether a READ ended."""
        # A reader may be at it whom we do not read from, or gave up reading from.
        self._transport.progress()
        ended = [running for running in self._running if self._is_over(running)]
        for running in ended:
            self._running.remove(running)
            running.read.release()
        return bool(ended)

    def _is_over(self, running: _Running) -> bool:
        try:
            if not running.read.poll():
                return False
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(running.transfer, error)
            return True
        seconds = time.perf_counter() - running.posted_at
        num_bytes = len(running.transfer.local_block_ids) * self._block_bytes
        if (rate := self._peers.get(running.transfer.peer)) is not None:
            rate.add(num_bytes, seconds)
            self._read_at[running.transfer.peer] = time.monotonic()
        self._tell(running.transfer, TransferStats(num_bytes, seconds))
        return True

    def _fail(self, transfer: Transfer, error: Exception) -> None:
        """Only TransferFailed says that a READ is over. After anything else the peer is torn down to make it so."""
        if not isinstance(error, TransferFailed):
            log.error(
                "transport raised what it should not; disconnecting", peer=transfer.peer, exc_info=error
            )
            self._transport.disconnect(transfer.peer)
            error = TransferFailed(f"unexpected: {error!r}")
        self._tell(transfer, error)

    def _disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)
        self._read_at.pop(peer, None)
        self._transport.disconnect(peer)
        its = [running for running in self._running if running.transfer.peer == peer]
        self._abandon(its, "was disconnected")

    def _abandon(self, runnings: list[_Running], why: str) -> None:
        for running in runnings:
            self._running.remove(running)
            running.read.release()
            self._tell(running.transfer, TransferFailed(f"peer {running.transfer.peer} {why}"))

    def _tell(self, transfer: Transfer, result: TransferStats | HeadraceError) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(transfer.finish, result)

    def _shut_down(self) -> None:
        try:
            if hasattr(self, "_transport"):
                self._transport.close()  # after this, no READ can write
                self._abandon(list(self._running), "is read no more: " + _CLOSED)
        finally:
            self._refuse_commands()

    def _refuse_commands(self) -> None:
        """Nobody shall wait in vain for those that were still in the queue."""
        with suppress(queue.Empty):
            while True:
                command, future = self._commands.get_nowait()
                if future is None:
                    command()  # a READ sees for itself that the door is shut
                elif future.set_running_or_notify_cancel():
                    future.set_exception(Unavailable(_CLOSED))


def _execute(command: Callable[[], Any], future: Future[Any] | None) -> None:
    if future is None:
        command()
    elif future.set_running_or_notify_cancel():
        try:
            future.set_result(command())
        except Exception as error:  # noqa: BLE001 - handed to whoever asked
            future.set_exception(error)


def _retrieve(future: asyncio.Future[TransferStats]) -> None:
    """A failure that nobody waits for any more is no news to asyncio."""
    if not future.cancelled():
        future.exception()
