"""The directory seam: who is alive, and which worker holds which blocks in which tier.

    publisher (worker) ── register, publish, remove ──▶ directory ── workers, blocks, events ──▶ watcher (router)

A worker id belongs to one incarnation at a time. It is free again when that incarnation leaves or lets its
record expire; a process that starts takes it over. Everything of an incarnation (record, name, set of blocks)
changes in one transaction and dies with one lease.

Implementations: `redis_directory` and, for tests, `memory_directory`. All methods raise Unavailable when the
directory does not answer in time; whether a write was done is then unknown, and the publisher registers anew.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace.directory.records import DirectoryEvent, WorkerRecord
from headrace.tier import Tier


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """All blocks of an incarnation as they were right after its event `sequence`."""

    sequence: int
    blocks: Mapping[bytes, Tier]  # by block hash


class Directory(Protocol):
    async def register(
        self, record: WorkerRecord, sequence: int, blocks: Mapping[bytes, Tier], *, take_over: bool
    ) -> bool:
        """Replace record and block set, and announce it as RELOAD event `sequence`.

        `take_over`: also from another incarnation that holds the worker id. Without it such a holder keeps the
        id: returns False, and nothing changes.
        """
        ...

    async def publish(self, record: WorkerRecord, event: DirectoryEvent) -> bool:
        """Refresh the record, apply the event to the block set, and announce it.

        Returns False, and changes nothing, unless the directory holds this incarnation as event `sequence - 1` left it.
        """
        ...

    async def remove(self, worker_id: str, incarnation: str) -> None:
        """Take the incarnation out at once, as a LEFT event. Nothing happens to another one that holds the id now."""
        ...

    async def workers(self) -> dict[WorkerRecord, float]:
        """Every live worker's record, with the seconds after which it expires unless it is refreshed."""
        ...

    async def blocks(self, worker_id: str, incarnation: str) -> BlockSnapshot | None:
        """The blocks that this incarnation holds, None if it is not in the directory."""
        ...

    async def events(self, after: str, timeout_s: float) -> tuple[str, list[DirectoryEvent]]:
        """Events behind the position `after`, oldest first, and the position behind the last of them.

        Waits up to about `timeout_s` for the first. `after` empty: answers at once with the position of the end.
        """
        ...


_FIRST_RETRY_S = 0.1


def retry_delay_s(num_failures: int, longest_s: float) -> float:
    """How long to wait after so many failures in a row: doubling, up to `longest_s`.

    Spread, so that processes which lost the directory together do not come back together.
    """
    return min(longest_s, _FIRST_RETRY_S * 2.0 ** min(num_failures, 16)) * random.uniform(0.5, 1.0)
