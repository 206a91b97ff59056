"""Who starts and stops workers for the planner. Roles it changes itself, by the workers' own `SetRole`."""

from __future__ import annotations

from typing import Protocol

from headrace.directory.records import Role
from headrace.errors import Unavailable


class Actuator(Protocol):
    """What is added shows in the directory when it serves. Raises HeadraceError."""

    can_add: bool

    async def removable(self) -> set[str]:
        """Ids of workers that can be taken away one by one."""
        ...

    async def add(self, role: Role) -> None: ...

    async def remove(self, worker_id: str) -> None:
        """The worker drains, and ends."""
        ...

    async def close(self) -> None: ...


class NoActuator:
    """Somebody else says how many workers there are."""

    can_add = False

    async def removable(self) -> set[str]:
        return set()

    async def add(self, role: Role) -> None:
        raise Unavailable(f"nobody here can add a {role} worker")

    async def remove(self, worker_id: str) -> None:
        raise Unavailable(f"nobody here can remove {worker_id}")

    async def close(self) -> None: ...
