"""Connections: how many there are, and how long a client may take to send a request or to take its answer.

uvicorn has no deadline for a request's head and none for a client that stops reading; both are kept here, where the
transport is. A body that comes slowly is answered by `call.py`, before the deadline here cuts it off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.config import HttpSettings

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: 105\r\n\r\n"
    b'{"error":{"message":"too many connections","type":"unavailable_error","param":null,"code":"UNAVAILABLE"}}'
)
_ANSWER_GRACE_S = 2.0  # for the 408 of a body that is late


def connection_class(settings: HttpSettings) -> type[H11Protocol]:
    """The protocol of a server with these limits."""

    class Connection(H11Protocol):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._reading: Any = None  # the state that the deadline belongs to
            self._read_deadline: asyncio.TimerHandle | None = None
            self._write_deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > settings.max_connections:
                transport.write(_FULL)
                transport.close()
            else:
                self._watch_reading()

        def connection_lost(self, exc: Exception | None) -> None:
            self._read_deadline = _cancelled(self._read_deadline)
            self._write_deadline = _cancelled(self._write_deadline)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_reading()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch_reading()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._write_deadline = self._aborted_after(settings.write_timeout_s)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._write_deadline = _cancelled(self._write_deadline)

        def _watch_reading(self) -> None:
            """One deadline for each head (and the silence before it), and one for each body."""
            state = self.conn.their_state
            if state is self._reading or self.transport.is_closing():
                return
            self._reading = state
            self._read_deadline = _cancelled(self._read_deadline)
            if state is h11.IDLE:
                self._read_deadline = self._aborted_after(settings.read_timeout_s)
            elif state is h11.SEND_BODY:
                self._read_deadline = self._aborted_after(settings.read_timeout_s + _ANSWER_GRACE_S)

        def _aborted_after(self, seconds: float) -> asyncio.TimerHandle:
            abort: Callable[[], None] = self.transport.abort
            return self.loop.call_later(seconds, abort)

    return Connection


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
