"""What the console answers over HTTP. To be mounted in a Starlette application beside other routes.

The page is for anybody; what it shows and does asks for the credentials that every entrance asks for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import wraps

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from headrace.errors import DeadlineExceeded, HeadraceError, InvalidRequest, RequestCancelled
from router.console.observer import Observer
from router.console.page import page
from router.console.playground import events, question_from_json, request_of
from router.console.streaming import EventStream, error_response, event, framed
from router.front_door import FrontDoor, Generation

_MAX_BODY_BYTES = 4 << 20
_READ_TIMEOUT_S = 30.0

_Handler = Callable[[Request], Awaitable[Response | EventStream]]


def routes(observer: Observer, door: FrontDoor) -> list[BaseRoute]:
    console = _Console(observer, door)
    return [
        Route("/console", console.page, methods=["GET"]),
        Route("/console/state", _answered(console.state), methods=["GET"]),
        Route("/console/events", _answered(console.follow), methods=["GET"]),
        Route("/console/generate", _answered(console.generate), methods=["POST"]),
    ]


class _Console:
    def __init__(self, observer: Observer, door: FrontDoor) -> None:
        self._observer = observer
        self._door = door

    async def page(self, request: Request) -> Response:
        del request
        return page()

    async def state(self, request: Request) -> Response:
        await self._door.callers.caller(_authorization(request))
        return Response(
            self._observer.json(), media_type="application/json", headers={"cache-control": "no-store"}
        )

    async def follow(self, request: Request) -> EventStream:
        """Server-sent events: a state each second."""
        await self._door.callers.caller(_authorization(request))
        return EventStream(self._states())

    async def generate(self, request: Request) -> EventStream:
        """JSON as `Question`; server-sent events as `playground.events`."""
        await self._door.callers.caller(_authorization(request))  # strangers get nothing read
        # A page of another site can post anything but this without asking the browser's leave first.
        media_type = request.headers.get("content-type", "").partition(";")[0].strip()
        if media_type != "application/json":
            raise InvalidRequest("content-type", media_type, "must be application/json")
        question = question_from_json(await _body(request))
        generation = await self._door.accepted(request_of(question), _authorization(request), None)
        return EventStream(_answer(generation))

    async def _states(self) -> AsyncGenerator[bytes]:
        async with aclosing(self._observer.follow()) as states:
            async for state in states:
                yield framed(state)


async def _answer(generation: Generation) -> AsyncGenerator[bytes]:
    async with aclosing(events(generation)) as answer:
        async for each in answer:
            yield event(each)


def _answered(handler: _Handler) -> _Handler:
    @wraps(handler)
    async def answer(request: Request) -> Response | EventStream:
        try:
            return await handler(request)
        except HeadraceError as error:
            return error_response(error)

    return answer


def _authorization(request: Request) -> str:
    return request.headers.get("authorization", "")


async def _body(request: Request) -> bytes:
    """Raises InvalidRequest without reading on when it is too large."""
    chunks, size = list[bytes](), 0
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            async for chunk in request.stream():
                chunks.append(chunk)
                size += len(chunk)
                if size > _MAX_BODY_BYTES:
                    raise InvalidRequest("body", f"over {_MAX_BODY_BYTES} bytes", "is too large")
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {_READ_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise RequestCancelled("the client left") from None
    return b"".join(chunks)
