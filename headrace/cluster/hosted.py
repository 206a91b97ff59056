"""One of our processes on an event loop of its own thread, inside a host with its own main loop: a Ray actor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

import structlog
import uvloop

from headrace.errors import DeadlineExceeded

log = structlog.get_logger()

Report = Callable[[str], None]


class Runnable(Protocol):
    """A worker or a router."""

    http_address: str  # a URL, once it serves; "": it serves no HTTP

    async def start(self) -> str:
        """Serve. Returns the address."""
        ...

    async def failed(self) -> None:
        """Raises what this process can not go on after, when that happens. Does not return."""
        ...

    async def stop(self) -> None: ...


async def until(stopping: asyncio.Event, process: Runnable) -> None:
    """Returns when `stopping` is set. Raises what the process fails by."""
    waits: list[asyncio.Task[Any]] = [
        asyncio.create_task(stopping.wait()),
        asyncio.create_task(process.failed()),
    ]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in done:
            wait.result()
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


class HostedProcess:
    """Starts at once; the methods may be called from any thread."""

    def __init__(
        self, make: Callable[[Report], Runnable], on_failure: Callable[[], None] = lambda: None
    ) -> None:
        """`make(report)` builds the process on its own thread; `report` is told each stage of the start.
        `on_failure()` is called, there, when it has ended by itself after it served.
        """
        self.stage = "starting"
        self.http_address = ""  # known with the address
        self._make = make
        self._on_failure = on_failure
        self._address: Future[str] = Future()
        self._stop = threading.Event()
        self._wake: Callable[[], object] = self._stop.set
        self._thread = threading.Thread(target=self._run, name="process", daemon=True)
        self._thread.start()

    def address(self, timeout_s: float) -> str:
        """Wait until it serves. Raises what its start raised, or DeadlineExceeded naming the stage it is in."""
        try:
            return self._address.result(timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"not serving after {timeout_s:g} s, still {self.stage}") from None

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Drain and stop. Returns whether it ended in time."""
        self._stop.set()
        with suppress(RuntimeError):  # it has ended by itself: its loop is closed
            self._wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException as error:  # handed to whoever waits for the address
            if not self._address.done():
                self._address.set_exception(error)
                return
            log.critical("process ends", error=str(error), exc_info=error)
            self._on_failure()

    async def _serve(self) -> None:
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(stopping.set)
        process = self._make(self._on_stage)
        address = await process.start()
        self.http_address = process.http_address
        self._address.set_result(address)
        self.stage = "serving"
        if self._stop.is_set():
            stopping.set()
        try:
            await until(stopping, process)
        finally:
            await process.stop()

    def _on_stage(self, stage: str) -> None:
        self.stage = stage
