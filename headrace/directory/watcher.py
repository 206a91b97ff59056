"""Keeps a `DirectoryView` true to the directory. Owned by the router process; runs on its event loop.

    synchronise: end of the stream ─▶ all records ─▶ block sets that differ
    follow:      next events ─▶ apply; one is missing, or RELOAD ─▶ that worker's set again; at intervals all records

Without the directory the view stays as it is. When it is back, perhaps empty, every known worker has a TTL to
show up again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import structlog

from headrace.clock import Clock, SystemClock
from headrace.config import DirectorySettings
from headrace.directory.base import Directory, retry_delay_s
from headrace.directory.records import DirectoryEvent, EventKind
from headrace.directory.view import DirectoryView
from headrace.errors import Unavailable

log = structlog.get_logger()

_LONGEST_RETRY_S = 1.0
_REFRESHES_PER_TTL = 5


class Watcher:
    """`run` does everything; its two halves are public for tests."""

    def __init__(
        self,
        directory: Directory,
        view: DirectoryView,
        settings: DirectorySettings,
        clock: Clock | None = None,
    ) -> None:
        self._directory = directory
        self._view = view
        self._ttl_s = settings.worker_ttl_s
        self._refresh_interval_s = settings.worker_ttl_s / _REFRESHES_PER_TTL
        self._clock = clock or SystemClock()
        self._position = ""
        self._expires_at: dict[str, float] = {}  # by worker id
        self._refreshed_at = 0.0
        self._answered_at = self._clock.now()
        self.event_lag_s = 0.0  # how old the last event was when it came, by Redis's wall clock and ours

    def silence_s(self) -> float:
        """Since the directory last answered."""
        return self._clock.now() - self._answered_at

    async def run(self) -> None:
        """Until cancelled."""
        num_failures = 0
        while True:
            try:
                await self.synchronise()
                if num_failures:
                    log.info("directory is back", num_workers=len(self._view.workers))
                num_failures = 0
                while True:
                    await self.follow(self._refresh_interval_s)
            except Unavailable as error:
                num_failures += 1
                self._view.report_age_s = self.silence_s()
                if num_failures == 1:
                    log.warning("directory lost, the last view serves on", error=str(error))
            await asyncio.sleep(retry_delay_s(num_failures, _LONGEST_RETRY_S))

    async def synchronise(self) -> None:
        """Start over, from nothing or after an outage. Raises Unavailable; the view is then what it was, or newer."""
        self._position, _ = await self._directory.events("", 0)
        self._expires_at = dict.fromkeys(self._view.workers, self._clock.now() + self._ttl_s)
        await self._refresh()
        await self._load(list(self._view.workers))
        self._view.report_age_s = 0.0

    async def follow(self, timeout_s: float) -> None:
        """One batch of events, waiting up to `timeout_s` for the first. Raises Unavailable: then `synchronise`."""
        self._position, events = await self._directory.events(self._position, timeout_s)
        self._answered_at = self._clock.now()
        if events:
            self.event_lag_s = self._view.report_age_s = _age_s(self._position)
        unread = {event.worker_id for event in events if not self._apply(event)}
        if unread or self._clock.now() - self._refreshed_at >= self._refresh_interval_s:
            await self._refresh()
        await self._load(unread)

    def _apply(self, event: DirectoryEvent) -> bool:
        """Returns False if the worker has to be read anew."""
        known = self._view.has(event.worker_id, event.incarnation)
        if event.kind is EventKind.LEFT:
            if known:
                self._drop(event.worker_id, event.incarnation, "left")
            return True
        if event.kind is EventKind.CHANGED:
            # One that is not in the view was marked gone, or can not be read: left to the next refresh.
            return not known or self._view.apply(event)
        sequence = self._view.sequence(event.worker_id) if known else None
        return sequence is not None and event.sequence <= sequence

    async def _refresh(self) -> None:
        """All records: take in what is new, drop what has expired."""
        records = await self._directory.workers()
        now = self._refreshed_at = self._clock.now()
        unread: list[str] = []
        for record, remaining_s in records.items():
            if self._view.is_gone(record.worker_id, record.incarnation, self._ttl_s):
                continue
            if not self._view.has(record.worker_id, record.incarnation):
                log.info("worker joined", worker=record.worker_id, incarnation=record.incarnation)
                unread.append(record.worker_id)
            self._view.admit(record)
            # Never earlier than before: after an outage everybody has a whole TTL.
            self._expires_at[record.worker_id] = max(
                self._expires_at.get(record.worker_id, now), now + remaining_s
            )
        self._drop_expired(now)
        await self._load(unread)

    def _drop_expired(self, now: float) -> None:
        for record in list(self._view.workers.values()):
            if self._expires_at[record.worker_id] <= now:
                self._drop(record.worker_id, record.incarnation, "expired")
        self._expires_at = {name: at for name, at in self._expires_at.items() if name in self._view.workers}

    def _drop(self, worker_id: str, incarnation: str, reason: str) -> None:
        log.info("worker gone", worker=worker_id, incarnation=incarnation, reason=reason)
        self._view.drop(worker_id, incarnation)

    async def _load(self, worker_ids: Iterable[str]) -> None:
        """Read the workers' sets of blocks. Where the directory has none (at the moment), the view's stays."""
        for worker_id in worker_ids:
            record = self._view.workers.get(worker_id)
            if record is None:
                continue
            snapshot = await self._directory.blocks(worker_id, record.incarnation)
            if snapshot is not None:
                self._view.load(worker_id, record.incarnation, snapshot)


def _age_s(position: str) -> float:
    """Redis names its events by milliseconds and a number. 0 for another directory."""
    milliseconds, separator, _ = position.partition("-")
    return max(0.0, time.time() - int(milliseconds) / 1e3) if separator else 0.0
