"""Workers of the cluster that `headrace up` keeps: actors on Ray, placed and drained by the process that placed the
others. So they end with it, and not with the planner.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from headrace.directory.records import Role


class Workers(Protocol):
    """Of `headrace up`. The calls block; each in a thread of its own. Raise HeadraceError."""

    def worker_names(self) -> set[str]: ...

    def add_worker(self, role: Role) -> str:
        """Returns its name as soon as it has a place."""
        ...

    def remove_worker(self, name: str) -> None:
        """Drain it, end it, and give its place back."""
        ...


class RayActuator:
    can_add = True

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def removable(self) -> set[str]:
        return self._workers.worker_names()

    async def add(self, role: Role) -> None:
        await asyncio.to_thread(self._workers.add_worker, role)

    async def remove(self, worker_id: str) -> None:
        await asyncio.to_thread(self._workers.remove_worker, worker_id)

    async def close(self) -> None: ...
