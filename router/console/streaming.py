"""Answers in HTTP: errors of ours with their status, and server-sent events. A client that leaves ends the work."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog
from pydantic import TypeAdapter
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from headrace.errors import HeadraceError, InternalError
from router.http.call import STATUS, client_left

log = structlog.get_logger()

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
_JSON = TypeAdapter(object)


def error_response(error: HeadraceError) -> Response:
    headers: dict[str, str] = {}
    if error.retry_after_s:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    status, _ = STATUS.get(error.code, (500, ""))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse({"error": _content(error)}, status, headers)


def event(content: object) -> bytes:
    """One server-sent event: dataclasses and plain values as JSON, on one line."""
    return framed(_JSON.dump_json(content))


def framed(json: bytes) -> bytes:
    return b"data: " + json + b"\n\n"


class EventStream:
    """A response: events, as bytes, until they end or the client leaves; then the generator is closed before this
    returns. An error before the first one is the status of the answer, a later one the last event.
    """

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self._events = events
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send), name="events")
        leaving = asyncio.create_task(client_left(receive), name="client leaves")
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            error = await self._outcome(sending)
            if error is not None:
                await self._fail(error, scope, receive, send)
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _outcome(self, sending: asyncio.Task[None]) -> HeadraceError | None:
        """What is to be told to the client."""
        if not sending.done():  # the client left
            return None
        try:
            await sending
        except HeadraceError as error:
            return error
        except OSError:
            return None  # the connection broke
        except Exception:
            log.exception("console request failed")
            return InternalError("an error inside the router; its log has more")
        return None

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for each in events:
                await self._send(send, each)
        await self._send(send, b"", more=False)

    async def _fail(self, error: HeadraceError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._started:
            await error_response(error)(scope, receive, send)
            return
        await self._send(send, event({"kind": "error", **_content(error)}))
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        if not self._started:
            self._started = True
            start: Message = {"type": "http.response.start", "status": 200, "headers": _HEADERS}
            await send(start)
        await send({"type": "http.response.body", "body": body, "more_body": more})


def _content(error: HeadraceError) -> dict[str, str]:
    return {"code": error.code.value, "message": str(error)}
