"""What a worker does at present, and how that changes while it runs.

    serving ─▶ leaving: the directory says "draining" ─▶ nothing of what it gives up runs ─▶ serving, as the other
                 └ no pair would be left, or it failed ─▶ serving, as before

Cache, transport, leases and incarnation stay: they name the process and its memory. What fences the old role's work off
is the worker itself: it asks itself with each request whether it does that now, so a router or reader with an old view
is told to go elsewhere, and no agreement on who does what is needed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import structlog

from decode_worker.service import DecodeWorker
from headrace.clock import Deadline, SystemClock
from headrace.directory.records import Role, WorkerRecord
from headrace.errors import AlreadyExists, FleetTooSmall, HeadraceError, Unavailable
from prefill_worker.service import KvExchangeService

log = structlog.get_logger()

_NOTICE_TIMEOUT_S = 10.0  # without notice there is no change
_TELL_TIMEOUT_S = 2.0  # unless it is forced; and a new role is told later where it can not be told now
_NOTICE_S = 0.05  # from telling the directory to turning work away: routers know by then
_POLL_S = 0.005
_HAND_BACK_TIMEOUT_S = 5.0


class Surroundings(Protocol):
    """What a change of role needs of its worker."""

    async def others(self) -> Iterable[WorkerRecord]:
        """Workers that this one can exchange blocks with. Raises Unavailable."""
        ...

    async def tell(self, timeout_s: float) -> None:
        """Have everybody know what the worker's record says now. Raises Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class RoleChange:
    """What was done. Seconds of waiting for running work, and of all else."""

    before: Role
    drain_s: float = 0.0
    switch_s: float = 0.0
    num_handed_back: int = 0


class WorkerRole:
    """Used on the event loop only. `close` before the worker ends."""

    def __init__(
        self,
        role: Role,
        worker_id: str,
        exchange: KvExchangeService,
        decode: DecodeWorker,
        surroundings: Surroundings,
    ) -> None:
        self.current = role
        self.is_leaving = False
        self._worker_id = worker_id
        self._exchange = exchange
        self._decode = decode
        self._surroundings = surroundings
        self._wanted = role
        self._changing: asyncio.Task[RoleChange] | None = None
        self._closed = False
        self._serve(role)

    async def change(self, role: Role, drain_timeout_s: float, *, force: bool) -> RoleChange:
        """Returns when it is done; goes on when the caller leaves. Raises FleetTooSmall, AlreadyExists while another
        change is under way, or Unavailable.
        """
        if self._closed:
            raise Unavailable(f"{self._worker_id} is about to end")
        if self._changing is None:
            deadline = Deadline.after(drain_timeout_s, SystemClock())
            self._wanted = role
            self._changing = asyncio.create_task(self._change(role, deadline, force=force), name="role")
            self._changing.add_done_callback(self._done)
        elif self._wanted != role:
            raise AlreadyExists(f"{self._worker_id} is changing its role to {self._wanted}")
        changing = self._changing
        await asyncio.wait([changing])
        if changing.cancelled():
            raise Unavailable(f"{self._worker_id} is about to end, and keeps its role {self.current}")
        return changing.result()

    async def close(self) -> None:
        """No further change. One that is under way is given up."""
        self._closed = True
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.gather(self._changing, return_exceptions=True)

    async def _change(self, role: Role, deadline: Deadline, *, force: bool) -> RoleChange:
        before = self.current
        if role == before:
            return RoleChange(before)
        if not force:
            await self._check_pair(role)
        started_at = time.monotonic()
        self.is_leaving = True
        try:
            await self._give_notice(role, force=force)
            drained_from = time.monotonic()
            num_handed_back = await self._drain(role, deadline)
            drain_s = time.monotonic() - drained_from
            self.current = role
        finally:
            self.is_leaving = False
            self._serve(self.current)
            if not self._closed:
                await self._tell()
        change = RoleChange(before, drain_s, time.monotonic() - started_at - drain_s, num_handed_back)
        log.info("role changed", role=role, **asdict(change))
        return change

    async def _give_notice(self, role: Role, *, force: bool) -> None:
        """Have routers send nothing more. Raises as `_check_pair`: of two that leave at once, one sees the other."""
        if force:
            await self._tell()
        else:
            await self._surroundings.tell(_NOTICE_TIMEOUT_S)
            await self._check_pair(role)
        await asyncio.sleep(_NOTICE_S)

    async def _check_pair(self, role: Role) -> None:
        """Raises FleetTooSmall when after the change there would be nobody to hand prompts over, or to decode."""
        others = [record.role for record in await self._surroundings.others() if not record.draining]
        roles = [*others, role]
        if Role.PREFILL not in roles:
            raise FleetTooSmall(self._worker_id, role, "prefills")
        if all(each == Role.PREFILL for each in roles):
            raise FleetTooSmall(self._worker_id, role, "decodes")

    async def _drain(self, role: Role, deadline: Deadline) -> int:
        """Take nothing of what is given up, and wait for what runs of it; from the deadline on, hand it back. Returns
        how much of it. Raises Unavailable when even that does not end it.
        """
        gives_up_prefill, gives_up_decode = not _prefills(role), not _decodes(role)
        self._exchange.prefills = not gives_up_prefill
        if gives_up_decode:
            self._decode.drain()

        def num_busy() -> int:
            prompts = self._exchange.num_streams if gives_up_prefill else 0
            return prompts + (self._decode.num_requests if gives_up_decode else 0)

        last = replace(deadline, at_s=deadline.at_s + _HAND_BACK_TIMEOUT_S)
        num_late = 0
        while busy := num_busy():
            if not deadline.remaining_s():
                num_late = num_late or busy
                if gives_up_prefill:
                    self._exchange.hand_back()
                if gives_up_decode:
                    self._decode.hand_back()
            if not last.remaining_s():
                raise Unavailable(f"{self._worker_id} could not end {busy} requests")
            await asyncio.sleep(_POLL_S)
        return num_late

    def _serve(self, role: Role) -> None:
        self._exchange.prefills = _prefills(role)
        if _decodes(role):
            self._decode.resume()
        else:
            self._decode.drain()

    async def _tell(self) -> None:
        """Those who do not hear it are turned away by the services."""
        try:
            await self._surroundings.tell(_TELL_TIMEOUT_S)
        except Unavailable as error:
            log.warning("role not published", error=str(error))

    def _done(self, task: asyncio.Task[RoleChange]) -> None:
        self._changing = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            known = isinstance(error, HeadraceError)
            log.warning("role not changed", error=str(error), exc_info=None if known else error)


def _prefills(role: Role) -> bool:
    return role != Role.DECODE


def _decodes(role: Role) -> bool:
    return role != Role.PREFILL
