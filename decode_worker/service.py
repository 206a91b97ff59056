"""Router sessions: starts and aborts come in, step frames go out.

A worker that does not decode has one of these, too, drained: who comes to it, because it did decode a moment ago, is
told at once to go elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import structlog

from decode_worker.hand_off import DecodeContext
from decode_worker.pace import Times
from decode_worker.request import Request
from decode_worker.session import End, HandOffReport, Session
from headrace.errors import Code
from headrace.rpc.v1 import worker_pb2

log = structlog.get_logger()


class DecodeWorker:
    """All sessions of one worker. Used on the event loop only."""

    def __init__(self, context: DecodeContext) -> None:
        self._context = context
        self._sessions: set[Session] = set()
        self._running: dict[tuple[Session, str], tuple[Request, asyncio.Task[None]]] = {}
        self._draining = False
        context.engine.after_step(self._flush)

    @property
    def num_requests(self) -> int:
        return len(self._running)

    def drain(self) -> None:
        """Take no new requests; those under way go on."""
        self._draining = True

    def tell(self, link: worker_pb2.Link) -> None:
        """Every router learns what the way to another worker is worth now."""
        for session in self._sessions:
            session.add_link(link)

    def resume(self) -> None:
        """Take new requests again."""
        self._draining = False

    def hand_back(self) -> None:
        """End what runs. Routers have it go on elsewhere, behind what they have got of it."""
        for _, task in self._running.values():
            task.cancel()

    async def session(
        self, requests: AsyncIterator[worker_pb2.SessionRequest]
    ) -> AsyncIterator[worker_pb2.StepFrame]:
        """One router's session, until either side ends it. Its requests end with it."""
        session = Session(
            self._context.reads.peers.own.incarnation, self._context.reads.peers.layout.transport
        )
        self._sessions.add(session)
        listener = asyncio.create_task(self._listen(session, requests), name="session")
        try:
            async for frame in session.frames():
                yield frame
        finally:
            listener.cancel()
            self._sessions.discard(session)
            for (owner, _), (_, task) in list(self._running.items()):
                if owner is session:
                    task.cancel()

    async def _listen(self, session: Session, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        async for message in requests:
            if message.WhichOneof("action") == "start":
                self._begin(session, message.start)
            else:
                self._abort(session, message.abort)

    def _begin(self, session: Session, start: worker_pb2.StartRequest) -> None:
        key = (session, start.request_id)
        refusal = None
        if self._draining:
            refusal = End(error_code=Code.UNAVAILABLE, error_message="the worker does not take requests now")
        elif key in self._running:
            refusal = End(
                error_code=Code.ALREADY_EXISTS, error_message=f"request {start.request_id} is running"
            )
        if refusal is not None:
            session.add_end(start.request_id, refusal, HandOffReport(), Times())
            session.flush()
            return
        request = Request(self._context, start, session)
        task = asyncio.create_task(request.run(), name=f"request {start.request_id}")
        self._running[key] = request, task
        task.add_done_callback(lambda _: self._running.pop(key, None))

    def _abort(self, session: Session, abort: worker_pb2.AbortRequest) -> None:
        """Nothing for a request or choice that is unknown or over."""
        running = self._running.get((session, abort.request_id))
        if running is None:
            return
        request, task = running
        if abort.HasField("choice"):
            request.abort_choice(abort.choice)
        else:
            task.cancel()

    def _flush(self) -> None:
        for session in self._sessions:
            session.flush()
