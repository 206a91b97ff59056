"""An event loop whose time passes only while everybody sleeps, and then at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class LoopClock:
    """The time of the running loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """As if the loop had been busy for so long."""
        self._now_s += seconds

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now_s = max(self._now_s, self._scheduled[0]._when)
        super()._run_once()


def run_virtually(work: Coroutine[Any, Any, _Result]) -> _Result:
    """For work that waits for sleeps only, not for files, sockets or threads."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
