"""The planner's decisions over synthetic loads, in virtual time: workers are as loaded as their number says."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cluster.planner.decide import Action, Decisions, History, Kind, Targets, decide
from headrace.cluster.planner.view import FleetView, WorkerFigures
from headrace.config import PlannerSettings
from headrace.directory.records import Role

P, D = Role.PREFILL, Role.DECODE
SETTINGS = PlannerSettings(
    interval_s=5, short_intervals=3, spare_intervals=6, hold_s=60, max_prefill=6, max_decode=6
)
TARGETS = Targets(ttft_s=2.0, itl_s=0.1)
RATE = 10_000.0


@dataclass
class Fleet:
    """`prefill` and `decode` are loads in workers: 2.0 keeps two at their limits."""

    roles: dict[str, Role]
    can_add: bool = False
    now_s: float = 1000.0
    history: History = field(default_factory=History)
    changes: list[tuple[float, Action]] = field(default_factory=list)
    last: Decisions | None = None
    num_added: int = 0

    @classmethod
    def of(cls, num_prefill: int, num_decode: int, **options) -> Fleet:
        roles = {f"p{n}": P for n in range(num_prefill)} | {f"d{n}": D for n in range(num_decode)}
        return cls(roles, **options)

    def size(self, role: Role) -> int:
        return list(self.roles.values()).count(role)

    def figures(self, worker_id: str, prefill: float, decode: float) -> WorkerFigures:
        if self.roles[worker_id] == P:
            each = prefill / self.size(P)
            waits_s = TARGETS.ttft_s * each if each > 1 else 0.0
            return WorkerFigures(
                worker_id,
                P,
                busy=min(1.0, 0.85 * each),
                waiting_tokens=int(waits_s * RATE),
                prefill_tokens_per_s=RATE,
                removable=self.can_add,
            )
        each = decode / self.size(D)
        return WorkerFigures(
            worker_id,
            D,
            busy=min(1.0, each),
            running=math.ceil(32 * each),
            decode_step_s=TARGETS.itl_s * (0.5 + 0.5 * each),
            fixed_step_s=TARGETS.itl_s * 0.5,
            prefill_tokens_per_s=RATE,
            kv_use=min(1.0, 0.6 * each),
            removable=self.can_add,
        )

    def look(self, prefill: float, decode: float, *, settings: PlannerSettings = SETTINGS) -> list[Action]:
        workers = tuple(self.figures(worker_id, prefill, decode) for worker_id in sorted(self.roles))
        view = FleetView(self.now_s, workers)
        self.last = decide(view, self.history, settings, TARGETS, can_add=self.can_add)
        again = decide(view, self.history, settings, TARGETS, can_add=self.can_add)
        assert again == self.last
        self.history = self.last.history
        for action in self.last.actions:
            self.carry_out(action)
        self.now_s += settings.interval_s
        return list(self.last.actions)

    def carry_out(self, action: Action) -> None:
        self.changes.append((self.now_s, action))
        match action.kind:
            case Kind.FLIP:
                assert self.roles[action.worker_id] != action.role
                self.roles[action.worker_id] = action.role
            case Kind.ADD:
                self.num_added += 1
                self.roles[f"{'p' if action.role == P else 'd'}-new-{self.num_added}"] = action.role
            case Kind.REMOVE:
                assert self.roles.pop(action.worker_id) == action.role

    def run(self, loads) -> list[Action]:
        return [action for prefill, decode in loads for action in self.look(prefill, decode)]


def test_a_shift_to_prompts_gives_decode_workers_to_prefill():
    fleet = Fleet.of(2, 4)
    assert fleet.run([(1.0, 3.0)] * 40) == []
    actions = fleet.run([(3.5, 1.2)] * 60)
    assert [(action.kind, action.role) for action in actions] == [(Kind.FLIP, P)] * 2
    assert (fleet.size(P), fleet.size(D)) == (4, 2)
    assert "prefill pressure 1.75 with 2 workers" in actions[0].reason
    assert "gains" in actions[0].reason


def test_a_shift_to_long_answers_gives_prefill_workers_to_decode():
    fleet = Fleet.of(4, 2)
    assert fleet.run([(3.0, 1.5)] * 40) == []
    actions = fleet.run([(1.2, 4.0)] * 60)
    assert {(action.kind, action.role) for action in actions} == {(Kind.FLIP, D)}
    assert fleet.size(D) in (4, 5)


def test_it_acts_after_the_intervals_that_are_set_and_not_before():
    fleet = Fleet.of(1, 3)
    assert fleet.run([(2.0, 0.8)] * 2) == []
    assert fleet.last.why == "a pool is short, not for long enough"
    assert len(fleet.look(2.0, 0.8)) == 1
    fleet.now_s -= 1
    assert fleet.look(9.0, 0.1) == []
    assert "of 60 s have passed since the last change" in fleet.last.why


def test_a_load_that_comes_and_goes_changes_little():
    """Peaks on one side and the other, each longer than it takes to decide: 60 minutes, 24 turns."""
    fleet = Fleet.of(3, 3)
    for _ in range(12):
        fleet.run([(4.0, 1.5)] * 30)
        fleet.run([(1.5, 4.0)] * 30)
    assert len(fleet.changes) <= 12 * 2
    times = [at for at, _ in fleet.changes]
    assert all(later - earlier >= 60 for earlier, later in pairwise(times))
    quick = Fleet.of(3, 3)
    for _ in range(120):  # shorter than it takes to decide
        quick.run([(4.0, 1.5)] * 2)
        quick.run([(1.5, 4.0)] * 2)
    assert quick.changes == []


def test_noise_changes_nothing():
    draw = random.Random(3)
    fleet = Fleet.of(3, 3, can_add=True)
    loads = [(2.4 * draw.uniform(0.7, 1.3), 2.4 * draw.uniform(0.7, 1.3)) for _ in range(1000)]
    assert fleet.run(loads) == []


def test_workers_are_added_where_both_pools_are_short_and_removed_when_neither_is():
    fleet = Fleet.of(2, 2, can_add=True)
    grown = fleet.run([(3.0, 3.0)] * 120)
    assert {action.kind for action in grown} == {Kind.ADD}
    assert (fleet.size(P), fleet.size(D)) == (3, 3)
    shrunk = fleet.run([(0.7, 0.7)] * 300)
    assert {action.kind for action in shrunk} == {Kind.REMOVE}
    assert (fleet.size(P), fleet.size(D)) == (1, 1)


def test_pools_stay_within_their_bounds():
    fleet = Fleet.of(2, 2, can_add=True)
    fleet.run([(50.0, 50.0)] * 400)
    assert (fleet.size(P), fleet.size(D)) == (6, 6)
    assert "may not be more" in fleet.last.why
    fleet.run([(0.0, 0.0)] * 600)
    assert (fleet.size(P), fleet.size(D)) == (1, 1)


def test_what_a_removal_would_lose_is_weighed():
    """A cache that takes longer to compute anew than the worker would save is kept."""
    fleet = Fleet.of(2, 1, can_add=True)
    figures = fleet.figures

    def with_large_caches(worker_id, prefill, decode):
        return replace(figures(worker_id, prefill, decode), cached_tokens=int(RATE * 400))

    fleet.figures = with_large_caches
    assert fleet.run([(0.2, 0.5)] * 60) == []
    assert "remove does not pay: gains 300 s of a worker for 400 s" in fleet.last.why


def test_a_draining_worker_and_one_that_starts_are_waited_for():
    fleet = Fleet.of(1, 3)
    figures = fleet.figures
    fleet.figures = lambda *args: replace(figures(*args), draining=args[0] == "d2")
    assert fleet.run([(3.0, 0.5)] * 10) == []
    assert fleet.last.why == "d2 is draining"
    fleet.figures = lambda *args: replace(figures(*args), draining=args[0] == "d2", draining_s=200.0)
    assert fleet.run([(3.0, 0.5)] * 10) != []  # it hangs
    fleet = Fleet.of(1, 1, can_add=True)
    fleet.carry_out = lambda action: fleet.changes.append((fleet.now_s, action))  # it does not come
    fleet.run([(3.0, 1.0)] * 60)
    assert len(fleet.changes) == 1
    assert fleet.last.why == "2 of 3 workers are there"
    fleet.run([(3.0, 1.0)] * 80)  # longer than start_timeout_s
    assert len(fleet.changes) == 2


def test_without_data_nothing_is_decided():
    assert decide(FleetView(5.0, ()), History(), SETTINGS, TARGETS).why == "no worker is known"
    fleet = Fleet.of(1, 3)
    figures = fleet.figures
    fleet.figures = lambda *args: replace(figures(*args), busy=None)
    assert fleet.run([(3.0, 0.5)] * 10) == []
    fleet.figures = lambda *args: replace(figures(*args), prefill_tokens_per_s=0.0)
    assert fleet.run([(3.0, 0.5)] * 10) == []
    fleet.figures = lambda *args: replace(figures(*args), decode_step_s=0.0)
    assert fleet.run([(3.0, 0.5)] * 10) == []
    assert "too little is known" in fleet.last.why
    fleet.figures = figures
    assert fleet.run([(3.0, 0.5)] * 10) != []


def test_dead_workers_are_replaced_by_those_that_are_left():
    """The only prefill worker is gone: below the minimum, so the least loaded decode worker takes its place."""
    fleet = Fleet.of(1, 3)
    fleet.run([(0.5, 2.5)] * 5)
    del fleet.roles["p0"]
    fleet.figures = lambda worker_id, prefill, decode: WorkerFigures(
        worker_id, D, busy=0.9, running=10 + int(worker_id[1]), decode_step_s=0.08, kv_use=0.5
    )
    actions = fleet.run([(0.5, 2.5)] * 3)
    assert [(action.kind, action.role, action.worker_id) for action in actions] == [(Kind.FLIP, P, "d0")]


def test_a_change_is_not_undone_soon():
    fleet = Fleet.of(2, 3)
    fleet.run([(3.0, 0.8)] * 3)
    assert [action.role for _, action in fleet.changes] == [P]
    fleet.run([(0.5, 4.0)] * 35)
    assert len(fleet.changes) == 1
    assert "flip would undo the last change" in fleet.last.why
    fleet.run([(0.5, 4.0)] * 3)
    assert [action.role for _, action in fleet.changes] == [P, D]


loads = st.floats(0.0, 8.0)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    can_add=st.booleans(),
    phases=st.lists(st.tuples(loads, loads, st.integers(1, 40)), min_size=1, max_size=8),
    lost=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_never_below_the_minimum_and_never_back_at_once(sizes, can_add, phases, lost):
    """Whatever the load, and although workers die: no change takes a pool's last worker, changes keep their distance,
    and one that undoes the last keeps thrice that, unless a pool has nobody.
    """
    fleet = Fleet.of(*sizes, can_add=can_add)
    sizes_at: list[tuple[float, Action, int, int]] = []
    carry_out = fleet.carry_out

    def watched(action):
        before = fleet.size(P), fleet.size(D)
        carry_out(action)
        sizes_at.append((fleet.now_s, action, *before))
        for role, had in zip((P, D), before, strict=True):
            assert fleet.size(role) >= min(had, 1)
            assert fleet.size(role) <= max(had, 6)

    fleet.carry_out = watched
    for (prefill, decode, count), dies in zip(phases, lost, strict=False):
        fleet.run([(prefill, decode)] * count)
        if dies and len(fleet.roles) > 1:
            del fleet.roles[max(fleet.roles)]
    for (then, first, *_), (now, second, *before) in pairwise(sizes_at):
        assert now - then >= SETTINGS.hold_s
        undoes = first.kind is second.kind is Kind.FLIP and first.role != second.role
        if undoes and min(before) > 0:
            assert now - then >= 3 * SETTINGS.hold_s
