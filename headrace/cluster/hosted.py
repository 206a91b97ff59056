"""One of our processes on an event loop of its own thread, inside a host with its own main loop: a Ray actor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import uvloop

from headrace.errors import DeadlineExceeded

Report = Callable[[str], None]


class Runnable(Protocol):
    """A worker or a router."""

    http_address: str  # a URL, once it serves; "": it serves no HTTP

    async def start(self) -> str:
        """Serve. Returns the address."""
        ...

    async def stop(self) -> None: ...


class HostedProcess:
    """Starts at once; the methods may be called from any thread."""

    def __init__(self, make: Callable[[Report], Runnable]) -> None:
        """`make(report)` builds the process on its own thread; `report` is told each stage of the start."""
        self.stage = "starting"
        self.http_address = ""  # known with the address
        self._make = make
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
        self._wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException as error:  # handed to whoever waits for the address
            if self._address.done():
                raise
            self._address.set_exception(error)

    async def _serve(self) -> None:
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(stopping.set)
        process = self._make(self._on_stage)
        address = await process.start()
        self.http_address = process.http_address
        self._address.set_result(address)
        self.stage = "serving"
        if not self._stop.is_set():
            await stopping.wait()
        await process.stop()

    def _on_stage(self, stage: str) -> None:
        self.stage = stage
