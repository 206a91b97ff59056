"""One HTTP request: its headers, its body within the limits, its one answer, its errors in OpenAI's shape.

headers ─▶ caller known ─▶ body, at most so large, within its time ─▶ work ─▶ answer, or events and their end
                                                                      └── the client leaves: the work is cancelled
"""

from __future__ import annotations

import asyncio
import json
import math
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import structlog
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from headrace.config import HttpSettings
from headrace.errors import (
    Code,
    DeadlineExceeded,
    HeadraceError,
    InternalError,
    InvalidRequest,
    RequestCancelled,
)
from headrace.rpc.metadata import TRACEPARENT
from router.callers import Callers
from router.http.json_body import Body, parsed

log = structlog.get_logger()

STATUS = {  # and the kind, as OpenAI names it
    Code.INVALID_ARGUMENT: (400, "invalid_request_error"),
    Code.UNAUTHENTICATED: (401, "authentication_error"),
    Code.PERMISSION_DENIED: (403, "permission_error"),
    Code.NOT_FOUND: (404, "not_found_error"),
    Code.ALREADY_EXISTS: (409, "conflict_error"),
    Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    Code.CANCELLED: (499, "cancelled_error"),
    Code.UNAVAILABLE: (503, "unavailable_error"),
    Code.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
_PUBLIC_NAMES = {"text": "prompt", "token_ids": "prompt", "chat": "messages", "grammar": "response_format"}


class BodyTooLarge(InvalidRequest):
    pass


class BodyLate(DeadlineExceeded):
    pass


class Call:
    """`text` and `json` answer at once; `event` begins a stream, which `end` ends."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.path_parameters: Mapping[str, str] = scope.get("path_params", {})
        self.headers = Headers(scope=scope)
        self.authorization = self.headers.get("authorization", "")
        self.request_id = self.headers.get("x-request-id", "") or uuid.uuid4().hex
        self.body = b""
        self._receive = receive
        self._send = send
        self._started = False
        self._ended = False

    @property
    def trace(self) -> dict[str, str]:
        """The caller's W3C trace context, for the request's log lines; empty for none that is valid."""
        found = self.headers.get("traceparent", "")
        return {"traceparent": found} if TRACEPARENT.fullmatch(found) else {}

    @property
    def timeout_s(self) -> float | None:
        """The client's own deadline, by the header x-request-timeout-s. Raises InvalidRequest."""
        text = self.headers.get("x-request-timeout-s")
        if text is None:
            return None
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise InvalidRequest("x-request-timeout-s", text, "must be a number of seconds over 0")
        return seconds

    async def read_body(self, settings: HttpSettings) -> None:
        """Raises BodyTooLarge without reading on, or BodyLate."""
        limit = settings.max_body_bytes
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise BodyTooLarge("body", f"{declared} bytes", f"at most {limit} bytes")
        chunks, size = list[bytes](), 0
        try:
            async with asyncio.timeout(settings.read_timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise RequestCancelled("the client left")
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > limit:
                        raise BodyTooLarge("body", f"over {limit} bytes", f"at most {limit} bytes")
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise BodyLate(f"the body did not arrive within {settings.read_timeout_s:g} s") from None
        self.body = b"".join(chunks)

    async def parsed(self, model: type[Body]) -> Body:
        """The body as `model`. Raises InvalidRequest naming the field."""
        return await parsed(model, self.body)

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it while the client is there. The body has been read. Raises RequestCancelled when it left."""
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(client_left(self._receive))
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise RequestCancelled("the client left")
            if working.cancelled():  # it hung in a write
                raise RequestCancelled("the client does not read")
            working.result()
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def json(
        self, content: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        body = json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
        await self.text(body, "application/json", status, headers)

    async def text(
        self,
        body: bytes,
        media_type: str = "text/plain; charset=utf-8",
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        await self._start(
            status, {"content-length": str(len(body)), "content-type": media_type, **(headers or {})}
        )
        await self._end(body)

    async def event(self, content: object) -> None:
        if not self._started:
            await self._start(
                200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            )
        data = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        await self._send(
            {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
        )

    async def end(self) -> None:
        await self._end(b"data: [DONE]\n\n")

    async def fail(self, error: HeadraceError) -> None:
        """Before the answer has begun with a status of its own, else as the stream's last event."""
        status, content = error_content(error)
        if self._started:
            if not self._ended:
                await self.event(content)
                await self._end(b"")
            return
        headers: dict[str, str] = {}
        if error.retry_after_s:
            headers["retry-after"] = str(math.ceil(error.retry_after_s))
            headers["retry-after-ms"] = str(math.ceil(1000 * error.retry_after_s))
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        if isinstance(error, BodyLate):
            headers["connection"] = "close"
        await self.json(content, status, headers)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self._started = True
        pairs = {"x-request-id": self.request_id, **headers}.items()
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        message: Message = {"type": "http.response.start", "status": status, "headers": encoded}
        await self._send(message)

    async def _end(self, last: bytes) -> None:
        self._ended = True
        await self._send({"type": "http.response.body", "body": last})


async def client_left(receive: Receive) -> None:
    """Returns when it has. The body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Endpoint:
    """An ASGI application that does `work` for one call at a time, whose caller is known and whose body is there."""

    def __init__(
        self, work: Callable[[Call], Coroutine[Any, Any, None]], callers: Callers, settings: HttpSettings
    ) -> None:
        self._work = work
        self._callers = callers
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send)
        with structlog.contextvars.bound_contextvars(**call.trace):
            await answered(call, self._handle(call))

    async def _handle(self, call: Call) -> None:
        await self._callers.caller(call.authorization)  # strangers get nothing read or parsed
        await call.read_body(self._settings)
        await call.run(self._work(call))


async def answered(call: Call, work: Awaitable[None]) -> None:
    """Do it, and answer what it raises."""
    try:
        await work
    except HeadraceError as error:
        await call.fail(error)
    except Exception:
        log.exception("HTTP handler failed", request_id=call.request_id)
        await call.fail(InternalError("unexpected error, see the server's log"))


def error_content(error: HeadraceError) -> tuple[int, dict[str, Any]]:
    """The status and OpenAI's error object."""
    status, kind = STATUS.get(error.code, (500, "server_error"))
    if isinstance(error, BodyTooLarge):
        status = 413
    elif isinstance(error, BodyLate):
        status = 408
    param, message = None, str(error)
    if isinstance(error, InvalidRequest):
        param = _public_name(error.field)
        message = str(InvalidRequest(param, error.value, error.requirement))
    return status, {"error": {"message": message, "type": kind, "param": param, "code": error.code.value}}


def _public_name(field: str) -> str:
    """HTTP's name of a field of GenerateRequest."""
    return _PUBLIC_NAMES.get(field, field.removeprefix("chat.").removesuffix("_json"))
