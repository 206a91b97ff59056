"""The view: one incarnation per worker id, its blocks with it, and no event applied out of order."""

from dataclasses import replace

import numpy as np
import pytest

from headrace.clock import VirtualClock
from headrace.directory.base import BlockSnapshot
from headrace.directory.records import DirectoryEvent, RouterShare
from headrace.directory.view import DirectoryView
from tests.support.directory_samples import RECORD, digests, lengths, on_device, record

FIRST, SECOND = record(incarnation="first"), record(incarnation="second", address="127.0.0.1:7001")


def snapshot(sequence, *numbers):
    return BlockSnapshot(sequence, on_device(*numbers))


def event(sequence, stored=(), removed=(), incarnation="first"):
    return DirectoryEvent("decode-0", incarnation, sequence, on_device(*stored), tuple(digests(*removed)))


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def view(clock):
    """Holds the first incarnation with blocks 1, 2, 3 as of event 10."""
    view = DirectoryView(clock)
    view.admit(FIRST)
    view.load("decode-0", "first", snapshot(10, 1, 2, 3))
    return view


def matched(view, *numbers):
    return lengths(view.index.match(digests(*numbers)))


def test_a_refreshed_record_keeps_its_blocks(view):
    view.admit(record(draining=True))
    assert view.workers["decode-0"].draining
    assert matched(view, 1, 2, 3) == {"decode-0": 3}


def test_a_new_incarnation_starts_without_blocks(view):
    view.admit(SECOND)
    assert view.workers == {"decode-0": SECOND}
    assert matched(view, 1) == {}
    assert view.sequence("decode-0") is None


def test_marked_gone_vanishes_at_once_with_its_blocks(view):
    view.mark_gone("decode-0", "first")
    assert view.workers == {}
    assert len(view.index) == 0


def test_marking_an_earlier_incarnation_touches_nothing(view):
    view.mark_gone("decode-0", "zeroth")
    assert view.workers == {"decode-0": FIRST}
    assert matched(view, 1) == {"decode-0": 1}


def test_gone_for_a_time_only(view, clock):
    view.mark_gone("decode-0", "first")
    assert not view.is_gone("decode-0", "second", for_s=5)
    clock.advance(4.9)
    assert view.is_gone("decode-0", "first", for_s=5)
    clock.advance(0.2)
    assert not view.is_gone("decode-0", "first", for_s=5)


def test_events_in_order_are_applied(view):
    assert view.apply(event(11, stored=[4]))
    assert view.apply(event(12, removed=[2]))
    assert view.index.blocks("decode-0") == set(digests(1, 3, 4))


def test_events_that_the_snapshot_held_are_passed_over(view):
    assert view.apply(event(10, removed=[1]))
    assert view.apply(event(3, stored=[7]))
    assert view.index.blocks("decode-0") == set(digests(1, 2, 3))


def test_a_missing_event_shows_and_nothing_is_applied(view):
    assert not view.apply(event(12, stored=[4]))
    assert view.index.blocks("decode-0") == set(digests(1, 2, 3))
    assert view.sequence("decode-0") == 10


def test_before_its_blocks_are_loaded_no_event_can_be_applied(view):
    view.admit(SECOND)
    assert not view.apply(event(1, stored=[1], incarnation="second"))


def test_a_snapshot_of_another_incarnation_is_ignored(view):
    view.admit(SECOND)
    view.load("decode-0", "first", snapshot(11, 1, 2))
    assert len(view.index) == 0


def test_dropping_an_earlier_incarnation_touches_nothing(view):
    view.admit(SECOND)
    view.drop("decode-0", "first")
    assert view.workers == {"decode-0": SECOND}


def others(view):
    return view.loads_of_others(np.array([view.index.place("decode-0")])).T.tolist()


def test_loads_of_other_routers_are_added_up_and_ones_own_is_not_among_them(clock):
    view = DirectoryView(clock, router_id="own")
    shares = (RouterShare("own", 9, 999, 99), RouterShare("b", 1, 200, 30), RouterShare("", 2, 50, 0))
    view.admit(record(load=replace(RECORD.load, shares=shares)))
    assert others(view) == [[3, 250, 30]]
    view.load("decode-0", "first", snapshot(10))
    assert view.apply(replace(event(11), shares=shares[:2]))
    assert others(view) == [[1, 200, 30]]
    assert view.apply(event(12))  # no news of it
    assert others(view) == [[1, 200, 30]]
    assert not view.apply(replace(event(14), shares=()))  # one is missing: the record is read
    assert others(view) == [[1, 200, 30]]
    view.mark_gone("decode-0", "first")
    view.admit(SECOND)
    assert others(view) == [[0, 0, 0]]
