"""Run one process in the foreground until SIGINT or SIGTERM, then drain it. A second signal ends it at once."""

from __future__ import annotations

import asyncio
import signal
from typing import Any, Protocol

import uvloop


class Runnable(Protocol):
    async def start(self) -> Any: ...

    async def stop(self) -> None: ...


def run_in_foreground(process: Runnable) -> None:
    """Start, wait for a signal, stop. Raises what `start` raises."""
    uvloop.run(_until_signal(process))


async def _until_signal(process: Runnable) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(signum: signal.Signals) -> None:
        stop.set()
        loop.remove_signal_handler(signum)  # the next one has its default effect

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, on_signal, signum)
    await process.start()
    await stop.wait()
    await process.stop()
