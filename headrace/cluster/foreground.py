"""Run one process in the foreground until SIGINT or SIGTERM, then drain it. A second signal ends it at once.

What it can not go on after ends it, too.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import uvloop

from headrace.cluster.hosted import Runnable, until
from headrace.cluster.process import ProcessSpec, build, prepare


def run_in_foreground(spec: ProcessSpec) -> None:
    """Start, wait for a signal, stop. Raises what the start raises."""
    prepared = prepare(spec)
    run_until_signal(lambda: build(prepared, lambda stage: None))


def run_until_signal(make: Callable[[], Runnable]) -> None:
    """The same of a process that `make` builds, on the event loop."""
    uvloop.run(_until_signal(make))


async def _until_signal(make: Callable[[], Runnable]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(signum: signal.Signals) -> None:
        stop.set()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)  # the next one has its default effect

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, on_signal, signum)
    process = make()
    await process.start()
    try:
        await until(stop, process)
    finally:
        await process.stop()
