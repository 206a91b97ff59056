"""Assumed content: what was just sent counts, for a short time, in bounded memory, and apart from what was reported."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.clock import VirtualClock
from headrace.directory.assumed import AssumedContent
from headrace.directory.base import BlockSnapshot
from headrace.directory.prefix_index import Match
from headrace.directory.records import DirectoryEvent
from headrace.directory.view import DirectoryView
from headrace.tier import Tier
from tests.support.directory_samples import digest, digests, on_device, record

A, B = ("a", "a1"), ("b", "b1")
PROMPT = digests(1, 2, 3, 4)


def content(max_blocks=1000) -> tuple[AssumedContent, VirtualClock]:
    clock = VirtualClock()
    return AssumedContent(5.0, clock, max_blocks), clock


def view_of(*worker_ids: str) -> tuple[DirectoryView, VirtualClock]:
    clock = VirtualClock()
    view = DirectoryView(clock, assumed_ttl_s=5.0)
    for worker_id in worker_ids:
        view.admit(record(worker_id=worker_id, incarnation=f"{worker_id}1"))
        view.load(worker_id, f"{worker_id}1", BlockSnapshot(1, {}))
    return view, clock


def test_the_common_beginning_counts():
    assumed, _ = content()
    assumed.add(A, PROMPT)
    assumed.add(B, digests(1, 2, 8, 9))
    assert assumed.runs(digests(1, 2, 3, 4, 5)) == {A: 4, B: 2}
    assert assumed.runs(digests(1, 2, 8)) == {A: 2, B: 3}
    assert assumed.runs(digests(7)) == {}
    assert assumed.runs([]) == {}


def test_an_assumption_lives_for_one_to_two_ttl():
    assumed, clock = content()
    assumed.add(A, PROMPT)
    clock.advance(4.9)
    assert assumed.runs(PROMPT) == {A: 4}
    assumed.add(B, PROMPT)
    clock.advance(4.9)  # the first turn was at 5
    assert assumed.runs(PROMPT) == {A: 4, B: 4}
    clock.advance(5.1)
    assert assumed.runs(PROMPT) == {}
    assert len(assumed) == 0


def test_nothing_is_left_after_a_long_silence():
    assumed, clock = content()
    assumed.add(A, PROMPT)
    clock.advance(10.0)
    assert assumed.runs(PROMPT) == {}


def test_memory_is_bounded_and_the_newest_stays():
    assumed, _ = content(max_blocks=100)
    for number in range(1000):
        assumed.add(A, digests(*range(10 * number, 10 * number + 10)))
        assert len(assumed) <= 200
    assert assumed.runs(digests(*range(9990, 10_000))) == {A: 10}
    assumed.add(B, digests(*range(20_000, 20_500)))
    assert assumed.runs(digests(*range(20_000, 20_500))) == {B: 100}
    assert len(assumed) <= 200


LENGTHS = st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 3), st.integers(0, 9)), max_size=20)


@given(LENGTHS)
def test_equals_a_naive_model(sent):
    """Prompts of four families that share their first two blocks."""
    assumed, _ = content()

    def blocks(family: int, length: int) -> list[bytes]:
        return [digest(i if i < 2 else 100 * (family + 1) + i) for i in range(length)]

    for holder, family, length in sent:
        assumed.add(holder, blocks(family, length))
    for family in range(4):
        expected = {}
        for holder, other, length in sent:
            common = length if other == family else min(length, 2)
            if common:
                expected[holder] = max(common, expected.get(holder, 0))
        assert assumed.runs(blocks(family, 9)) == expected


def test_the_view_tells_assumed_from_reported():
    view, _ = view_of("a", "b")
    view.index.store("a", on_device(1, 2))
    view.assume("a", "a1", PROMPT)
    view.assume("b", "b1", PROMPT[:1])
    assert view.match(PROMPT) == {"a": Match(4, 2), "b": Match(1, 1)}


def test_the_workers_own_event_confirms_it():
    view, clock = view_of("a")
    view.assume("a", "a1", PROMPT)
    assert view.apply(DirectoryEvent("a", "a1", 2, on_device(1, 2, 3)))
    assert view.match(PROMPT) == {"a": Match(4, 1)}
    assert view.apply(DirectoryEvent("a", "a1", 3, {digest(4): Tier.HOST}))
    assert view.match(PROMPT) == {"a": Match(4, 0)}
    clock.advance(100)
    assert view.match(PROMPT) == {"a": Match(4, 0)}


def test_what_the_worker_reports_as_removed_is_not_assumed_any_more():
    view, _ = view_of("a")
    view.assume("a", "a1", PROMPT)
    assert view.apply(DirectoryEvent("a", "a1", 2, {}, tuple(PROMPT)))
    assert view.match(PROMPT) == {}


def test_a_dispatch_that_failed_is_forgotten():
    view, _ = view_of("a", "b")
    view.assume("a", "a1", PROMPT)
    view.assume("b", "b1", PROMPT)
    view.forget_assumed("a", "a1", PROMPT)
    assert view.match(PROMPT) == {"b": Match(4, 4)}


def test_with_the_incarnation_goes_what_was_assumed_of_it():
    view, _ = view_of("a")
    view.assume("a", "a1", PROMPT)
    view.mark_gone("a", "a1")
    view.admit(record(worker_id="a", incarnation="a2"))
    assert view.match(PROMPT) == {}
    view.assume("a", "a1", PROMPT)  # said too late
    assert view.match(PROMPT) == {}


def test_a_burst_of_equal_prompts_sees_itself_before_any_event():
    view, _ = view_of("a", "b", "c", "d")
    chosen = []
    for number in range(100):
        matched = view.match(PROMPT)
        assert bool(matched) == bool(number)
        worker_id = max(matched, key=lambda name: matched[name].num_blocks, default="c")
        assert not number or matched[worker_id] == Match(4, 4)
        chosen.append(worker_id)
        view.assume(worker_id, f"{worker_id}1", PROMPT)
    assert set(chosen) == {"c"}
    assert len(view.index) == 0
