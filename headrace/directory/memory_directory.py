"""The directory in this process's memory, on a clock of the caller's. For tests: one object is the whole server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.clock import Clock
from headrace.config import DirectorySettings
from headrace.directory.base import BlockSnapshot
from headrace.directory.records import DirectoryEvent, EventKind, WorkerRecord
from headrace.tier import Tier


@dataclass(slots=True)
class _Entry:
    record: WorkerRecord
    sequence: int
    blocks: dict[bytes, Tier]
    expires_at: float


class MemoryDirectory:
    """Implements `Directory`. Keeps all events. Records expire by `clock`; `events` waits in real time."""

    def __init__(self, settings: DirectorySettings, clock: Clock) -> None:
        self._ttl_s = settings.worker_ttl_s
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._events: list[DirectoryEvent] = []
        self._news = asyncio.Condition()

    async def register(
        self, record: WorkerRecord, sequence: int, blocks: Mapping[bytes, Tier], *, take_over: bool
    ) -> bool:
        holder = self._live(record.worker_id)
        if holder is not None and holder.record.incarnation != record.incarnation and not take_over:
            return False
        self._entries[record.worker_id] = _Entry(record, sequence, dict(blocks), self._expiry())
        await self._announce(
            DirectoryEvent(record.worker_id, record.incarnation, sequence, kind=EventKind.RELOAD)
        )
        return True

    async def publish(self, record: WorkerRecord, event: DirectoryEvent) -> bool:
        entry = self._live(record.worker_id)
        if entry is None or (entry.record.incarnation, entry.sequence) != (
            record.incarnation,
            event.sequence - 1,
        ):
            return False
        entry.record, entry.sequence, entry.expires_at = record, event.sequence, self._expiry()
        entry.blocks.update(event.stored)
        for block in event.removed:
            entry.blocks.pop(block, None)
        whole = event.kind is EventKind.RELOAD
        await self._announce(replace(event, stored={}, removed=()) if whole else event)
        return True

    async def remove(self, worker_id: str, incarnation: str) -> None:
        entry = self._entries.get(worker_id)
        if entry is not None and entry.record.incarnation == incarnation:
            del self._entries[worker_id]
        await self._announce(DirectoryEvent(worker_id, incarnation, 0, kind=EventKind.LEFT))

    async def workers(self) -> dict[WorkerRecord, float]:
        live = [entry for worker_id in list(self._entries) if (entry := self._live(worker_id)) is not None]
        return {entry.record: entry.expires_at - self._clock.now() for entry in live}

    async def blocks(self, worker_id: str, incarnation: str) -> BlockSnapshot | None:
        entry = self._live(worker_id)
        if entry is None or entry.record.incarnation != incarnation:
            return None
        return BlockSnapshot(entry.sequence, dict(entry.blocks))

    async def events(self, after: str, timeout_s: float) -> tuple[str, list[DirectoryEvent]]:
        if not after:
            return str(len(self._events)), []
        start = int(after)
        try:
            async with asyncio.timeout(timeout_s), self._news:
                await self._news.wait_for(lambda: len(self._events) > start)
        except TimeoutError:
            pass
        return str(len(self._events)), self._events[start:]

    def _live(self, worker_id: str) -> _Entry | None:
        entry = self._entries.get(worker_id)
        if entry is not None and entry.expires_at <= self._clock.now():
            del self._entries[worker_id]
            return None
        return entry

    def _expiry(self) -> float:
        return self._clock.now() + self._ttl_s

    async def _announce(self, event: DirectoryEvent) -> None:
        async with self._news:
            self._events.append(event)
            self._news.notify_all()
