"""Who runs in which step: budget, order, admission, preemption. The model is left out: chunks count as computed."""

from __future__ import annotations

import pytest

from headrace.config import EngineSettings
from headrace.engine.block_pool import BlockPool, BlockState, Hold
from headrace.engine.scheduler import LOOK_AHEAD, MAX_OVERTAKEN, Scheduler, Share
from headrace.engine.sequence import Event, Failed, Reserved, Sequence, Started, State
from headrace.errors import AlreadyExists, InvalidRequest, Overloaded
from headrace.priority import SECONDS_PER_PRIORITY
from tests.support.audit import assert_idle_pool, assert_sound
from tests.support.engine_driver import make_sequence

B = 4


class Desk:
    """A scheduler and its pool; `step` plans, pretends to compute, and draws token 7 for whoever samples."""

    def __init__(self, num_blocks: int = 16, **settings: int) -> None:
        self.pool = BlockPool(num_blocks, B)
        limits = {"max_step_tokens": 8, "max_sequences": 4, "max_waiting": 8} | settings
        self.scheduler = Scheduler(self.pool, EngineSettings(block_size_tokens=B, **limits))
        self.events: list[Event] = []
        self.now_s = 0.0

    def add(self, sequence_id: str, num_tokens: int, first: int = 0, **more) -> Sequence:
        levels = {name: more.pop(name) for name in ("priority", "retention") if name in more}
        sequence = make_sequence(sequence_id, range(first, first + num_tokens), **more)
        for name, level in levels.items():
            setattr(sequence, name, level)
        self.scheduler.add(sequence, self.now_s)
        return sequence

    def step(self) -> list[tuple[str, int, int]]:
        plan = self.scheduler.schedule(self.events, now_s=self.now_s)
        for chunk in plan.chunks:
            samples = chunk.samples
            self.scheduler.computed(chunk)
            if samples:
                chunk.sequence.token_ids.append(7)
        assert_sound(self.pool.audit(self.scheduler.block_users()))
        return [(chunk.sequence.id, chunk.start, chunk.num_tokens) for chunk in plan.chunks]

    def end_all(self) -> None:
        for sequence in self.scheduler.alive():
            self.scheduler.end(sequence)


def test_a_prompt_is_cut_into_chunks_of_the_budget():
    desk = Desk()
    desk.add("a", 19)
    assert [desk.step() for _ in range(4)] == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 3)], [("a", 19, 1)]]
    assert desk.events == [Started("a", 0)]


def test_decodes_come_first_and_prefill_fills_the_rest_in_order_of_arrival():
    desk = Desk()
    desk.add("a", 2)
    desk.step()
    desk.add("b", 10, first=100)
    desk.add("c", 3, first=200)
    assert desk.step() == [("a", 2, 1), ("b", 0, 7)]
    assert desk.step() == [("a", 3, 1), ("b", 7, 3), ("c", 0, 3)]
    assert desk.step() == [("a", 4, 1), ("b", 10, 1), ("c", 3, 1)]


def test_more_decodes_than_budget_run_oldest_first():
    desk = Desk(max_step_tokens=2)
    for number in range(3):
        desk.add(str(number), 1, first=10 * number)
    desk.step()
    assert desk.step() == [("0", 1, 1), ("1", 1, 1)]


def test_at_most_max_sequences_run():
    desk = Desk(max_sequences=2)
    for number in range(3):
        desk.add(str(number), 2, first=10 * number)
    desk.step()
    assert (desk.scheduler.num_running, desk.scheduler.num_waiting) == (2, 1)
    assert desk.scheduler.num_waiting_tokens == 2 + 1 + 1
    assert "2 places" in desk.scheduler.why_blocked()
    desk.scheduler.end(desk.scheduler.alive()[0])
    assert ("2", 0, 2) in desk.step()


def test_what_does_not_fit_now_lets_smaller_ones_pass():
    desk = Desk(num_blocks=8)
    desk.add("large", 5 * B, max_tokens=1)
    desk.step()
    desk.add("waits", 4 * B, first=100)
    desk.add("small", 1, first=200)
    assert desk.step() == [("large", 8, 8)]
    assert desk.step() == [("large", 16, 4), ("small", 0, 1)]
    assert desk.scheduler.num_waiting == 1
    assert "needs 4 blocks, 2 of 8" in desk.scheduler.why_blocked()
    assert "overtaken 1 times" in desk.scheduler.why_blocked()
    assert not Desk().scheduler.has_work


def test_nobody_passes_who_was_passed_too_often():
    desk = Desk(num_blocks=8, max_sequences=8, max_waiting=64)
    large = desk.add("large", 8 * B - 1, first=500, max_tokens=1)
    running = desk.add("running", 1, first=100, max_tokens=8 * B - 1)
    running.rank = (-1.0, 0)
    desk.scheduler._waiting.sort(key=lambda waiting: waiting.sequence.rank)
    for number in range(2 * MAX_OVERTAKEN):
        desk.add(f"small {number}", 1, first=200 + number, max_tokens=1)
    order = []
    while large.state is State.WAITING:
        for sequence_id, _, _ in desk.step():
            if sequence_id not in order:
                order.append(sequence_id)
        for sequence in desk.scheduler.alive():
            if sequence.num_output_tokens == sequence.sampling.max_tokens:
                desk.scheduler.end(sequence)
    assert len(order) == 1 + MAX_OVERTAKEN + 1
    assert order[-1] == "large"
    assert running.state is State.FINISHED
    desk.end_all()
    assert_idle_pool(desk.pool.audit(desk.scheduler.block_users()))


def test_only_the_first_few_that_wait_are_looked_at():
    desk = Desk(num_blocks=8, max_waiting=64)
    desk.add("running", 1, max_tokens=8 * B - 1)
    desk.step()
    for number in range(LOOK_AHEAD):
        desk.add(f"large {number}", 8 * B - 1, first=100, max_tokens=1)
    small = desk.add("small", 1, first=200)
    assert desk.step() == [("running", 1, 1)]
    assert small.state is State.WAITING
    desk.scheduler.end(desk.scheduler.find("large 0")[0])
    desk.step()
    assert small.state is State.RUNNING


def test_what_waits_is_looked_at_again_when_its_prefix_was_computed():
    desk = Desk(num_blocks=10, max_step_tokens=10)
    first = desk.add("first", 4 * B, max_tokens=2)
    desk.step()
    desk.pool.fill(desk.pool.num_available - 3)
    # It needs five blocks, of which it finds two, and four as soon as the first one has computed them.
    desk.add("same", 4 * B + 1, max_tokens=1)
    assert desk.step() == [("first", 10, 6)]
    assert desk.step() == [("first", 16, 1), ("same", 16, 1)]
    assert first.state is State.RUNNING


def test_what_waits_and_found_no_room_costs_one_look(monkeypatch: pytest.MonkeyPatch):
    desk = Desk(num_blocks=8)
    desk.add("running", 1, max_tokens=8 * B - 1)
    desk.step()
    desk.add("large", 8 * B - 1, first=100, max_tokens=1)
    desk.step()
    monkeypatch.setattr(desk.pool, "match", None)
    for _ in range(5):
        assert len(desk.step()) == 1


def test_urgent_ones_go_first_and_equals_in_order_of_arrival():
    desk = Desk(max_sequences=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", -1)):
        desk.add(name, 1, first=ord(name), priority=priority)
    order = []
    while desk.scheduler.alive():
        [(sequence_id, _, _)] = desk.step()
        order.append(sequence_id)
        desk.scheduler.end(desk.scheduler.find(sequence_id)[0])
    assert order == ["d", "b", "c", "a"]


@pytest.mark.parametrize(
    ("seconds", "order"), [(SECONDS_PER_PRIORITY - 1, ["b", "a"]), (SECONDS_PER_PRIORITY + 1, ["a", "b"])]
)
def test_who_waits_long_enough_is_as_urgent_as_others(seconds: float, order: list[str]):
    desk = Desk(max_sequences=1)
    desk.add("running", 1)
    desk.step()
    desk.add("a", 1, first=100, priority=1)
    desk.now_s = seconds
    desk.add("b", 1, first=200, priority=0)
    for expected in order:
        desk.scheduler.end(next(s for s in desk.scheduler.alive() if s.state is State.RUNNING))
        assert [sequence_id for sequence_id, _, _ in desk.step()] == [expected]


def test_an_urgent_prompt_goes_before_a_long_prefill_under_way():
    desk = Desk()
    desk.add("long", 5 * B, max_tokens=1)
    desk.step()
    desk.add("urgent", 3, first=100, priority=-1)
    desk.add("equal", 3, first=200)
    assert desk.step() == [("urgent", 0, 3), ("long", 8, 5)]
    assert desk.step() == [("urgent", 3, 1), ("long", 13, 7)]
    assert desk.step() == [("urgent", 4, 1), ("long", 20, 1), ("equal", 0, 3)]


def test_the_least_urgent_gives_way_though_it_came_first():
    desk = Desk(num_blocks=6)
    a = desk.add("a", B, max_tokens=12, priority=4)
    b = desk.add("b", B, first=100, max_tokens=12)
    while a.state is State.RUNNING or not a.num_preemptions:
        desk.step()
    assert b.state is State.RUNNING
    assert b.num_preemptions == 0


def test_each_preemption_doubles_the_room_that_is_asked_for():
    desk = Desk(num_blocks=20, max_step_tokens=64)
    a = desk.add("a", B, max_tokens=6 * B)
    desk.step()
    b = desk.add("b", B, first=100, max_tokens=4 * B)
    # Room for b's next token, and the blocks that it and a may still need.
    for num_preemptions, room in ((0, 1), (1, 1 + 2), (2, 3 + 4), (3, 4 + 6), (9, 4 + 6)):
        b.num_preemptions = num_preemptions
        assert desk.scheduler._headroom(b) == room
    assert a.state is State.RUNNING


@pytest.mark.parametrize(
    ("field", "value", "limits"),
    [
        ("priority", 5, "-4..4"),
        ("priority", -5, "-4..4"),
        ("retention", 4, "0..3"),
        ("retention", -1, "0..3"),
    ],
)
def test_levels_out_of_range_are_refused(field: str, value: int, limits: str):
    desk = Desk()
    with pytest.raises(InvalidRequest, match=f"{value} is not allowed; must lie in {limits}") as refused:
        desk.add("a", 1, **{field: value})
    assert refused.value.field == field
    assert desk.scheduler.alive() == []


def test_a_prompt_is_retained_and_its_answer_is_not():
    desk = Desk(num_blocks=6, max_sequences=1)
    a = desk.add("a", B, max_tokens=2 * B, retention=1)
    for _ in range(B + 1):
        desk.step()
    desk.scheduler.end(a)
    assert desk.pool.num_cached == 2
    for block_id in (*desk.pool.allocate(5), *desk.pool.match(a.hashes)):
        assert desk.pool.state(block_id) in (BlockState.ACTIVE, BlockState.CACHED)
    assert len(desk.pool.match(a.hashes)) == 1
    assert desk.pool.num_cached == 1


def test_admission_leaves_a_block_for_each_that_decodes():
    desk = Desk(num_blocks=4)
    a = desk.add("a", 2, max_tokens=8)
    desk.step()
    desk.add("b", 3 * B, first=100, max_tokens=1)
    assert desk.pool.num_available == 3
    assert desk.step() == [("a", 2, 1)], "three blocks would do, but a will soon need one of them"
    desk.scheduler.end(a)
    assert desk.step() == [("b", 0, 8)]


def test_cached_blocks_that_a_prompt_reuses_do_not_count_as_room():
    desk = Desk(num_blocks=4)
    desk.scheduler.end(_stepped(desk, "a", 2 * B))
    blocker = desk.pool.allocate(2)
    assert (desk.pool.num_free, desk.pool.num_cached) == (0, 2)
    # It reuses both cached blocks and needs a third.
    desk.add("b", 2 * B + 1, max_tokens=1)
    assert not desk.scheduler.has_work
    assert desk.scheduler.schedule(desk.events, now_s=0.0).chunks == []
    desk.pool.release(blocker)
    assert desk.step() == [("b", 2 * B, 1)]


def _stepped(desk: Desk, sequence_id: str, num_tokens: int, **more) -> Sequence:
    sequence = desk.add(sequence_id, num_tokens, **more)
    desk.step()
    assert sequence.num_computed == num_tokens
    return sequence


def test_a_full_hit_still_computes_one_token():
    desk = Desk()
    desk.scheduler.end(_stepped(desk, "a", 2 * B))
    desk.add("b", 2 * B)
    assert desk.step() == [("b", B, B)]
    assert desk.events[-1] == Started("b", B)


def test_a_reservation_takes_all_blocks_that_are_cached_and_fills_the_rest():
    desk = Desk()
    desk.scheduler.end(_stepped(desk, "a", 2 * B))
    reserved = desk.add("whole", 2 * B)
    reserved.from_outside = True
    longer = desk.add("longer", 2 * B + 1)
    longer.from_outside = True
    assert desk.step() == []
    assert desk.events[1:] == [
        Reserved("whole", reserved.block_ids, 2),
        Reserved("longer", longer.block_ids, 2),
    ]
    assert [len(reserved.block_ids), len(longer.block_ids)] == [2, 3]
    audit = desk.pool.audit(desk.scheduler.block_users())
    assert (audit.active, audit.filling) == (2, 1)
    desk.scheduler.adopt(longer)
    longer.token_ids.append(9)
    assert desk.step() == [("longer", 2 * B + 1, 1)]


def test_a_reservation_needs_no_budget_but_keeps_its_turn():
    desk = Desk(max_step_tokens=1)
    desk.add("a", 1)
    desk.step()
    desk.add("b", 1, first=100)
    reserved = desk.add("r", 1, first=200)
    reserved.from_outside = True
    assert desk.step() == [("a", 1, 1)]
    assert reserved.state is State.WAITING, "b is before it"
    desk.scheduler.end(desk.scheduler.alive()[1])
    assert desk.step() == [("a", 2, 1)]
    assert reserved.state is State.RESERVED


def test_the_newest_gives_way_and_comes_back_first_with_its_output():
    desk = Desk(num_blocks=5, max_sequences=2)
    a = desk.add("a", B, max_tokens=12)
    b = desk.add("b", B, first=100, max_tokens=12)
    c = desk.add("c", 3 * B, first=200)
    desk.step()
    while b.state is State.RUNNING:
        desk.step()
    assert desk.scheduler.num_preemptions == b.num_preemptions == 1
    assert b.block_ids == []
    assert a.state is State.RUNNING
    known = list(b.token_ids)
    assert len(known) > B + 1
    desk.scheduler.end(a)
    # What the tree kept of its own blocks is reused; the rest is computed again from prompt and output.
    [first] = desk.step()
    assert first[0] == "b"
    assert first[1] in (B, 2 * B)
    assert first[1] + first[2] == len(known)
    assert b.token_ids[: len(known)] == known
    assert c.state is State.WAITING
    assert [event for event in desk.events if event.sequence_id == "b"] == [Started("b", 0)]
    assert desk.scheduler.num_queried_tokens == 2 * B


def test_reserved_and_held_sequences_are_not_preempted():
    desk = Desk(num_blocks=7)
    a = desk.add("a", B - 1, max_tokens=9)
    desk.step()
    reserved = desk.add("r", B, first=100)
    reserved.from_outside = True
    held = desk.add("h", 3 * B, first=200, hold_ttl_s=5.0)
    desk.step()
    assert (reserved.state, held.state) == (State.RESERVED, State.RUNNING)
    taken = desk.pool.allocate(desk.pool.num_available)
    plan = desk.scheduler.schedule(desk.events, now_s=0.0)
    assert [chunk.sequence.id for chunk in plan.chunks] == ["h"]
    assert a.state is State.WAITING, "a gave way to nobody: it waits for the others"
    assert (reserved.state, held.state) == (State.RESERVED, State.RUNNING)
    desk.pool.release(taken)
    assert not [event for event in desk.events if isinstance(event, Failed)]


def _alone_without_a_block(num_preemptions: int) -> tuple[Desk, Sequence]:
    """A sequence that needs its second block, while all others are held for somebody outside."""
    desk = Desk(num_blocks=4)
    a = desk.add("a", B, max_tokens=8)
    desk.step()
    a.num_preemptions = num_preemptions
    outside = desk.pool.allocate(3)
    desk.pool.hold(Hold("reader", "test", outside, 9.0, 9.0))
    desk.pool.release(outside)
    return desk, a


def test_alone_and_without_a_block_it_waits_for_what_is_held():
    desk, a = _alone_without_a_block(num_preemptions=0)
    assert desk.step() == []
    assert (a.state, a.block_ids) == (State.WAITING, [])
    assert not desk.scheduler.has_work
    desk.pool.release_hold("reader")
    assert desk.step() == [("a", B, 1)]


def test_alone_and_without_a_block_it_does_not_wait_again_and_again():
    desk, a = _alone_without_a_block(num_preemptions=8)
    assert desk.step() == []
    assert a.state is State.FINISHED
    [failed] = [event for event in desk.events if isinstance(event, Failed)]
    assert isinstance(failed.error, Overloaded)
    desk.pool.release_hold("reader")
    assert_idle_pool(desk.pool.audit(desk.scheduler.block_users()))


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "hold_ttl_s", "field"),
    [
        (16 * B, 1, None, "prompt"),
        (16 * B - 1, 1, None, None),
        (16 * B - 1, 2, None, "max_tokens"),
        (10, 16 * B - 10, None, None),
        (10, 16 * B - 9, None, "max_tokens"),
        (16 * B, 99, 1.0, None),
        (16 * B + 1, 99, 1.0, "prompt"),
    ],
)
def test_what_can_never_fit_the_pool_is_refused(num_tokens, max_tokens, hold_ttl_s, field):
    desk = Desk()
    sequence = make_sequence("a", range(num_tokens), max_tokens, hold_ttl_s=hold_ttl_s)
    if field is None:
        desk.scheduler.add(sequence, 0.0)
        return
    with pytest.raises(InvalidRequest, match="KV pool holds 64 tokens") as refused:
        desk.scheduler.add(sequence, 0.0)
    assert refused.value.field == field
    assert desk.scheduler.alive() == []


def test_output_of_an_earlier_attempt_counts_once():
    desk = Desk()
    desk.scheduler.add(make_sequence("a", range(20), max_tokens=16 * B - 10, num_output_tokens=10), 0.0)
    with pytest.raises(InvalidRequest, match="at most 54 remain"):
        desk.scheduler.add(make_sequence("b", range(20), max_tokens=16 * B - 9, num_output_tokens=10), 0.0)


def test_the_queue_is_bounded():
    desk = Desk(max_waiting=2)
    desk.add("a", 1)
    desk.add("b", 1)
    with pytest.raises(Overloaded):
        desk.add("c", 1)


def test_an_id_is_taken_while_it_lives_or_owns_blocks():
    desk = Desk()
    desk.add("a", B, hold_ttl_s=5.0)
    with pytest.raises(AlreadyExists):
        desk.add("a", B)
    desk.step()
    [a] = desk.scheduler.alive()
    a.num_announced_blocks = 1
    desk.scheduler.end(a)
    with pytest.raises(AlreadyExists):
        desk.add("a", B)
    desk.pool.release_hold("a")
    desk.add("a", B)
    desk.end_all()
    assert_idle_pool(desk.pool.audit(desk.scheduler.block_users()))


def test_generated_blocks_are_found_like_prompt_blocks():
    desk = Desk()
    a = desk.add("a", B, max_tokens=9)
    for _ in range(B + 2):
        desk.step()
    desk.scheduler.end(a)
    b = make_sequence("b", a.token_ids)
    desk.scheduler.add(b, 0.0)
    desk.step()
    assert b.num_cached_tokens == 2 * B


def test_the_load_is_told_apart_by_who_sent_it():
    desk = Desk()
    for name, num_tokens, origin in (("a", 10, "x"), ("b", 6, "y"), ("c", 5, "y")):
        desk.add(name, num_tokens, first=100 * num_tokens).origin = origin
    assert desk.scheduler.shares([]) == {"x": Share(1, 10, 10), "y": Share(2, 11, 11)}
    on_its_way = make_sequence("d", range(4))
    assert desk.scheduler.shares([on_its_way])[""] == Share(1, 4, 4)
    assert desk.scheduler.shares(desk.scheduler.find("a"))["x"] == Share(1, 10, 10)  # it has arrived
    desk.step()  # 8 of the first prompt
    assert desk.scheduler.shares([])["x"] == Share(1, 10, 2)
    desk.step()
    assert desk.scheduler.shares([])["x"] == Share(1, 11, 0)  # it decodes
    desk.end_all()
    assert desk.scheduler.shares([]) == {}
