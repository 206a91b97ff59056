"""The publisher: what a worker adds ends up in the directory, coalesced, in order, and again after any loss."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from headrace.clock import VirtualClock
from headrace.config import DirectorySettings
from headrace.directory.memory_directory import MemoryDirectory
from headrace.directory.publisher import Publisher
from headrace.directory.records import DirectoryEvent, EventKind, RouterShare, WorkerLoad
from headrace.errors import Unavailable
from headrace.tier import Tier
from tests.support.directory_samples import (
    RECORD,
    FaultyDirectory,
    digests,
    in_tier,
    on_device,
    record,
    until,
)

SETTINGS = DirectorySettings(worker_ttl_s=6.0, publish_interval_s=0.01)


class Bench:
    """A publisher that is driven by hand, and the directory it writes to."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.directory = FaultyDirectory(MemoryDirectory(SETTINGS, self.clock))
        self.record = RECORD
        self.publisher = Publisher(self.directory, lambda: self.record, SETTINGS, self.clock)

    async def held(self) -> Mapping[bytes, Tier] | None:
        snapshot = await self.directory.blocks(self.record.worker_id, self.record.incarnation)
        return snapshot and snapshot.blocks

    async def events(self) -> list[DirectoryEvent]:
        return (await self.directory.target.events("0", 0.001))[1]

    async def cut_during_publish(self) -> None:
        self.directory.cut = True
        with pytest.raises(Unavailable):
            await self.publisher.publish_pending()
        self.directory.cut = False


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
async def joined(bench):
    """After the first publish, with blocks 1 and 2."""
    bench.publisher.add(on_device(1, 2), [])
    await bench.publisher.publish_pending()
    return bench


async def test_the_first_publish_brings_record_and_all_blocks(joined):
    assert list(await joined.directory.workers()) == [RECORD]
    assert await joined.held() == on_device(1, 2)


async def test_changes_go_as_one_event(joined):
    joined.publisher.add(on_device(3), digests(1))
    joined.publisher.add(on_device(4), [])
    await joined.publisher.publish_pending()
    assert await joined.held() == on_device(2, 3, 4)
    last = (await joined.events())[-1]
    assert (set(last.stored), set(last.removed), last.kind) == (
        set(digests(3, 4)),
        set(digests(1)),
        EventKind.CHANGED,
    )


async def test_what_comes_and_goes_between_publishes_cancels_out(joined):
    num_writes = joined.directory.num_writes
    joined.publisher.add(on_device(3), digests(1))
    joined.publisher.add(on_device(1), digests(3))
    await joined.publisher.publish_pending()
    assert joined.directory.num_writes == num_writes
    assert await joined.held() == on_device(1, 2)


async def test_a_hash_in_both_lists_was_removed_first(joined):
    joined.publisher.add(on_device(1), digests(1))
    await joined.publisher.publish_pending()
    assert await joined.held() == on_device(1, 2)


async def test_a_move_to_another_tier_is_one_change(joined):
    joined.publisher.add(in_tier(Tier.HOST, 1), [])
    joined.publisher.add(in_tier(Tier.DISK, 1), [])
    await joined.publisher.publish_pending()
    assert await joined.held() == on_device(2) | in_tier(Tier.DISK, 1)
    last = (await joined.events())[-1]
    assert (last.stored, last.removed) == (in_tier(Tier.DISK, 1), ())


async def test_a_move_there_and_back_cancels_out(joined):
    num_writes = joined.directory.num_writes
    joined.publisher.add(in_tier(Tier.HOST, 1), [])
    joined.publisher.add(on_device(1), [])
    await joined.publisher.publish_pending()
    assert joined.directory.num_writes == num_writes


async def test_repeated_news_is_no_news(joined):
    num_writes = joined.directory.num_writes
    joined.publisher.add(on_device(1), digests(9))
    await joined.publisher.publish_pending()
    assert joined.directory.num_writes == num_writes


async def test_event_numbers_grow_by_one(joined):
    for number in (3, 4, 5):
        joined.publisher.add(on_device(number), [])
        await joined.publisher.publish_pending()
    assert [event.sequence for event in await joined.events()] == [1, 2, 3, 4]


async def test_nothing_is_written_without_news_until_a_third_of_the_ttl(joined):
    num_writes = joined.directory.num_writes
    joined.clock.advance(1.9)
    joined.record = record(load=replace(RECORD.load, running=9))
    await joined.publisher.publish_pending()
    assert joined.directory.num_writes == num_writes
    joined.clock.advance(0.2)
    await joined.publisher.publish_pending()
    assert await joined.directory.workers() == {joined.record: 6.0}


async def test_a_change_of_the_record_is_news_at_once(joined):
    joined.record = record(draining=True, load=WorkerLoad(0, 0, 0, 0, 0))
    await joined.publisher.publish_pending()
    assert list(await joined.directory.workers()) == [joined.record]
    assert (await joined.events())[-1].kind is EventKind.RELOAD


async def test_many_blocks_are_announced_without_their_hashes(joined):
    blocks = on_device(*range(100, 5000))
    joined.publisher.add(blocks, [])
    await joined.publisher.publish_pending()
    assert await joined.held() == blocks | on_device(1, 2)
    last = (await joined.events())[-1]
    assert (last.kind, last.stored) == (EventKind.RELOAD, {})


async def test_after_an_outage_the_directory_holds_what_the_worker_holds(joined):
    joined.publisher.add(on_device(3), digests(1))
    await joined.cut_during_publish()
    joined.publisher.add(on_device(4), digests(3))
    await joined.publisher.publish_pending()
    assert await joined.held() == on_device(2, 4)


async def test_a_write_whose_answer_was_lost_does_no_harm(joined):
    joined.publisher.add(on_device(3), digests(1))
    joined.directory.cut_answers = True
    with pytest.raises(Unavailable):
        await joined.publisher.publish_pending()
    joined.directory.cut_answers = False
    joined.publisher.add(on_device(1), digests(3))
    await joined.publisher.publish_pending()
    assert await joined.held() == on_device(1, 2)
    sequences = [event.sequence for event in await joined.events()]
    assert sequences == sorted(set(sequences))


async def test_an_emptied_directory_is_refilled_by_the_next_refresh(joined):
    joined.directory.target = MemoryDirectory(SETTINGS, joined.clock)
    joined.clock.advance(2.1)
    await joined.publisher.publish_pending()
    assert list(await joined.directory.workers()) == [RECORD]
    assert await joined.held() == on_device(1, 2)


async def test_an_older_copy_of_the_directory_is_brought_up_to_date(joined):
    replica = MemoryDirectory(SETTINGS, joined.clock)
    await replica.register(RECORD, 1, on_device(1, 2), take_over=True)
    joined.publisher.add(on_device(3), [])
    await joined.publisher.publish_pending()
    joined.directory.target = replica
    joined.publisher.add(on_device(4), [])
    await joined.publisher.publish_pending()
    assert await joined.held() == on_device(1, 2, 3, 4)


async def test_an_expired_record_is_registered_again(joined):
    joined.clock.advance(100)
    await joined.publisher.publish_pending()
    assert await joined.held() == on_device(1, 2)


async def test_what_is_kept_through_an_outage_is_bounded_by_the_cache(joined):
    joined.directory.cut = True
    for number in range(10, 2000):
        joined.publisher.add(on_device(number), digests(number - 1))
        if number % 100 == 0:
            with pytest.raises(Unavailable):
                await joined.publisher.publish_pending()
    kept = [value for value in vars(joined.publisher).values() if isinstance(value, set | dict | list)]
    assert len(kept) >= 2
    assert max(map(len, kept)) <= 3


async def test_a_worker_id_taken_over_is_left_alone_until_it_is_free(joined):
    successor = record(incarnation="second")
    await joined.directory.register(successor, 1, on_device(7), take_over=True)
    joined.publisher.add(on_device(3), [])
    with capture_logs() as logs:
        for _ in range(3):
            await joined.publisher.publish_pending()
    assert list(await joined.directory.workers()) == [successor]
    assert [line["log_level"] for line in logs] == ["error"]
    assert (
        await joined.publisher._try_publish() == 2.0
    )  # asks again, with all its blocks, at the pace of refreshes
    await joined.directory.remove("decode-0", "second")
    await joined.publisher.publish_pending()
    assert await joined.held() == on_device(1, 2, 3)


async def test_start_takes_the_worker_id_over(bench):
    await bench.directory.register(record(incarnation="zeroth"), 50, on_device(9), take_over=True)
    await bench.publisher.start()
    assert list(await bench.directory.workers()) == [RECORD]
    await bench.publisher.stop()


async def test_start_gives_up_in_time_and_says_what_failed():
    directory = FaultyDirectory(MemoryDirectory(SETTINGS, VirtualClock()))
    directory.cut = True
    publisher = Publisher(directory, lambda: RECORD, SETTINGS)
    with pytest.raises(Unavailable, match=r"within 0\.3 s: directory at test: cut off"):
        await publisher.start(timeout_s=0.3)
    await publisher.stop()


async def test_start_waits_for_a_directory_that_comes_late(bench):
    bench.directory.cut = True

    def source():
        bench.directory.cut = bench.directory.cut and bench.clock.now() < 1
        bench.clock.advance(1)
        return RECORD

    publisher = Publisher(bench.directory, source, SETTINGS, bench.clock)
    await publisher.start()
    assert list(await bench.directory.workers()) == [RECORD]
    await publisher.stop()


async def test_publishes_in_the_background_until_stopped(bench):
    await bench.publisher.start()
    bench.publisher.add(on_device(1), [])
    await until(lambda: bench.directory.num_writes == 2)
    assert await bench.held() == on_device(1)
    await bench.publisher.stop()
    assert await bench.directory.workers() == {}
    assert (await bench.events())[-1].kind is EventKind.LEFT


async def test_an_outage_in_the_background_is_logged_once(bench):
    await bench.publisher.start()
    with capture_logs() as logs:
        bench.directory.cut = True
        bench.publisher.add(on_device(1), [])
        await until(lambda: bench.publisher._num_failures >= 3)
        bench.directory.cut = False
        await until(lambda: bench.publisher._num_failures == 0)
    assert [line["log_level"] for line in logs] == ["warning", "info"]
    assert await bench.held() == on_device(1)
    await bench.publisher.stop()


async def test_leaving_without_a_directory_is_no_error(bench):
    await bench.publisher.start()
    bench.directory.cut = True
    with capture_logs() as logs:
        await bench.publisher.stop()
    assert "expire" in logs[-1]["event"]


async def test_stop_before_start_does_nothing(bench):
    await bench.publisher.stop()
    assert await bench.events() == []


async def test_a_failing_record_source_is_logged(bench):
    await bench.publisher.start()
    with capture_logs() as logs:
        bench.record = None  # what a bug in the worker could bring
        await until(lambda: bool(logs))
    assert logs[0]["log_level"] == "error"
    bench.record = RECORD
    await bench.publisher.stop()


def loaded(num_pending_tokens: int) -> WorkerLoad:
    return replace(RECORD.load, shares=(RouterShare("r", 1, 100, num_pending_tokens),))


async def test_a_change_of_the_shares_is_an_event_and_no_reason_to_read_the_record(joined):
    joined.record = replace(RECORD, load=loaded(70))
    await joined.publisher.publish_pending()
    await joined.publisher.publish_pending()
    _, news = await joined.events()
    assert (news.kind, news.shares) == (EventKind.CHANGED, joined.record.load.shares)
    assert list(await joined.directory.workers()) == [joined.record]
    joined.publisher.add(on_device(3), [])
    await joined.publisher.publish_pending()
    assert (await joined.events())[-1].shares is None


async def test_what_is_in_a_hurry_does_not_wait_for_the_interval():
    directory = MemoryDirectory(SETTINGS, VirtualClock())
    current = RECORD
    publisher = Publisher(directory, lambda: current, SETTINGS.model_copy(update={"publish_interval_s": 2.0}))
    await publisher.start()
    current = replace(RECORD, load=loaded(70))
    publisher.hurry()
    async with asyncio.timeout(1.0):
        _, events = await directory.events("1", 1.0)
    await publisher.stop()
    assert [event.shares for event in events] == [current.load.shares]


async def test_without_the_directory_nobody_hurries(joined):
    joined.publisher.add(on_device(9), [])
    await joined.cut_during_publish()
    joined.publisher.hurry()
    assert not joined.publisher._wake.is_set()


async def test_told_returns_when_the_directory_has_what_the_record_says_now(bench):
    await bench.publisher.start()
    try:
        bench.record = replace(RECORD, draining=True)
        await bench.publisher.told(5.0)
        [found] = await bench.directory.workers()
        assert found.draining
        bench.directory.cut = True
        bench.record = RECORD
        with pytest.raises(Unavailable, match="could not be told within"):
            await bench.publisher.told(0.05)
        bench.directory.cut = False
        await bench.publisher.told(5.0)
        [found] = await bench.directory.workers()
        assert not found.draining
    finally:
        await bench.publisher.stop()
