"""Keeps processes running on Ray: starts them, starts anew what dies, or each in turn on request, and ends them all.

    place ─▶ waits for a place ─▶ starts ─▶ serves ── died ─▶ pause, longer each time ─▶ place …

Every life of a process has a place, an actor and an incarnation of its own, so an old life that lives on somewhere is
fenced off by the directory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import structlog
from ray.exceptions import RayError

from headrace.cluster import placement
from headrace.cluster.placement import WAITING, PlacedProcess, ProcessStatus
from headrace.cluster.process import ProcessSpec
from headrace.config import Settings
from headrace.errors import DeadlineExceeded, HeadraceError, NotFound, Unavailable

log = structlog.get_logger()

_POLL_S = 0.1
_LOOK_AFTER_S = 0.5
_ANSWER_TIMEOUT_S = 1.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_GOOD_LIFE_S = 60.0  # after it a death is the first one again
_STAND_IN = "-stand-in"
_NOT_PLACED = ProcessStatus("not placed")

OnStage = Callable[[str, str], None]


@dataclass(slots=True, eq=False)
class _Slot:
    """One process over its lives. Whoever holds the lock looks after it."""

    spec: ProcessSpec
    lock: threading.Lock = field(default_factory=threading.Lock)
    placed: PlacedProcess | None = None
    status: ProcessStatus = _NOT_PLACED
    since: float = 0.0  # of the status
    num_failures: int = 0  # in a row
    retry_at: float = 0.0


class Keeper:
    """`start`, any number of `add`, `remove` and `restart`, `stop`."""

    def __init__(
        self, specs: Sequence[ProcessSpec], settings: Settings, on_stage: OnStage = lambda name, stage: None
    ) -> None:
        """`on_stage(name, stage)` is told each change, on whichever thread notices it."""
        self._slots = [_Slot(spec) for spec in specs]
        self._ray = settings.ray
        self._drain_timeout_s = settings.rpc.drain_timeout_s
        self._on_stage = on_stage
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def start(self) -> None:
        """Returns when all serve; until `stop`, what dies is started anew.

        Raises what a start raised, Unavailable naming what has no place and what is free, or DeadlineExceeded naming
        who is late and in which stage. Call `stop` then, too.
        """
        placement.check_feasible([slot.spec for slot in self._slots], placement.capacities())
        for slot in self._slots:
            self._place(slot)
        self._wait_until_serving(self._slots)
        self._thread.start()

    def status(self, name: str) -> ProcessStatus:
        return self._slot(name).status

    def names(self) -> set[str]:
        return {slot.spec.name for slot in self._slots}

    def add(self, spec: ProcessSpec) -> None:
        """Place one more. Returns while it starts. Raises Unavailable naming what the cluster lacks for it."""
        placement.check_feasible([spec], placement.capacities())
        slot = _Slot(spec)
        with slot.lock:
            self._place(slot)
            self._slots.append(slot)

    def remove(self, name: str) -> None:
        """Drain it, end it, give its place back."""
        slot = self._slot(name)
        with slot.lock:
            self._slots.remove(slot)
            self._end(slot)

    def restart(self) -> None:
        """Each worker in turn: drained, and in its place a new one that serves before the next one's turn.

        The only one that decodes gets a stand-in for that time. Raises as `start`; those whose turn had not come
        serve on.
        """
        for slot in [slot for slot in self._slots if slot.spec.kind != "router"]:
            with slot.lock:
                try:
                    self._renew(slot)
                except RayError as error:
                    raise Unavailable(f"{slot.spec.name} not restarted: {error}") from error

    def stop(self) -> None:
        """Drain all, and give their places back."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            serving = [s.placed for s in self._slots if s.placed and s.status.address is not None]
            placement.drain(serving, self._drain_timeout_s)
        finally:
            for slot in self._slots:
                self._remove(slot)

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_AFTER_S):
            for slot in tuple(self._slots):
                if slot.lock.acquire(blocking=False):
                    try:
                        self._look_after(slot)
                    except RayError as error:  # its head, perhaps; the processes serve on
                        log.warning("Ray does not answer", process=slot.spec.name, error=str(error))
                    except Exception:  # one round; the next one may succeed
                        log.exception("process not looked after", process=slot.spec.name)
                    finally:
                        slot.lock.release()

    def _slot(self, name: str) -> _Slot:
        for slot in self._slots:
            if slot.spec.name == name:
                return slot
        raise NotFound(f"no process {name!r} here")

    def _renew(self, slot: _Slot) -> None:
        with ExitStack() as stack:
            if slot not in self._slots:  # removed meanwhile
                return
            if slot.spec.kind != "prefill" and not self._others_decode(slot):
                stack.callback(self._end, self._stand_in(slot.spec))
            self._end(slot)
            self._place(slot)
            self._wait_until_serving([slot])

    def _look_after(self, slot: _Slot) -> None:
        if slot not in self._slots:  # removed since this round began
            return
        if slot.placed is None:
            if time.monotonic() >= slot.retry_at:
                self._place(slot)
            return
        try:
            self._note(slot, slot.placed.status(_ANSWER_TIMEOUT_S))
        except HeadraceError as error:
            self._failed(slot, error)

    def _failed(self, slot: _Slot, error: HeadraceError) -> None:
        lived_well = slot.status.address is not None and time.monotonic() - slot.since > _GOOD_LIFE_S
        slot.num_failures = 1 if lived_well else slot.num_failures + 1
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(slot.num_failures - 1, 16))
        slot.retry_at = time.monotonic() + pause_s
        log.error("process ended", process=slot.spec.name, starts_anew_in_s=pause_s, error=str(error))
        self._remove(slot)
        self._note(slot, ProcessStatus(f"starts anew in {pause_s:g} s"))

    def _place(self, slot: _Slot) -> None:
        others = [other.placed for other in self._slots if other.placed is not None]
        slot.placed = placement.place(slot.spec, others)
        self._note(slot, ProcessStatus("gets a place"))

    def _note(self, slot: _Slot, status: ProcessStatus) -> None:
        if status == slot.status:
            return
        slot.status, slot.since = status, time.monotonic()
        stage = status.stage
        if stage == WAITING and slot.placed is not None:
            stage = f"{WAITING}: {slot.placed.missing_room()}"
        self._on_stage(slot.spec.name, stage)

    def _wait_until_serving(self, slots: Sequence[_Slot]) -> None:
        placed_at = time.monotonic()  # or later, for the last one
        while late := [slot for slot in slots if slot.status.address is None]:
            for slot in late:
                assert slot.placed is not None
                self._note(slot, slot.placed.status(_POLL_S))
            now = time.monotonic()
            if waiting := [slot for slot in late if slot.status.stage == WAITING]:
                self._check_waiting(waiting[0], now)
                placed_at = now
            if now - placed_at > self._ray.start_timeout_s:
                stages = ", ".join(f"{slot.spec.name} ({slot.status.stage})" for slot in late)
                raise DeadlineExceeded(f"not serving after {self._ray.start_timeout_s:g} s: {stages}")
            time.sleep(_POLL_S)

    def _check_waiting(self, slot: _Slot, now: float) -> None:
        if slot.placed is not None and now - slot.since > self._ray.place_timeout_s:
            raise Unavailable(
                f"{slot.spec.name} found no place within {self._ray.place_timeout_s:g} s:"
                f" {slot.placed.missing_room()}"
            )

    def _others_decode(self, slot: _Slot) -> bool:
        return any(
            other.spec.kind in ("decode", "both") and other.status.address is not None
            for other in self._slots
            if other is not slot
        )

    def _stand_in(self, spec: ProcessSpec) -> _Slot:
        slot = _Slot(replace(spec, name=f"{spec.name}{_STAND_IN}"))
        try:
            placement.check_feasible([slot.spec], placement.capacities())
            self._place(slot)
            self._wait_until_serving([slot])
        except BaseException:
            self._remove(slot)
            raise
        return slot

    def _end(self, slot: _Slot) -> None:
        if slot.placed is not None and slot.status.address is not None:
            placement.drain([slot.placed], self._drain_timeout_s)
        self._remove(slot)
        self._note(slot, ProcessStatus("ended"))

    def _remove(self, slot: _Slot) -> None:
        if slot.placed is not None:
            slot.placed.remove()
            slot.placed = None
