"""The threads that the kernels run on: one team for each engine, pinned to the cores that the process may use."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from headrace.engine.native import library


class Team:
    """`num_threads` threads, of which the caller of a kernel is the first. Where there is one for each core of the
    process they are pinned to them, the caller while it is the one that calls: two that share a core would wait for
    each other's time slice.
    """

    def __init__(self, num_threads: int) -> None:
        kernels: Any = library.load()
        cpus = sorted(os.sched_getaffinity(0))
        self.num_threads = num_threads
        self._cpus = cpus if len(cpus) == num_threads > 1 else None
        self._caller = 0
        self._free_caller: weakref.finalize[[int, Sequence[int]], Team] | None = None
        places = (ctypes.c_int64 * num_threads)(*cpus) if self._cpus else None
        self.handle: int = kernels.team_new(num_threads, places)
        self._free = weakref.finalize(self, kernels.team_free, self.handle)

    def pin_caller(self) -> None:
        """Call before each call of a kernel. The thread that called before, if another, may use all cores again, as it
        may when the team is gone.
        """
        if self._cpus is None or self._caller == threading.get_native_id():
            return
        if self._free_caller is not None:
            self._free_caller()
        self._caller = threading.get_native_id()
        kernels: Any = library.load()
        kernels.pin_caller(self._cpus[0])
        self._free_caller = weakref.finalize(self, _unpin, self._caller, self._cpus)


def _unpin(thread: int, cpus: Sequence[int]) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.sched_setaffinity(thread, cpus)
