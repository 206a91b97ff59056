"""The planner's decision: a pure function of a view, what it remembers, and settings.

Each pool has a *pressure*, the largest of what it is short of, by its limit; above 1 the targets are missed:

    prefill   seconds of prompts that wait / TTFT target        share of the time that it computes / max_prefill_busy
    decode    seconds of a step / ITL target                    KV blocks in use / max_kv_use

With n' workers in place of n: waiting seconds, busy share and KV use become n/n' of what they are; a step has a part
that does not depend on the batch, and only the rest of it becomes n/n'.

A pool is *short* when its pressure was above 1 + band for some intervals in a row, and *spare* when its pressure with
one worker less was below 1 - band for some more. Short and the other one spare: the least loaded worker of that one
changes its role. Short alone: a worker is added; where nobody can add any, a change of role that makes the worst
pressure much better will do. Nobody short, and one spare: one is removed.

Between two changes lies `hold_s`, and thrice that between one and its opposite, unless a pool is below its minimum. A
change has to be worth more than it costs, in seconds of one worker's time:

    gain   the part of a worker that is missing, or too much x payback_s
    cost   draining and switching; of a new worker its start; of a removal the time to compute anew what it has cached
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

from headrace.cluster.planner.view import FleetView, WorkerFigures
from headrace.config import PlannerSettings
from headrace.directory.records import Role

_SWITCH_S = 1.0  # of a change of role, beside the drain
_START_S = 30.0  # of a new worker: it loads a model
_MAX_DRAIN_S = 120.0  # one that says so for longer hangs, and is not waited for
_ANSWER_TOKENS = 200  # that the longest of the running answers still takes
_REVERSE_HOLDS = 3  # between a change and its opposite
_MUCH_BETTER = 0.75  # of the worst pressure

POOLS = (Role.PREFILL, Role.DECODE)


class Kind(StrEnum):
    FLIP = "flip"
    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class Action:
    """`role`: that the worker has from now on, or has had (REMOVE). `worker_id`: of which; "" for one to be added."""

    kind: Kind
    role: Role
    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Targets:
    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Pressure:
    """Of one pool. `of(n)` is what is predicted for n workers; None: too little is known."""

    size: int
    waits_s: float = 0.0  # prefill: predicted time in the queue. Decode: of a step
    shared: float = 0.0  # what becomes n/n' with n' workers, by its limit
    fixed: float = 0.0  # what does not
    use: float = 0.0  # busy share or KV use by its limit
    known: bool = True

    def of(self, size: int) -> float | None:
        if not self.known:
            return None
        if size <= 0:
            return math.inf
        ratio = self.size / size
        return max(self.fixed + self.shared * ratio, self.use * ratio)

    @property
    def now(self) -> float | None:
        return self.of(self.size)


@dataclass(frozen=True, slots=True)
class Streak:
    """Intervals in a row."""

    short: int = 0
    spare: int = 0


@dataclass(frozen=True, slots=True)
class History:
    """What the planner remembers from one decision to the next."""

    streaks: tuple[Streak, Streak] = (Streak(), Streak())  # in the order of POOLS
    changed_at_s: float = -math.inf
    last: Action | None = None
    expected: int = 0  # workers after the last change; until there are so many, it is under way


@dataclass(frozen=True, slots=True)
class Decisions:
    """At most one change at a time: what it does has to show before the next one. `why`: always said."""

    pressures: tuple[Pressure, Pressure]
    history: History
    why: str
    actions: tuple[Action, ...] = field(default=())


def decide(
    view: FleetView, history: History, settings: PlannerSettings, targets: Targets, *, can_add: bool = False
) -> Decisions:
    """`can_add`: there is somebody to start and stop workers; without, roles change and nothing else."""
    pressures = prefill_pressure(view, settings, targets), decode_pressure(view, settings, targets)
    streaks = tuple(
        _streak(old, pressure, settings, minimum)
        for old, pressure, minimum in zip(history.streaks, pressures, _minima(settings), strict=True)
    )
    history = replace(history, streaks=(streaks[0], streaks[1]))
    pause = _why_wait(view, history, settings)
    if pause:
        return Decisions(pressures, history, pause)
    chosen = _Case(view, history, settings, pressures, can_add=can_add).choose()
    if isinstance(chosen, str):
        return Decisions(pressures, history, chosen)
    expected = len(view.workers) + {Kind.FLIP: 0, Kind.ADD: 1, Kind.REMOVE: -1}[chosen.kind]
    after = History(changed_at_s=view.at_s, last=chosen, expected=expected)
    return Decisions(pressures, after, chosen.reason, (chosen,))


def prefill_pressure(view: FleetView, settings: PlannerSettings, targets: Targets) -> Pressure:
    pool = view.pool(Role.PREFILL)
    rate = sum(worker.prefill_tokens_per_s for worker in pool)
    waiting = sum(worker.waiting_tokens for worker in pool)
    busy = [worker.busy for worker in pool if worker.busy is not None]
    if pool and (not busy or (waiting and not rate)):
        return Pressure(len(pool), known=False)
    waits_s = waiting / rate if waiting else 0.0
    return Pressure(
        len(pool),
        waits_s=waits_s,
        shared=waits_s / targets.ttft_s,
        use=sum(busy) / len(busy) / settings.max_prefill_busy if busy else 0.0,
    )


def decode_pressure(view: FleetView, settings: PlannerSettings, targets: Targets) -> Pressure:
    pool = view.pool(Role.DECODE)
    active = [worker for worker in pool if worker.running and worker.decode_step_s]
    if any(worker.running for worker in pool) and not active:
        return Pressure(len(pool), known=False)
    fixed_s = sum(worker.fixed_step_s for worker in active) / len(active) if active else 0.0
    shared_s = sum(worker.decode_step_s - worker.fixed_step_s for worker in active)
    return Pressure(
        len(pool),
        waits_s=max((worker.decode_step_s for worker in active), default=0.0),
        shared=shared_s / max(1, len(pool)) / targets.itl_s,  # an idle one takes its part as well
        fixed=fixed_s / targets.itl_s,
        use=sum(worker.kv_use for worker in pool) / max(1, len(pool)) / settings.max_kv_use,
    )


def _streak(old: Streak, pressure: Pressure, settings: PlannerSettings, minimum: int) -> Streak:
    if pressure.size < minimum:
        return Streak(short=old.short + 1)
    now, with_one_less = pressure.now, pressure.of(pressure.size - 1)
    if now is None or with_one_less is None:
        return Streak()
    return Streak(
        short=old.short + 1 if now > 1 + settings.band else 0,
        spare=old.spare + 1 if with_one_less < 1 - settings.band else 0,
    )


def _why_wait(view: FleetView, history: History, settings: PlannerSettings) -> str:
    if not view.workers:
        return "no worker is known"
    draining = [w.worker_id for w in view.workers if w.draining and w.draining_s < _MAX_DRAIN_S]
    if draining:
        return f"{', '.join(draining)} is draining"
    since_s = view.at_s - history.changed_at_s
    if since_s < settings.hold_s:
        return f"{since_s:.0f} of {settings.hold_s:g} s have passed since the last change"
    if len(view.workers) < history.expected and since_s < settings.start_timeout_s:
        return f"{len(view.workers)} of {history.expected} workers are there"
    return ""


class _Case:
    """One decision, with all that it looks at at hand."""

    def __init__(
        self,
        view: FleetView,
        history: History,
        settings: PlannerSettings,
        pressures: tuple[Pressure, Pressure],
        *,
        can_add: bool,
    ) -> None:
        self._view = view
        self._history = history
        self._settings = settings
        self._pressures = pressures
        self._can_add = can_add
        self._minima = _minima(settings)
        self._maxima = settings.max_prefill, settings.max_decode

    def choose(self) -> Action | str:
        """Or why there is nothing to do."""
        short = [n for n in range(2) if self._history.streaks[n].short >= self._settings.short_intervals]
        short.sort(key=self._worst_first)
        reasons: list[str] = []
        for number in short:
            for attempt in (self._flip_to(number), self._add(number)):
                if isinstance(attempt, Action):
                    return attempt
                reasons.append(attempt)
        if short:
            return "; ".join(reasons)
        if any(streak.short for streak in self._history.streaks):
            return "a pool is short, not for long enough"
        spare = [n for n in range(2) if self._history.streaks[n].spare >= self._settings.spare_intervals]
        spare.sort(key=self._worst_first, reverse=True)
        for number in spare:
            attempt = self._remove(number)
            if isinstance(attempt, Action):
                return attempt
            reasons.append(attempt)
        return "; ".join(reasons) or "the pools fit the load"

    def _worst_first(self, number: int) -> float:
        """Pools below their minimum before all others; then by pressure."""
        return -math.inf if self._is_lacking(number) else -(self._pressures[number].now or 0.0)

    def _is_lacking(self, number: int) -> bool:
        return self._pressures[number].size < self._minima[number]

    def _flip_to(self, number: int) -> Action | str:
        to, giver = POOLS[number], 1 - number
        here, there = self._pressures[number], self._pressures[giver]
        if here.size >= self._maxima[number]:
            return f"there are {here.size} {to} workers, and may not be more"
        if there.size <= self._minima[giver]:
            return f"no {POOLS[giver]} worker to spare: there are {there.size}, and may not be fewer"
        before = math.inf if self._is_lacking(number) else here.now
        after = there.of(there.size - 1)
        if before is None or after is None:
            return "too little is known of a pool"
        is_spare = after < 1 - self._settings.band
        worst_after = max(after, here.of(here.size + 1) or 0.0)
        is_last_resort = not self._can_add or self._is_lacking(number)
        enough = 1.0 if is_spare else _MUCH_BETTER
        if not (is_spare or is_last_resort) or worst_after >= enough * max(before, there.now or 0.0):
            return f"with one {POOLS[giver]} worker less its pressure would be {after:.2f}"
        worker = min(self._view.pool(POOLS[giver]), key=lambda w: (w.running, w.cached_tokens, w.worker_id))
        cost_s = _SWITCH_S + self._drain_s(worker)
        missing = min(1.0, here.size * (before - 1)) if here.size else 1.0
        return self._weighed(
            Action(
                Kind.FLIP,
                to,
                worker.worker_id,
                f"{to} pressure {_shown(before)} with {here.size} workers; with one more"
                f" {_shown(here.of(here.size + 1))}, and {POOLS[giver]} with one less {_shown(after)}",
            ),
            missing,
            cost_s,
            is_urgent=self._is_lacking(number),
        )

    def _add(self, number: int) -> Action | str:
        to, here = POOLS[number], self._pressures[number]
        if not self._can_add:
            return "nobody here can add workers"
        if here.size >= self._maxima[number]:
            return f"there are {here.size} {to} workers, and may not be more"
        is_lacking = self._is_lacking(number)
        before = math.inf if is_lacking else here.now
        if before is None:
            return "too little is known of a pool"
        missing = min(1.0, here.size * (before - 1)) if here.size else 1.0
        reason = f"{to} pressure {_shown(before)} with {here.size} workers"
        return self._weighed(Action(Kind.ADD, to, "", reason), missing, _START_S, is_urgent=is_lacking)

    def _remove(self, number: int) -> Action | str:
        role, here = POOLS[number], self._pressures[number]
        if not self._can_add:
            return f"{role} has a worker to spare, and nobody here can remove it"
        if here.size <= self._minima[number]:
            return f"{role} has {here.size} workers, and may not have fewer"
        candidates = [worker for worker in self._view.pool(role) if worker.removable]
        if not candidates:
            return f"none of the {role} workers can be removed by itself"
        worker = min(candidates, key=lambda w: (w.cached_tokens, w.running, w.worker_id))
        rates = [w.prefill_tokens_per_s for w in self._view.workers if w.prefill_tokens_per_s]
        lost_s = worker.cached_tokens * len(rates) / sum(rates) if rates else 0.0
        after = here.of(here.size - 1)
        reason = f"{role} pressure {_shown(here.now)} with {here.size} workers; with one less {_shown(after)}"
        action = Action(Kind.REMOVE, role, worker.worker_id, reason)
        return self._weighed(action, 1.0, self._drain_s(worker) + lost_s, is_urgent=False)

    def _drain_s(self, worker: WorkerFigures) -> float:
        if worker.role != Role.PREFILL:
            return _ANSWER_TOKENS * worker.decode_step_s if worker.running else 0.0
        rate = worker.prefill_tokens_per_s
        return worker.waiting_tokens / rate if rate else 0.0

    def _weighed(self, action: Action, part: float, cost_s: float, *, is_urgent: bool) -> Action | str:
        """`part` of a worker is what it gives."""
        gain_s = part * self._settings.payback_s
        weighed = f"gains {gain_s:.0f} s of a worker for {cost_s:.0f} s"
        if is_urgent:
            return action
        if gain_s <= cost_s:
            return f"{action.kind} does not pay: {weighed}"
        since_s = self._view.at_s - self._history.changed_at_s
        if _are_opposite(action, self._history.last) and since_s < _REVERSE_HOLDS * self._settings.hold_s:
            return f"{action.kind} would undo the last change, {since_s:.0f} s ago"
        return replace(action, reason=f"{action.reason}; {weighed}")


def _are_opposite(action: Action, last: Action | None) -> bool:
    """Whether the one gives to a pool what the other took from it."""
    if last is None:
        return False
    (gave, took), (gives, takes) = _moved(last), _moved(action)
    return bool(gives & took) or bool(takes & gave)


def _moved(action: Action) -> tuple[set[Role], set[Role]]:
    """Pools that get a worker, and pools that lose one."""
    match action.kind:
        case Kind.ADD:
            return {action.role}, set()
        case Kind.REMOVE:
            return set(), {action.role}
        case Kind.FLIP:
            return {action.role}, {role for role in POOLS if role != action.role}


def _minima(settings: PlannerSettings) -> tuple[int, int]:
    return settings.min_prefill, settings.min_decode


def _shown(pressure: float | None) -> str:
    return "unknown" if pressure is None else f"{pressure:.2f}"
