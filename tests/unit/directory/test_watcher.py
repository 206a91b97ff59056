"""The watcher: the view follows the directory, and serves on without it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from headrace.clock import VirtualClock
from headrace.config import DirectorySettings
from headrace.directory.memory_directory import MemoryDirectory
from headrace.directory.publisher import Publisher
from headrace.directory.records import DirectoryEvent, WorkerRecord
from headrace.directory.view import DirectoryView
from headrace.directory.watcher import Watcher
from headrace.errors import Unavailable
from headrace.tier import Tier
from tests.support.directory_samples import (
    FaultyDirectory,
    digest,
    digests,
    in_tier,
    lengths,
    on_device,
    record,
    until,
)

SETTINGS = DirectorySettings(worker_ttl_s=5.0, publish_interval_s=0.01)
NO_WAIT_S = 0.001


class Bench:
    """One watcher, driven by hand, and workers that write to its directory."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.directory = FaultyDirectory(MemoryDirectory(SETTINGS, self.clock))
        self.view = DirectoryView(self.clock)
        self.watcher = Watcher(self.directory, self.view, SETTINGS, self.clock)
        self.sequences: Counter[str] = Counter()  # by incarnation

    async def register(self, worker: WorkerRecord, *numbers: int) -> None:
        self.sequences[worker.incarnation] += 1
        sequence = self.sequences[worker.incarnation]
        await self.directory.target.register(worker, sequence, on_device(*numbers), take_over=True)

    async def publish(self, worker: WorkerRecord, stored=(), removed=()) -> None:
        self.sequences[worker.incarnation] += 1
        event = DirectoryEvent(
            worker.worker_id,
            worker.incarnation,
            self.sequences[worker.incarnation],
            on_device(*stored),
            tuple(digests(*removed)),
        )
        assert await self.directory.target.publish(worker, event)

    async def follow(self) -> None:
        await self.watcher.follow(NO_WAIT_S)

    async def outage(self) -> None:
        self.directory.cut = True
        with pytest.raises(Unavailable):
            await self.follow()
        self.directory.cut = False

    def wipe(self) -> None:
        self.directory.target = MemoryDirectory(SETTINGS, self.clock)

    def matched(self, *numbers: int) -> dict[str, int]:
        return lengths(self.view.index.match(digests(*numbers)))


A, B = record(worker_id="a", incarnation="a1"), record(worker_id="b", incarnation="b1")


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
async def following(bench):
    """Two workers are known: a with blocks 1 2 3, b with blocks 1 2."""
    await bench.register(A, 1, 2, 3)
    await bench.register(B, 1, 2)
    await bench.watcher.synchronise()
    return bench


async def test_starts_from_what_is_there(following):
    assert following.view.workers == {"a": A, "b": B}
    assert following.matched(1, 2, 3) == {"a": 3, "b": 2}


async def test_follows_changes(following):
    await following.publish(A, removed=[2])
    await following.publish(B, stored=[3])
    await following.follow()
    assert following.matched(1, 2, 3) == {"a": 1, "b": 3}


async def test_a_new_worker_joins_with_the_next_batch(following):
    newcomer = record(worker_id="c", incarnation="c1")
    await following.register(newcomer, 1)
    await following.follow()
    assert following.view.workers["c"] == newcomer
    assert following.matched(1)["c"] == 1


async def test_draining_shows_with_the_next_batch(following):
    await following.register(replace(A, draining=True), 1, 2, 3)
    await following.follow()
    assert following.view.workers["a"].draining


async def test_load_shows_with_the_next_refresh(following):
    busy = replace(A, load=replace(A.load, waiting=99))
    await following.publish(busy)
    following.clock.advance(1.1)
    await following.follow()
    assert following.view.workers["a"].load.waiting == 99


async def test_a_worker_that_leaves_vanishes_at_once(following):
    await following.directory.remove("a", "a1")
    await following.follow()
    assert following.view.workers == {"b": B}
    assert following.matched(1, 2, 3) == {"b": 2}


async def test_a_restart_under_the_same_id_drops_the_old_blocks(following):
    reborn = record(worker_id="a", incarnation="a2")
    await following.register(reborn)
    await following.follow()
    assert following.view.workers["a"] == reborn
    assert following.matched(1, 2, 3) == {"b": 2}
    await following.directory.remove("a", "a1")  # the old process ends late
    await following.follow()
    assert following.view.workers["a"] == reborn


async def test_a_reset_cache_predicts_nothing(following):
    await following.publish(A, removed=[1, 2, 3])
    await following.follow()
    assert following.matched(1, 2, 3) == {"b": 2}


async def test_a_missing_event_makes_it_read_the_set_again(following):
    await following.publish(A, stored=[4])
    await following.publish(A, removed=[3])
    following.directory.num_lost = 1
    await following.follow()
    assert following.view.index.blocks("a") == set(digests(1, 2, 4))
    await following.publish(A, stored=[5])
    await following.follow()
    assert following.view.index.blocks("a") == set(digests(1, 2, 4, 5))


async def test_events_that_came_before_the_snapshot_are_not_applied_again(bench):
    await bench.register(A, 1)
    await bench.watcher.synchronise()
    await bench.publish(A, stored=[2])
    await bench.publish(A, removed=[2])
    bench.view.load("a", "a1", await bench.directory.blocks("a", "a1"))
    await bench.publish(A, stored=[2])
    await bench.follow()
    assert bench.view.index.blocks("a") == set(digests(1, 2))


async def test_a_worker_that_stops_refreshing_vanishes_after_its_ttl(following):
    following.clock.advance(3)
    await following.publish(B)
    await following.follow()
    following.clock.advance(1.9)
    await following.follow()
    assert set(following.view.workers) == {"a", "b"}
    following.clock.advance(1.1)
    await following.follow()
    assert set(following.view.workers) == {"b"}
    assert following.matched(1, 2, 3) == {"b": 2}


async def test_without_the_directory_the_last_view_serves_on(following):
    await following.outage()
    following.clock.advance(1000)
    await following.outage()
    assert set(following.view.workers) == {"a", "b"}
    assert following.matched(1, 2, 3) == {"a": 3, "b": 2}


async def test_after_an_outage_missed_changes_are_there(following):
    await following.outage()
    await following.publish(A, removed=[2])
    await following.directory.remove("b", "b1")
    await following.watcher.synchronise()
    assert following.matched(1, 2, 3)["a"] == 1


async def test_an_emptied_directory_leaves_everybody_one_ttl_to_come_back(following):
    await following.outage()
    following.clock.advance(1000)
    following.wipe()
    await following.watcher.synchronise()
    assert set(following.view.workers) == {"a", "b"}
    following.clock.advance(2)
    await following.register(A, 1, 4)
    await following.follow()
    assert following.matched(1, 4) == {"a": 2, "b": 1}
    following.clock.advance(2.9)
    await following.publish(A)
    await following.follow()
    assert set(following.view.workers) == {"a", "b"}
    following.clock.advance(1.1)
    await following.follow()
    assert set(following.view.workers) == {"a"}


async def test_emptied_without_an_outage_nobody_is_lost_who_refreshes(following):
    following.clock.advance(1)
    await following.follow()
    following.wipe()
    following.clock.advance(1)
    await following.follow()
    assert set(following.view.workers) == {"a", "b"}
    await following.register(A, 1)
    await following.register(B, 1)
    following.clock.advance(4)
    await following.follow()
    assert following.matched(1, 2) == {"a": 1, "b": 1}


async def test_a_record_about_to_expire_at_the_end_of_an_outage_has_a_ttl_too(following):
    await following.outage()
    following.clock.advance(4.9)
    await following.watcher.synchronise()
    following.clock.advance(4.9)
    await following.follow()
    assert set(following.view.workers) == {"a", "b"}


async def test_marked_gone_is_not_listed_again_while_it_may_be_dead(following):
    following.view.mark_gone("a", "a1")
    for _ in range(4):
        following.clock.advance(1.2)
        await following.publish(A, stored=[9])
        await following.follow()
        assert set(following.view.workers) == {"b"}
        assert following.matched(1) == {"b": 1}
        await following.publish(B)


async def test_marked_gone_and_still_alive_comes_back_with_its_blocks(following):
    following.view.mark_gone("a", "a1")
    for _ in range(3):
        following.clock.advance(2)
        await following.publish(A)
        await following.publish(B)
        await following.follow()
    assert following.view.workers["a"] == A
    assert following.matched(1, 2, 3) == {"a": 3, "b": 2}


async def test_marked_gone_and_dead_never_comes_back(following):
    following.view.mark_gone("a", "a1")
    for _ in range(10):
        following.clock.advance(1.1)
        await following.publish(B)
        await following.follow()
        assert set(following.view.workers) == {"b"}


async def test_a_new_incarnation_of_a_gone_worker_is_listed_at_once(following):
    following.view.mark_gone("a", "a1")
    reborn = record(worker_id="a", incarnation="a2")
    await following.register(reborn)
    await following.follow()
    assert following.view.workers["a"] == reborn


async def test_what_workers_report_is_as_old_as_the_directory_is_silent(bench):
    await bench.register(A, 1)
    running = asyncio.create_task(bench.watcher.run())
    await until(lambda: bench.matched(1) == {"a": 1})
    bench.directory.cut = True
    await bench.publish(A, stored=[2])  # wakes the read that was under way

    def is_silent() -> bool:
        bench.clock.advance(0.01)
        return bench.view.report_age_s >= 0.5

    await until(is_silent)
    bench.directory.cut = False
    await bench.register(A, 1)
    await until(lambda: bench.view.report_age_s == 0.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_run_follows_through_an_outage_and_logs_it_once(bench):
    await bench.register(A, 1)
    running = asyncio.create_task(bench.watcher.run())
    await until(lambda: bench.matched(1) == {"a": 1})
    with capture_logs() as logs:
        bench.directory.cut = True
        await bench.publish(A, stored=[2])  # wakes the read that was under way
        await until(lambda: bool(logs))
        await bench.publish(A, stored=[3])
        bench.directory.cut = False
        await until(lambda: bench.matched(1, 2, 3) == {"a": 3})
    assert [line["event"] for line in logs] == [
        "directory lost, the last view serves on",
        "directory is back",
    ]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 1), st.integers(0, 17)),  # a block and its tier
        st.tuples(st.just("remove"), st.integers(0, 1), st.integers(0, 5)),
        st.tuples(
            st.sampled_from(["publish", "publish unanswered", "publish cut", "restart"]),
            st.integers(0, 1),
            st.just(0),
        ),
        st.tuples(
            st.sampled_from(["follow", "follow with losses", "outage", "wipe", "tick"]),
            st.just(0),
            st.just(0),
        ),
    ),
    max_size=40,
)


class Fleet:
    """Two publishers and a watcher, under any order of changes, losses and outages."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.num_starts = 0
        self.held: list[dict[bytes, Tier]] = [{}, {}]
        self.publishers: list[Publisher] = []

    async def begin(self) -> None:
        self.publishers = [self.new_publisher(0), self.new_publisher(1)]
        for publisher in self.publishers:
            await publisher.publish_pending()
        await self.bench.watcher.synchronise()

    def new_publisher(self, number: int) -> Publisher:
        self.num_starts += 1
        worker = record(worker_id=f"w{number}", incarnation=str(self.num_starts))
        self.held[number].clear()
        return Publisher(self.bench.directory, lambda: worker, SETTINGS, self.bench.clock)

    async def do(self, name: str, number: int, block: int) -> None:
        if name == "store":
            stored = in_tier(Tier(block % len(Tier)), block // len(Tier))
            self.held[number] |= stored
            self.publishers[number].add(stored, [])
        elif name == "remove":
            self.held[number].pop(digest(block), None)
            self.publishers[number].add({}, [digest(block)])
        elif name == "restart":
            self.publishers[number] = self.new_publisher(number)
            await self.publishers[number]._register(self.publishers[number]._record_source(), take_over=True)
        elif name == "wipe":
            self.bench.directory.target = MemoryDirectory(SETTINGS, self.bench.clock)
            await self.bench.watcher.synchronise()  # a restart breaks connections
        elif name == "tick":
            self.bench.clock.advance(1.7)
        elif name == "outage":
            await self.bench.outage()
            await self.bench.watcher.synchronise()
        elif name.startswith("follow"):
            self.bench.directory.num_lost = 2 if name == "follow with losses" else 0
            await self.bench.follow()
            self.bench.directory.num_lost = 0
        else:
            await self.publish(number, name)

    async def publish(self, number: int, name: str) -> None:
        directory = self.bench.directory
        directory.cut, directory.cut_answers = name == "publish cut", name == "publish unanswered"
        with contextlib.suppress(Unavailable):
            await self.publishers[number].publish_pending()
        directory.cut = directory.cut_answers = False

    async def settle(self) -> None:
        """One refresh of everybody: what any loss may take to heal."""
        for _ in range(2):
            self.bench.clock.advance(SETTINGS.worker_ttl_s / 3 + 0.1)
            for publisher in self.publishers:
                await publisher.publish_pending()
            await self.bench.follow()


async def settled_fleet(steps) -> Fleet:
    fleet = Fleet()
    await fleet.begin()
    for step in steps:
        await fleet.do(*step)
    await fleet.settle()
    return fleet


@settings(deadline=None)
@given(STEPS)
def test_whatever_was_lost_the_view_is_true_one_refresh_later(steps):
    fleet = asyncio.run(settled_fleet(steps))
    view = fleet.bench.view
    assert set(view.workers) == {"w0", "w1"}
    for number, held in enumerate(fleet.held):
        record_now = fleet.publishers[number]._record_source()
        assert view.workers[f"w{number}"] == record_now
        assert view.index.blocks(f"w{number}") == set(held)
