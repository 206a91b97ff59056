"""The router's sessions with decode workers: one stream per worker incarnation, all requests multiplexed on it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field

import grpc
import structlog

from headrace.config import RpcSettings
from headrace.errors import Code, HeadraceError, InvalidRequest, PeerError, SlowReader, WorkerGone
from headrace.rpc.channel import open_channel
from headrace.rpc.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from headrace.sampling_params import FinishReason

log = structlog.get_logger()

READING_GRACE_S = 10.0  # for what is left of an answer that was stopped
_CONNECT_TIMEOUT_S = 5.0
# To clients, a third of a core's time: a message costs about 35 us, however many tokens it has.
_MAX_MESSAGES_PER_S = 10_000


@dataclass(slots=True)
class ChoiceDelta:
    """Of one choice. The last one has `finish_reason`."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Delta:
    """What came for one request since it was last asked for, by choice. The last one has `end`."""

    choices: dict[int, ChoiceDelta] = field(default_factory=dict)
    prompt_logprobs: worker_pb2.PromptLogprobs | None = None
    end: worker_pb2.SequenceEnd | None = None


@dataclass(slots=True)
class Pace:
    """How often a stream may have news, so that all of them together are not more messages than can be written. The
    tokens that come meanwhile are merged. 200 streams of 50 tokens a second do not notice it.
    """

    num_streams: int = 0

    @property
    def interval_s(self) -> float:
        return self.num_streams / _MAX_MESSAGES_PER_S


class AnswerStream:
    """One request's deltas. The first comes at once, and so does what ends an answer; the others at the router's pace.
    A consumer that is slow gets them merged; one that is too slow gets what there is, and then SlowReader: so what is
    kept is bounded by the answer, and by `max_unread_tokens` and one frame. One that does not come to hear of it is
    cancelled after `READING_GRACE_S`: it hangs in a write to a client that does not read.
    """

    def __init__(self, request_id: str, max_unread_tokens: int, pace: Pace) -> None:
        self.request_id = request_id
        self._max_unread_tokens = max_unread_tokens
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._taken_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._num_unread_tokens = 0
        self.ended = False  # the worker has nothing to do for it any more
        self._delta = Delta()
        self._error: HeadraceError | None = None
        self._ready = asyncio.Event()
        self._consumer: asyncio.Task[object] | None = None
        self._cut_off: asyncio.TimerHandle | None = None

    def push(self, message: worker_pb2.SequenceDelta) -> bool:
        """Returns False once the consumer is too slow: nothing more is taken, and the worker is to stop."""
        if self._error is not None:
            return False
        self._num_unread_tokens += len(message.token_ids)
        if message.token_ids or message.finish_reason:
            news = self._delta.choices.setdefault(message.choice, ChoiceDelta())
            news.token_ids.extend(message.token_ids)
            news.logprobs.extend(message.logprobs)
            if message.finish_reason:
                news.finish_reason = FinishReason(message.finish_reason)
        if message.HasField("prompt_logprobs"):
            self._delta.prompt_logprobs = self._delta.prompt_logprobs or worker_pb2.PromptLogprobs(
                first_index=message.prompt_logprobs.first_index
            )
            self._delta.prompt_logprobs.entries.extend(message.prompt_logprobs.entries)
        if message.HasField("end"):
            self._delta.end = message.end
            self.ended = True
        elif self._num_unread_tokens > self._max_unread_tokens:
            self.give_up(SlowReader(self._num_unread_tokens, self._max_unread_tokens))
            return False
        self._tell(is_last=self.ended or bool(message.finish_reason))
        return True

    def _tell(self, *, is_last: bool) -> None:
        """Wake the consumer now, or when its next message is due."""
        due = self._taken_at + self._pace.interval_s
        if is_last or due <= self._loop.time():
            self._ready.set()
        elif self._timer is None:
            self._timer = self._loop.call_at(due, self._ready.set)

    def fail(self, error: HeadraceError) -> None:
        """The first error stays."""
        self._error = self._error or error
        self.ended = True
        self._ready.set()

    def give_up(self, error: HeadraceError) -> None:
        """As `fail`, for what the consumer itself may be the reason of."""
        self.fail(error)
        if self._cut_off is None and self._consumer is not None:
            self._cut_off = self._loop.call_later(READING_GRACE_S, self._consumer.cancel)

    def close(self) -> None:
        """The consumer is done with it."""
        if self._cut_off is not None:
            self._cut_off.cancel()
        self._consumer = None

    async def take(self) -> Delta:
        """Waits for news and returns it as it came, an error end included. Raises WorkerGone when the session broke."""
        self._consumer = asyncio.current_task()
        await self._ready.wait()
        self._taken_at = self._loop.time()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        delta, self._delta = self._delta, Delta()
        self._num_unread_tokens = 0
        if self._error is None:
            self._ready.clear()
        elif not (delta.choices or delta.end):
            raise self._error
        return delta

    async def next(self) -> Delta:
        """As `take`, but a request that failed raises its error, after all its tokens were given out."""
        delta = await self.take()
        if delta.end is not None and delta.end.error_code:
            end = delta.end
            error = PeerError(Code(end.error_code), end.error_message, end.error_field)
            if not delta.choices:
                raise error
            self.fail(error)
            delta.end = None
        return delta


class WorkerSession:
    """An open session. `lost` is set once it has ended; its requests have failed by then."""

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        channel: grpc.aio.Channel,
        max_message_bytes: int,
        max_unread_tokens: int,
        pace: Pace,
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self._max_unread_tokens = max_unread_tokens
        self._pace = pace
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.lost = False
        self._channel = channel
        self._call = worker_pb2_grpc.WorkerStub(channel).Session()
        self._streams: dict[str, AnswerStream] = {}
        self._outgoing: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue()  # bounded by admission

    async def open(self) -> None:
        """Wait for the worker's first frame. Raises WorkerGone."""
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                frame = await self._call.read()
        except (TimeoutError, grpc.aio.AioRpcError) as error:
            await self.close()
            raise WorkerGone(f"no session with {self.worker_id}: {_reason(error)}") from None
        if not isinstance(frame, worker_pb2.StepFrame) or frame.incarnation != self.incarnation:
            await self.close()
            raise WorkerGone(f"{self.worker_id} is no longer incarnation {self.incarnation}")

    async def run(self, on_lost: Callable[[], None], on_link: Callable[[worker_pb2.Link], None]) -> None:
        """Carry messages both ways until the stream ends; then call `on_lost` and fail what is left. `on_link` gets
        what the worker measured of its ways to others.
        """
        writer = asyncio.create_task(self._write(), name=f"session writer {self.worker_id}")
        error = WorkerGone(f"decode worker {self.worker_id} ended its session")
        try:
            while isinstance(
                frame := await self._call.read(), worker_pb2.StepFrame
            ):  # else: the end of the stream
                self._hand_out(frame)
                for link in frame.links:
                    on_link(link)
        except (
            grpc.aio.AioRpcError
        ) as rpc_error:  # whatever it says, this worker's answers do not come any more
            error = WorkerGone(f"decode worker {self.worker_id}: {_reason(rpc_error)}")
        finally:
            self.lost = True
            writer.cancel()
            on_lost()  # first: whoever fails now must not choose this worker again
            for stream in self._streams.values():
                stream.fail(error)
            await self.close()

    def _hand_out(self, frame: worker_pb2.StepFrame) -> None:
        for delta in frame.deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None and not stream.push(delta):
                self.abort(delta.request_id)
                self.forget(delta.request_id)

    def start(self, start: worker_pb2.StartRequest) -> AnswerStream:
        """Send a request. Its deltas come to the stream until `forget`. Raises WorkerGone, or InvalidRequest if it is
        too large for a message: gRPC would end the session, and with it all its requests.
        """
        if self.lost:
            raise WorkerGone(f"decode worker {self.worker_id} was lost")
        message = worker_pb2.SessionRequest(start=start)
        if message.ByteSize() > self._max_message_bytes:
            allowed = f"at most {self._max_message_bytes} bytes on their way to a worker"
            raise InvalidRequest("prompt and sampling", f"{message.ByteSize()} bytes", allowed)
        stream = AnswerStream(start.request_id, self._max_unread_tokens, self._pace)
        self._streams[start.request_id] = stream
        self._pace.num_streams += 1
        self._outgoing.put_nowait(message)
        return stream

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Tell the worker to stop, or to stop that choice only. The stream still gets the request's end."""
        if not self.lost:
            abort = worker_pb2.AbortRequest(request_id=request_id, choice=choice)
            self._outgoing.put_nowait(worker_pb2.SessionRequest(abort=abort))

    def forget(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._pace.num_streams -= 1

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    async def _write(self) -> None:
        try:
            while True:
                await self._call.write(await self._outgoing.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reading side sees why and fails the requests


class Sessions:
    """All sessions, opened when first needed and shared by all requests."""

    def __init__(self, rpc: RpcSettings, on_lost: Callable[[str, str], None], max_unread_tokens: int) -> None:
        """`on_lost(worker_id, incarnation)` is called when a session ends or can not be opened."""
        self._rpc = rpc
        self._max_unread_tokens = max_unread_tokens
        self._on_lost = on_lost
        self.on_link: Callable[[str, worker_pb2.Link], None] = lambda worker_id, link: None
        self._pace = Pace()
        self._opening: dict[str, asyncio.Task[WorkerSession]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._closing = False

    async def get(self, worker_id: str, incarnation: str, address: str) -> WorkerSession:
        """The session with this incarnation. Raises WorkerGone."""
        task = self._opening.get(incarnation)
        if task is None or (task.done() and (task.exception() or task.result().lost)):
            task = asyncio.create_task(
                self._open(worker_id, incarnation, address),
                name=f"open session {worker_id}",
                context=Context(),  # its log lines are not of the request that came first
            )
            self._opening[incarnation] = task
        try:
            return await asyncio.shield(task)
        except WorkerGone:
            if self._opening.get(incarnation) is task:  # and not one that another request has begun since
                del self._opening[incarnation]
            raise

    @property
    def num_streams(self) -> int:
        return self._pace.num_streams

    async def close(self) -> None:
        self._closing = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _open(self, worker_id: str, incarnation: str, address: str) -> WorkerSession:
        channel = open_channel(address, self._rpc)
        session = WorkerSession(
            worker_id,
            incarnation,
            channel,
            self._rpc.max_message_bytes,
            self._max_unread_tokens,
            self._pace,
        )
        try:
            await session.open()
        except WorkerGone:
            self._on_lost(worker_id, incarnation)
            raise
        run = session.run(lambda: self._lost(session), lambda link: self.on_link(worker_id, link))
        task = asyncio.create_task(run, name=f"session {worker_id}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return session

    def _lost(self, session: WorkerSession) -> None:
        self._opening.pop(session.incarnation, None)
        if not self._closing:
            log.warning("decode worker lost", worker=session.worker_id, incarnation=session.incarnation)
            self._on_lost(session.worker_id, session.incarnation)


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return f"no answer within {_CONNECT_TIMEOUT_S:g} s"
