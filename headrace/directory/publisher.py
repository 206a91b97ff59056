"""A worker's voice in the directory: its record, and which blocks it holds in which tier. Runs on its event loop.

    engine step ─▶ add(stored, removed) ─▶ pending changes, load by router ── every publish_interval_s ─▶ directory
    prompt arrives ─▶ hurry() ─────────────────────────────────────── within milliseconds ──┘

The set of own blocks is the truth. Whenever the directory may not agree with it (first publish, failed write,
emptied or older Redis, expired record) the whole set is registered anew. Nothing else is remembered of an
outage, so memory is bounded by the worker's own cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

import structlog

from headrace.clock import Clock, SystemClock
from headrace.config import DirectorySettings
from headrace.directory.base import Directory, retry_delay_s
from headrace.directory.records import DirectoryEvent, EventKind, WorkerRecord
from headrace.errors import Unavailable
from headrace.tier import Tier

log = structlog.get_logger()

_START_TIMEOUT_S = 10.0
_LEAST_INTERVAL_S = 0.002
_MAX_EVENT_BLOCKS = 2048  # an event with more is announced without them: watchers read the set


class Publisher:
    """`start`, any number of `add`, `stop`. Used on one event loop."""

    def __init__(
        self,
        directory: Directory,
        record_source: Callable[[], WorkerRecord],
        settings: DirectorySettings,
        clock: Clock | None = None,
    ) -> None:
        """`record_source` gives the record as it is now; worker id and incarnation never change."""
        self._directory = directory
        self._record_source = record_source
        self._refresh_s = settings.worker_ttl_s / 3
        self._interval_s = min(settings.publish_interval_s, self._refresh_s)
        self._clock = clock or SystemClock()
        self._blocks: dict[bytes, Tier] = {}
        # Pending: blocks that are not in the tier that the directory was told, with that one. None: in none.
        self._pending: dict[bytes, Tier | None] = {}
        self._sequence = 0
        self._in_step = False  # the directory held all but the pending changes when it last answered
        self._published: WorkerRecord | None = None
        self._published_at = 0.0
        self._num_failures = 0
        self._superseded = False
        self._stopping = False
        self._wake = asyncio.Event()  # to stop, or to publish at once
        self._telling: set[asyncio.Future[None]] = set()  # of those who wait in `told`
        self._task: asyncio.Task[None] | None = None

    def add(self, stored: Mapping[bytes, Tier], removed: list[bytes]) -> None:
        """Blocks by the tier they are in now, and blocks that are in none any more. A hash in both was removed first.

        What comes and goes between two publishes cancels out.
        """
        for block in removed:
            if block in self._blocks:
                self._note(block, self._blocks.pop(block), None)
        for block, tier in stored.items():
            self._note(block, self._blocks.get(block), tier)
            self._blocks[block] = tier

    def hurry(self) -> None:
        """What the record tells now can not wait: until they know, routers send the next prompt here, too."""
        if self._in_step:
            self._wake.set()

    async def told(self, timeout_s: float) -> None:
        """Returns once the directory knows what the record says now. Raises Unavailable after `timeout_s`."""
        telling: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._telling.add(telling)
        self._wake.set()
        try:
            async with asyncio.timeout(timeout_s):
                await telling
        except TimeoutError:
            raise Unavailable(f"the directory could not be told within {timeout_s:g} s") from None
        finally:
            self._telling.discard(telling)

    async def start(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Join the directory, taking the worker id over from an earlier incarnation; then publish in the background.

        Raises Unavailable, naming the directory, if that does not succeed within `timeout_s`.
        """
        deadline = self._clock.now() + timeout_s
        num_failures = 0
        while True:
            try:
                await self._register(self._record_source(), take_over=True)
                break
            except Unavailable as error:
                num_failures += 1
                delay_s = retry_delay_s(num_failures, self._refresh_s)
                if self._clock.now() + delay_s > deadline:
                    raise Unavailable(
                        f"could not join the cluster within {timeout_s:g} s: {error}"
                    ) from error
            await asyncio.sleep(delay_s)
        self._task = asyncio.create_task(self._run(), name="directory publisher")
        self._task.add_done_callback(_log_failure)

    async def stop(self) -> None:
        """Stop publishing and leave the directory at once; if it is out of reach, the record expires."""
        if self._task is None:
            return
        # A write that is under way ends first: were it cut off, it could still arrive behind our leaving.
        self._stopping = True
        self._wake.set()
        await asyncio.wait([self._task])
        self._task = None
        record = self._record_source()
        try:
            await self._directory.remove(record.worker_id, record.incarnation)
        except Unavailable as error:
            log.warning("could not leave the directory, the record will expire", error=str(error))

    async def publish_pending(self) -> None:
        """Bring the directory up to date, if there is anything to tell. Raises Unavailable."""
        telling = list(self._telling)
        record = self._record_source()
        try:
            if not (self._in_step and await self._publish(record)):
                await self._claim(record)
        except Unavailable:
            self._in_step = False
            raise
        for waiting in telling:
            if not waiting.done():
                waiting.set_result(None)

    async def _run(self) -> None:
        delay_s = self._interval_s
        while not self._stopping:
            await self._sleep(delay_s)
            if not self._stopping:
                delay_s = await self._try_publish()

    async def _try_publish(self) -> float:
        """Publish what is pending. Returns how long to wait before the next time; an outage is logged once."""
        try:
            await self.publish_pending()
        except Unavailable as error:
            self._num_failures += 1
            if self._num_failures == 1:
                log.warning("directory lost, serving goes on", error=str(error))
            return retry_delay_s(self._num_failures, self._refresh_s)
        if self._num_failures:
            log.info("directory is back", num_blocks=len(self._blocks))
        self._num_failures = 0
        return self._refresh_s if self._superseded else self._interval_s

    async def _sleep(self, delay_s: float) -> None:
        """Or until it is woken, which is not heeded more often than the directory can take."""
        try:
            async with asyncio.timeout(delay_s):
                await asyncio.sleep(_LEAST_INTERVAL_S)
                await self._wake.wait()
        except TimeoutError:
            pass
        if not self._stopping:
            self._wake.clear()

    async def _claim(self, record: WorkerRecord) -> None:
        """Register anew. A worker id that another incarnation has taken over is left to it, until it goes."""
        ours = await self._register(record, take_over=False)
        if self._superseded == ours:
            who = {"worker": record.worker_id, "incarnation": record.incarnation}
            if ours:
                log.info("worker id is ours again", **who)
            else:
                log.error("another process has taken over this worker id, not published", **who)
        self._superseded = not ours

    async def _publish(self, record: WorkerRecord) -> bool:
        """Publish pending changes. Returns False if the directory is not where we left it."""
        assert self._published is not None
        news = replace(record, load=self._published.load) != self._published
        shares = record.load.shares if record.load.shares != self._published.load.shares else None
        if not (news or shares is not None or self._pending or self._refresh_due()):
            return True
        pending, self._pending = self._pending, {}
        whole = news or len(pending) > _MAX_EVENT_BLOCKS
        event = DirectoryEvent(
            worker_id=record.worker_id,
            incarnation=record.incarnation,
            sequence=self._next_sequence(),
            stored={block: self._blocks[block] for block in pending if block in self._blocks},
            removed=tuple(block for block in pending if block not in self._blocks),
            kind=EventKind.RELOAD if whole else EventKind.CHANGED,
            shares=shares,
        )
        self._in_step = await self._directory.publish(record, event)
        if self._in_step:
            self._note_published(record)
        return self._in_step

    async def _register(self, record: WorkerRecord, *, take_over: bool) -> bool:
        """Send record and all blocks. Returns False if another incarnation holds the worker id."""
        blocks = dict(self._blocks)
        self._pending = {}
        self._in_step = await self._directory.register(
            record, self._next_sequence(), blocks, take_over=take_over
        )
        if self._in_step:
            self._note_published(record)
        return self._in_step

    def _note(self, block: bytes, before: Tier | None, after: Tier | None) -> None:
        if self._pending.setdefault(block, before) is after:
            del self._pending[block]

    def _next_sequence(self) -> int:
        # Counted on even if the write fails: it may have been done, and a number must not name two events.
        self._sequence += 1
        return self._sequence

    def _refresh_due(self) -> bool:
        return self._clock.now() - self._published_at >= self._refresh_s

    def _note_published(self, record: WorkerRecord) -> None:
        self._published, self._published_at = record, self._clock.now()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("directory publisher failed", exc_info=task.exception())
