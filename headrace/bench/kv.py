"""`headrace bench kv`: READs of KV blocks from one process into another, beside copies of as many bytes within one.

    owner process                              reader process
    pool ─── READ, by a transfer thread ───▶ pool ◀─── memcpy, scatter copy ─── more memory

The three take turns on parts of the pools that are no longer in the caches, so whatever slows the machine slows all of
them. memcpy copies the bytes of a case in one piece, the scatter copy block by block between random places.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from typing import Any, Literal, Protocol, get_args

import numpy as np
import psutil
import torch

from headrace.engine.kv_cache import KvCache
from headrace.errors import HeadraceError, TransferFailed
from headrace.model_config import ModelConfig
from kv_transfer.nixl_transport import ucx_environment
from kv_transfer.registry import create_transport
from kv_transfer.slices import Slice
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transport import BlockRegion, Part

TransportName = Literal["nixl", "local"]
Order = Literal["contiguous", "scattered"]
TRANSPORTS: tuple[TransportName, ...] = get_args(TransportName)
ORDERS: tuple[Order, ...] = get_args(Order)

_BLOCK_SIZE_TOKENS = 32
_CPU_BLOCKS = 256  # of the READs that the serving side's CPU is measured at
_ANSWER_TIMEOUT_S = 300.0
_READ_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0
_MAX_ROUNDS = 200


def _llama(num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int) -> ModelConfig:
    """What a block's shape is made of; the rest does not matter here."""
    return ModelConfig(
        architecture="llama",
        num_layers=num_layers,
        hidden_size=num_heads * head_dim,
        intermediate_size=num_heads * head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=1,
        max_model_tokens=1,
        rope_theta=1.0,
        rms_norm_eps=1.0,
        tie_word_embeddings=True,
    )


MODELS = {
    "smollm2-135m": _llama(num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64),
    "llama-3.1-8b": _llama(num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128),
}


def ucx_tls(names: str) -> str:
    """As UCX_TLS wants it: NIXL needs the loopback beside any other way."""
    return f"{names},self" if names and "self" not in names.split(",") else names


@dataclass(frozen=True, slots=True)
class Effort:
    """How long it may take. A pool has to be far larger than the processor's caches for figures that mean something."""

    max_pool_bytes: int = 2 << 30
    row_s: float = 2.0  # at least `rounds`, then more until so much time has passed
    idle_s: float = 5.0
    serving_s: float = 3.0


QUICK = Effort(max_pool_bytes=48 << 20, row_s=0.1, idle_s=0.5, serving_s=0.5)


@dataclass(frozen=True, slots=True)
class Subject:
    """Two workers to be measured. `tls`: what UCX may use, as in UCX_TLS; "": whatever it finds."""

    model: str
    transport: TransportName
    tls: str = ""

    @property
    def block_bytes(self) -> int:
        return KvCache(MODELS[self.model], 1, _BLOCK_SIZE_TOKENS, torch.bfloat16).block_bytes

    def pool_blocks(self, most: int, effort: Effort) -> int:
        """Blocks of the owner's pool: `most`, or what fits. Three times that is allocated, twice at the reader."""
        memory = min(effort.max_pool_bytes, psutil.virtual_memory().available // 5)
        return max(2, min(most, memory // self.block_bytes))


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the report. Figures are medians over the rounds; GB are 1e9 bytes."""

    model: str
    transport: str
    tls: str
    block_bytes: int
    blocks: int
    order: Order  # of the blocks that a READ names, at both ends
    gb_per_s: float  # from asking on the event loop until it knows that the bytes are here
    memcpy_gb_per_s: float
    scatter_gb_per_s: float
    of_memcpy: float
    of_scatter: float
    latency_us: float  # per block
    read_us: float  # the whole READ
    first_read_us: float  # the very first of the pair of processes, which connects; of one block
    rounds: int
    spread: float  # of the READs: 10th to 90th percentile, over the median
    pool_blocks: int  # at the owner
    times_each_block: float  # over 1: a READ of more blocks than the pool has goes over it several times
    owner_idle_cpu: float  # of a core, connected and with nothing to do
    reader_idle_cpu: float
    serving_cpu: float | None  # of a core, at the owner during READs. None: no process of its own


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds."""

    read: float
    memcpy: float
    scatter: float


def measure(
    subject: Subject, counts: Sequence[int], min_rounds: int, effort: Effort = Effort()
) -> Generator[Row]:
    """A row per number of blocks and order, as they come. The processes end with the generator.

    Raises HeadraceError.
    """
    with Pair.start(subject, subject.pool_blocks(max(counts), effort)) as pair:
        first_read_s = pair.round(1, "contiguous").read
        owner_idle, reader_idle = pair.idle_cpu(effort.idle_s)
        serving = pair.serving_cpu(effort.serving_s)
        for blocks in counts:
            for order in ORDERS:
                rounds: list[Round] = []
                until = time.monotonic() + effort.row_s
                while len(rounds) < min_rounds or (time.monotonic() < until and len(rounds) < _MAX_ROUNDS):
                    rounds.append(pair.round(blocks, order))
                yield make_row(
                    subject,
                    pair,
                    (blocks, order),
                    rounds,
                    first_read_us=1e6 * first_read_s,
                    owner_idle_cpu=owner_idle,
                    reader_idle_cpu=reader_idle,
                    serving_cpu=serving,
                )


def make_row(
    subject: Subject, pair: Pair, case: tuple[int, Order], rounds: Sequence[Round], **of_the_pair: Any
) -> Row:
    blocks, order = case
    gigabytes = blocks * subject.block_bytes / 1e9
    reads = [one.read for one in rounds]
    read, memcpy, scatter = (
        statistics.median(times)
        for times in (reads, [one.memcpy for one in rounds], [one.scatter for one in rounds])
    )
    low, high = np.quantile(reads, (0.1, 0.9))
    return Row(
        model=subject.model,
        transport=subject.transport,
        tls=subject.tls,
        block_bytes=subject.block_bytes,
        blocks=blocks,
        order=order,
        gb_per_s=gigabytes / read,
        memcpy_gb_per_s=gigabytes / memcpy,
        scatter_gb_per_s=gigabytes / scatter,
        of_memcpy=memcpy / read,
        of_scatter=scatter / read,
        latency_us=1e6 * read / blocks,
        read_us=1e6 * read,
        rounds=len(rounds),
        spread=float(high - low) / read,
        pool_blocks=pair.pool_blocks,
        times_each_block=blocks / pair.pool_blocks,
        **of_the_pair,
    )


class Pair:
    """An owner and a reader that are connected. Over transport "local" one process is both."""

    def __init__(self, pool_blocks: int, owner: _Child, reader: _Child) -> None:
        self.pool_blocks = pool_blocks
        self._owner = owner
        self._reader = reader

    @classmethod
    @contextmanager
    def start(cls, subject: Subject, pool_blocks: int) -> Generator[Pair]:
        """The processes are gone after the block, however it ends."""
        with ExitStack() as processes:
            reader = processes.enter_context(_Child.start(_be_reader, subject, pool_blocks))
            owner = reader
            if subject.transport != "local":
                owner = processes.enter_context(_Child.start(_be_owner, subject, pool_blocks))
                owner.send(reader.receive())
                reader.send(owner.receive())
            reader.receive()  # it is connected
            yield cls(pool_blocks, owner, reader)

    def round(self, blocks: int, order: Order) -> Round:
        self._reader.send(("round", blocks, order))
        return self._reader.receive()

    def idle_cpu(self, seconds: float) -> tuple[float, float]:
        """Of a core, of owner and reader."""
        before = [child.cpu_s() for child in (self._owner, self._reader)]
        time.sleep(seconds)
        owner, reader = (
            (child.cpu_s() - start) / seconds
            for child, start in zip((self._owner, self._reader), before, strict=True)
        )
        return owner, reader

    def serving_cpu(self, seconds: float) -> float | None:
        """Of a core, of the owner while it is read from without a pause."""
        if self._owner is self._reader:
            return None
        before = self._owner.cpu_s()
        self._reader.send(("reads", min(_CPU_BLOCKS, self.pool_blocks), seconds))
        took_s = self._reader.receive()
        return (self._owner.cpu_s() - before) / took_s


class _Pipe(Protocol):
    """One end; each system has a class of its own for it."""

    def send(self, obj: Any, /) -> None: ...
    def recv(self) -> Any: ...
    def poll(self, timeout: float, /) -> bool: ...
    def close(self) -> None: ...


class _Child:
    """A process of ours and the pipe to it. It ends when the pipe does, so also when this process is killed."""

    def __init__(self, process: SpawnProcess, pipe: _Pipe) -> None:
        self._process = process
        self._pipe = pipe
        self._usage = psutil.Process(process.pid)

    @classmethod
    @contextmanager
    def start(cls, role: _Role, subject: Subject, pool_blocks: int) -> Generator[_Child]:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_run, args=(theirs, role, subject, pool_blocks), daemon=True)
        try:
            process.start()
            theirs.close()
            yield cls(process, ours)
        finally:
            ours.close()
            if process.pid is not None:
                process.join(_STOP_TIMEOUT_S)
                process.kill()
                process.join()

    def send(self, message: object) -> None:
        """Raises TransferFailed when the process is gone."""
        with self._gone_is_failure():
            self._pipe.send(message)

    def receive(self) -> Any:
        """Raises TransferFailed when the process is gone, silent or had an error."""
        with self._gone_is_failure():
            if not self._pipe.poll(_ANSWER_TIMEOUT_S):
                raise TransferFailed(f"a process of the benchmark was silent for {_ANSWER_TIMEOUT_S:g} s")
            answer = self._pipe.recv()
        if isinstance(answer, HeadraceError):
            raise answer
        return answer

    def cpu_s(self) -> float:
        return sum(self._usage.cpu_times()[:2])

    @contextmanager
    def _gone_is_failure(self) -> Generator[None]:
        try:
            yield
        except (EOFError, OSError):
            raise TransferFailed("a process of the benchmark ended by itself") from None


# --- in the processes -----------------------------------------------------------------------------------------------

_Role = Callable[[Any, Subject, int], Coroutine[Any, Any, None]]


def _run(pipe: _Pipe, role: _Role, subject: Subject, pool_blocks: int) -> None:
    """A process. Ctrl-C goes to the whole group: the one that measures decides, and closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name, value in ucx_environment().items():
        os.environ.setdefault(name, value)
    if subject.tls:
        os.environ["UCX_TLS"] = subject.tls
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # nobody measures any more
        try:
            asyncio.run(role(pipe, subject, pool_blocks))
        except HeadraceError as error:
            pipe.send(error)


async def _be_owner(pipe: _Pipe, subject: Subject, pool_blocks: int) -> None:
    worker = _Worker(subject, "owner", pool_blocks)
    await worker.start()
    try:
        await worker.connect("reader", await _next(pipe))
        pipe.send(await worker.metadata())
        await _next(pipe)
    finally:
        await worker.close()


async def _be_reader(pipe: _Pipe, subject: Subject, pool_blocks: int) -> None:
    """The second half of its pool is what its own copies are from."""
    worker = _Worker(subject, "reader", 2 * pool_blocks)
    owner = _Worker(subject, "owner", pool_blocks) if subject.transport == "local" else None
    try:
        await worker.start()
        if owner is None:
            pipe.send(await worker.metadata())
            metadata = await _next(pipe)
        else:
            await owner.start()
            metadata = await owner.metadata()
        await worker.connect("owner", metadata)
        pipe.send(None)
        await _answer(pipe, _Rounds(worker, pool_blocks))
    finally:
        for one in (worker, owner):
            if one is not None:
                await one.close()


async def _answer(pipe: _Pipe, rounds: _Rounds) -> None:
    while True:
        match await _next(pipe):
            case ("round", blocks, order):
                pipe.send(await rounds.one(blocks, order))
            case ("reads", blocks, seconds):
                pipe.send(await rounds.reads(blocks, seconds))
            case unknown:
                raise AssertionError(f"unexpected {unknown}")


async def _next(pipe: _Pipe) -> Any:
    return await asyncio.to_thread(pipe.recv)


class _Rounds:
    """Moves on through the pools, so that nothing that is copied, and nowhere it goes, is in a cache from before."""

    def __init__(self, worker: _Worker, pool_blocks: int) -> None:
        self._worker = worker
        self._pool_blocks = pool_blocks
        self._random = np.random.default_rng(0)
        self._position = 0
        self._num_rounds = 0

    async def one(self, blocks: int, order: Order) -> Round:
        """Each of the three once, each of them first in turn."""
        seconds: dict[str, float] = {}
        ways = [self._read, self._memcpy, self._scatter]
        first = self._num_rounds % len(ways)
        self._num_rounds += 1
        for way in (*ways[first:], *ways[:first]):
            seconds[way.__name__] = await way(blocks, order)
        return Round(seconds["_read"], seconds["_memcpy"], seconds["_scatter"])

    async def reads(self, blocks: int, at_least_s: float) -> float:
        """READs without a pause. Returns how long they took."""
        started = time.perf_counter()
        while (took_s := time.perf_counter() - started) < at_least_s:
            await self._worker.read("owner", self._in_order(blocks), self._in_order(blocks))
        return took_s

    async def _read(self, blocks: int, order: Order) -> float:
        choose = self._in_order if order == "contiguous" else self._at_random
        remote, local = choose(blocks), choose(blocks)
        started = time.perf_counter()
        await self._worker.read("owner", remote, local)
        seconds = time.perf_counter() - started
        self._worker.check_first_bytes(remote, local)
        return seconds

    async def _memcpy(self, blocks: int, order: Order) -> float:
        """In one piece, or several where the pool is smaller. The order is always the same."""
        pieces = [self._pool_blocks] * (blocks // self._pool_blocks) + [blocks % self._pool_blocks]
        size = self._worker.block_bytes
        copies = [
            (self._target(start), self._source(start), piece * size)
            for piece in pieces
            if piece
            for start in (self._advance(piece) if piece < self._pool_blocks else 0,)
        ]
        return _seconds_of(copies)

    async def _scatter(self, blocks: int, order: Order) -> float:
        size = self._worker.block_bytes
        pairs = zip(self._at_random(blocks), self._at_random(blocks), strict=True)
        return _seconds_of([(self._target(to), self._source(start), size) for to, start in pairs])

    def _advance(self, blocks: int) -> int:
        """The first of so many consecutive blocks, behind those that were used last."""
        start = self._position if self._position + blocks <= self._pool_blocks else 0
        self._position = start + blocks
        return start

    def _in_order(self, blocks: int) -> list[int]:
        start = self._advance(min(blocks, self._pool_blocks))
        return [(start + index) % self._pool_blocks for index in range(blocks)]

    def _at_random(self, blocks: int) -> list[int]:
        """Each block as often as any other, or once less."""
        times = -(-blocks // self._pool_blocks)
        drawn = [self._random.permutation(self._pool_blocks) for _ in range(times)]
        return np.concatenate(drawn)[:blocks].tolist()

    def _target(self, block: int) -> int:
        return self._worker.address(block)

    def _source(self, block: int) -> int:
        return self._worker.address(self._pool_blocks + block)


def _seconds_of(copies: list[tuple[int, int, int]]) -> float:
    started = time.perf_counter()
    for copy in copies:
        ctypes.memmove(*copy)
    return time.perf_counter() - started


class _Worker:
    """What READs need of a worker: its KV cache and its transfer thread. All that is used of `kv_transfer` is here."""

    def __init__(self, subject: Subject, incarnation: str, num_blocks: int) -> None:
        self._cache = KvCache(MODELS[subject.model], num_blocks, _BLOCK_SIZE_TOKENS, torch.bfloat16)
        self.block_bytes = self._cache.block_bytes
        # Numbered, so that it shows whether the bytes of a READ came; and every page is there.
        self._numbers = self._cache.tensor.view(torch.int16).view(num_blocks, -1).numpy()
        self._numbers[:] = np.arange(num_blocks, dtype=np.uint32)[:, None].astype(np.int16)
        region = BlockRegion(self._cache.address, num_blocks, self.block_bytes)
        self._transfers = TransferThread(lambda: create_transport(subject.transport, incarnation, [region]))

    async def start(self) -> None:
        await self._transfers.start()

    async def metadata(self) -> bytes:
        return await self._transfers.metadata()

    async def connect(self, peer: str, metadata: bytes) -> None:
        part = Part(metadata, Slice.whole(self.block_bytes))
        await self._transfers.connect(peer, [part], _READ_TIMEOUT_S)

    async def read(self, peer: str, remote: list[int], local: list[int]) -> None:
        """Raises TransferFailed."""
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                await self._transfers.read(peer, remote, local).done
        except TimeoutError:
            raise TransferFailed(f"READ of {len(local)} blocks took over {_READ_TIMEOUT_S:g} s") from None

    async def close(self) -> None:
        await self._transfers.close()

    def address(self, block: int) -> int:
        return self._cache.address + block * self.block_bytes

    def check_first_bytes(self, remote: list[int], local: list[int]) -> None:
        """Of the last READ: where a block was written twice, the later one counts. Raises TransferFailed."""
        for local_id, remote_id in dict(zip(local, remote, strict=True)).items():
            if self._numbers[local_id, 0] != np.int16(np.uint16(remote_id)):
                raise TransferFailed(f"READ ended without the bytes of block {remote_id}")
