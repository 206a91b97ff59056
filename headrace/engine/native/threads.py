"""The threads that the kernels run on: one team for each engine, pinned to the cores that the process may use."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

from headrace.engine.native import library


class Team:
    """`num_threads` threads, of which the caller of a kernel is the first. Where there is one for each core of the
    process they are pinned to them, the caller at its first call: two that share a core would wait for each other's
    time slice.
    """

    def __init__(self, num_threads: int) -> None:
        kernels: Any = library.load()
        cpus = sorted(os.sched_getaffinity(0))
        self.num_threads = num_threads
        self._cpus = cpus if len(cpus) == num_threads > 1 else None
        self._pinned = False
        places = (ctypes.c_int64 * num_threads)(*cpus) if self._cpus else None
        self.handle: int = kernels.team_new(num_threads, places)
        self._free = weakref.finalize(self, kernels.team_free, self.handle)

    def pin_caller(self) -> None:
        """Call on the thread that will call the kernels from now on."""
        if self._cpus and not self._pinned:
            self._pinned = True
            kernels: Any = library.load()
            kernels.pin_caller(self._cpus[0])
