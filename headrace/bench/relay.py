"""The way of a request and of its tokens through a router: clients, router and worker, each a process of its own.

    client ─gRPC─▶ router ─gRPC─▶ worker that computes nothing

The router has a core to itself where there are two. Latency is that of one request after the other, beside the same
request at the worker's own door. Throughput is that of many answers at once, a token each a step, as fast as they go;
beside it stands what it costs the router's process. Nothing is loaded and no directory runs.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

import grpc
import numpy as np
import psutil
import uvloop

from headrace.bench.router_parts import bench_model, bench_record, make_dispatcher
from headrace.config import RpcSettings, SecuritySettings, TelemetrySettings
from headrace.directory.records import Role
from headrace.directory.view import DirectoryView
from headrace.rpc.channel import open_channel
from headrace.rpc.server import RpcServer
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from headrace.telemetry import configure_logging
from headrace.tracing import start_tracing
from router.front_door import FrontDoor, Generation
from router.ledger import Charge
from router.request_run import Dispatch, Progress, RequestRun, Update
from router.requests import RequestParser
from router.service import InferenceService
from router.sessions import AnswerStream
from router.tally import Passing, Tally

PROMPT_TOKENS = 200
_REPLY_TIMEOUT_S = 60.0
_LOAD_TOKENS = (20, 400)  # of an answer
LOAD_STEP_S = 0.05
_INCARNATION = "of decode-0"
_SETTLE_TIMEOUT_S = 10.0
_When = Literal["now", "collected"]
_PER_REQUEST = (Generation, RequestRun, Dispatch, Charge, AnswerStream)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the router's process at one moment."""

    cpu_s: float
    rss_bytes: int
    gauges: dict[str, int]  # what is in flight, by kind; all zero when nothing is


@dataclass(frozen=True, slots=True)
class Extras:
    """What there is beside plain relaying. With TLS, `router` and `worker` name certificates; clients show none."""

    router: RpcSettings = field(default_factory=RpcSettings)
    worker: RpcSettings = field(default_factory=RpcSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    with_metrics: bool = True


@dataclass(frozen=True, slots=True)
class Doors:
    """Of a running pair. `figures(when)` asks both processes: now, or collected: when garbage has been."""

    router: str
    worker: str
    figures: Callable[[_When], Figures]
    extras: Extras

    def to_router(self) -> grpc.aio.Channel:
        """As a client. The caller closes it."""
        tls = self.extras.router.tls
        if not tls.ca_file:
            return open_channel(self.router, RpcSettings())
        return grpc.aio.secure_channel(self.router, grpc.ssl_channel_credentials(tls.ca_file.read_bytes()))

    def to_worker(self) -> grpc.aio.Channel:
        """As the router. The caller closes it."""
        return open_channel(self.worker, self.extras.router)

    def settled(self) -> Figures:
        """When nothing is in flight any more, or when that should have been."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while any((figures := self.figures("collected")).gauges.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return figures


@contextmanager
def router_and_worker(step_s: float = 0.0, extras: Extras | None = None) -> Generator[Doors]:
    """`step_s`: from one step of the worker to the next; 0: as soon as the one before is written."""
    cores, extras = sorted(os.sched_getaffinity(0)), extras or Extras()
    with ExitStack() as stack:
        worker_address, to_worker = stack.enter_context(_process(_worker, cores[:1], (step_s, extras.worker)))
        router_address, connection = stack.enter_context(
            _process(_router, cores[-1:], (worker_address, extras))
        )
        os.sched_setaffinity(0, cores[:-1] or cores)
        stack.callback(os.sched_setaffinity, 0, cores)

        def figures(when: _When) -> Figures:
            for one in (connection, to_worker):
                one.send(when)
            answer: Figures = _received(connection)
            answer.gauges["at_worker"] = _received(to_worker)
            return answer

        yield Doors(router_address, worker_address, figures, extras)


@dataclass(frozen=True, slots=True)
class Relayed:
    """What a number of answers at once cost. CPU is the router process's."""

    tokens_per_s: float
    messages_per_s: float
    cpu_us_per_token: float
    cpu_load: float  # of one core


def relay(doors: Doors, num_streams: int, num_tokens: int) -> Relayed:
    """`num_streams` answers of `num_tokens` each at once."""
    before, started = doors.figures("now"), time.perf_counter()
    messages = uvloop.run(_all_answers(doors, num_streams, num_tokens))
    seconds, cpu_s = time.perf_counter() - started, doors.figures("now").cpu_s - before.cpu_s
    count = num_streams * num_tokens
    return Relayed(count / seconds, messages / seconds, cpu_s / count * 1e6, cpu_s / seconds)


def added_latency_s(doors: Doors, num_requests: int) -> tuple[float, float]:
    """p50 and p99 of what the router adds to an answer of one token."""
    return uvloop.run(_added_latency(doors, num_requests))


@dataclass(frozen=True, slots=True)
class Sample:
    """Of a load that goes on."""

    seconds: float  # since its beginning
    answers: int  # so far
    tokens: int
    figures: Figures


class Load:
    """`num_streams` clients, each of which asks again as soon as it has its answer. Raises what a client is told."""

    def __init__(self, doors: Doors, num_streams: int, seed: int) -> None:
        self._doors = doors
        self._num_streams = num_streams
        self._seed = seed
        self._answers = 0
        self._tokens = 0
        self._started = time.perf_counter()

    async def run(self, seconds: float, on_sample: Callable[[Sample], None]) -> Sample:
        """A sample each second, and one when all clients have ended."""
        channel = self._doors.to_router()
        self._started = time.perf_counter()
        end = self._started + seconds
        try:
            async with asyncio.TaskGroup() as clients:
                for number in range(self._num_streams):
                    clients.create_task(self._client(channel, self._seed + number, end))
                while time.perf_counter() < end:
                    await asyncio.sleep(1.0)
                    on_sample(await self._sample(lambda: self._doors.figures("now")))
        finally:
            await channel.close()
        return await self._sample(self._doors.settled)

    async def _client(self, channel: grpc.aio.Channel, seed: int, end: float) -> None:
        draw = random.Random(seed)
        while time.perf_counter() < end:
            num_tokens = draw.randint(*_LOAD_TOKENS)
            await num_messages(channel, draw.randrange(1 << 30), num_tokens)
            self._answers += 1
            self._tokens += num_tokens

    async def _sample(self, ask: Callable[[], Figures]) -> Sample:
        figures = await asyncio.to_thread(ask)
        return Sample(time.perf_counter() - self._started, self._answers, self._tokens, figures)


async def _all_answers(doors: Doors, num_streams: int, num_tokens: int) -> int:
    """Returns the number of messages. The answers are counted by their usage, so that clients cost little."""
    channel = doors.to_router()
    try:
        return sum(
            await asyncio.gather(
                *(num_messages(channel, number, num_tokens) for number in range(num_streams))
            )
        )
    finally:
        await channel.close()


async def num_messages(channel: grpc.aio.Channel, seed: int, num_tokens: int) -> int:
    """Of one answer, which must be whole."""
    generate: Any = channel.unary_stream(
        "/headrace.v1.Inference/Generate",
        request_serializer=inference_pb2.GenerateRequest.SerializeToString,
    )
    count, last = 0, b""
    async for data in generate(request(seed, num_tokens), timeout=600):
        count, last = count + 1, data
    usage = inference_pb2.GenerateResponse.FromString(last).usage
    if usage.completion_tokens != num_tokens:
        raise AssertionError(f"{usage.completion_tokens} tokens of {num_tokens} came")
    return count


def request(seed: int, num_tokens: int) -> inference_pb2.GenerateRequest:
    """With a prompt of its own."""
    message = inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingParams(max_tokens=num_tokens))
    message.token_ids.ids.extend(np.random.default_rng(seed).integers(0, 256, PROMPT_TOKENS).tolist())
    return message


async def _added_latency(doors: Doors, num_requests: int) -> tuple[float, float]:
    to_router, to_worker = doors.to_router(), doors.to_worker()
    call = worker_pb2_grpc.WorkerStub(to_worker).Session()
    await call.read()
    through: list[float] = []
    direct: list[float] = []
    for number in range(num_requests + 1):
        through.append(await _seconds(num_messages(to_router, number, 1)))
        direct.append(await _seconds(_at_the_worker(call, number)))
    call.cancel()
    await to_router.close()
    await to_worker.close()
    added = np.array(through[1:]) - np.median(direct[1:])  # the first connects
    low, high = np.quantile(added, (0.5, 0.99)).tolist()
    return low, high


async def _seconds(work: Coroutine[Any, Any, Any]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


async def _at_the_worker(call: Any, number: int) -> None:
    start = worker_pb2.StartRequest(request_id=str(number), token_ids=[65] * PROMPT_TOKENS)
    start.sampling.max_tokens = 1
    await call.write(worker_pb2.SessionRequest(start=start))
    await call.read()


@contextmanager
def _process(
    main: Callable[..., Coroutine[Any, Any, None]], cores: list[int], argument: object
) -> Generator[tuple[str, Any]]:
    """Runs `main(connection, argument)`, which sends its address first and ends when the connection is closed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(main, theirs, cores, argument), daemon=True)
    process.start()
    theirs.close()
    try:
        yield _received(ours), ours
    finally:
        ours.close()
        process.join(10)
        process.kill()


def _run(main: Callable[..., Any], connection: Connection, cores: list[int], argument: object) -> None:
    os.sched_setaffinity(0, cores)
    configure_logging("warning", "bench")  # a line for each request would be measured too
    uvloop.run(main(connection, argument))


def _received(connection: Any) -> Any:
    if not connection.poll(_REPLY_TIMEOUT_S):
        raise TimeoutError(f"a process of the benchmark said nothing for {_REPLY_TIMEOUT_S:g} s")
    return connection.recv()


async def _worker(connection: Connection, argument: tuple[float, RpcSettings]) -> None:
    step_s, rpc = argument
    server = RpcServer(rpc, [])
    worker = _TrivialWorker(step_s)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server.grpc_server)
    connection.send(await server.start())
    await _until_closed(connection, lambda _: connection.send(worker.num_running))
    await server.stop(0)


async def _router(connection: Connection, argument: tuple[str, Extras]) -> None:
    worker_address, extras = argument
    rpc, model = extras.router, bench_model()
    view = DirectoryView()
    view.admit(bench_record("decode-0", Role.DECODE, worker_address))
    sessions, dispatcher = make_dispatcher(view, rpc, model)
    server = RpcServer(rpc, [], front=SecuritySettings())
    tracing = start_tracing(extras.telemetry, "headrace-router", "bench")
    door = FrontDoor(RequestParser(model, 1 << 20), dispatcher, 600.0, tracing=tracing)
    if not extras.with_metrics:
        door.tally = _NoTally()
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(door, model), server.grpc_server)
    connection.send(await server.start())

    def figures(when: _When) -> Figures:
        if when == "collected":
            gc.collect()
        process = psutil.Process()
        times = process.cpu_times()
        gauges = {
            "running": dispatcher.admission.num_running,
            "queued": dispatcher.admission.num_queued,
            "charged": len(dispatcher.ledger.accounts),
            "streams": sessions.num_streams,
            "objects": sum(isinstance(one, _PER_REQUEST) for one in gc.get_objects()),
        }
        return Figures(times.user + times.system, process.memory_info().rss, gauges)

    await _until_closed(connection, lambda when: connection.send(figures(when)))
    await server.stop(0)
    await sessions.close()
    await asyncio.to_thread(tracing.close)


class _NoTally(Tally):
    """Counts nothing."""

    def begin(self) -> Passing:
        return _NoPassing(self)

    def ended(self, outcome: str, passing: Passing, progress: Progress, prompt_tokens: int) -> None:
        pass


class _NoPassing(Passing):
    def note(self, update: Update) -> None:
        pass


async def _until_closed(connection: Connection, on_message: Callable[[_When], None]) -> None:
    loop, closed = asyncio.get_running_loop(), asyncio.Event()

    def on_readable() -> None:
        try:
            message = connection.recv()
        except EOFError:
            loop.remove_reader(connection.fileno())
            closed.set()
        else:
            on_message(message)

    loop.add_reader(connection.fileno(), on_readable)
    await closed.wait()


class _TrivialWorker(worker_pb2_grpc.WorkerServicer):
    """Each step brings a token for every answer that is not over."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._sessions: list[dict[str, int]] = []  # of each: tokens to come, by request

    @property
    def num_running(self) -> int:
        return sum(map(len, self._sessions))

    async def Status(self, request: worker_pb2.StatusRequest, context: Any) -> worker_pb2.StatusResponse:
        return worker_pb2.StatusResponse(running=self.num_running)

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[worker_pb2.StepFrame]:
        running: dict[str, int] = {}
        self._sessions.append(running)
        news = asyncio.Event()

        async def read() -> None:
            async for message in request_iterator:
                if message.HasField("start"):
                    running[message.start.request_id] = message.start.sampling.max_tokens
                    news.set()
                else:
                    running.pop(message.abort.request_id, None)

        reader = asyncio.create_task(read())
        try:
            yield worker_pb2.StepFrame(incarnation=_INCARNATION)
            while await news.wait():
                yield _step(running)
                if not running:
                    news.clear()
                elif self._step_s:
                    await asyncio.sleep(self._step_s)
        finally:
            reader.cancel()
            self._sessions.remove(running)


def _step(running: dict[str, int]) -> worker_pb2.StepFrame:
    frame = worker_pb2.StepFrame(incarnation=_INCARNATION)
    for request_id in list(running):
        delta = frame.deltas.add(request_id=request_id, token_ids=[65])
        running[request_id] -= 1
        if not running[request_id]:
            del running[request_id]
            delta.finish_reason = "length"
            delta.end.SetInParent()
    return frame
