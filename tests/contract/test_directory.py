"""What publishers and watchers rely on, over every implementation of the directory seam."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from headrace.clock import VirtualClock
from headrace.cluster.redis_server import RedisServer
from headrace.config import DirectorySettings
from headrace.directory.base import BlockSnapshot, Directory
from headrace.directory.memory_directory import MemoryDirectory
from headrace.directory.records import DirectoryEvent, EventKind
from headrace.directory.redis_directory import RedisDirectory
from headrace.tier import Tier
from tests.support.directory_samples import RECORD, digests, in_tier, on_device, record

TTL_S = 30.0
SHORT_TTL_S = 0.2
SUCCESSOR = record(incarnation="second")

Expire = Callable[[], Awaitable[None]]


@pytest.fixture(scope="module")
def redis_url():
    with RedisServer() as server:
        yield server.url


@pytest.fixture(params=["memory", "redis"])
async def make(request, redis_url) -> AsyncIterator[Callable[[float], tuple[Directory, Expire]]]:
    """Builds an empty directory with a TTL, and what to await for records written before to expire."""
    made: list[RedisDirectory] = []

    def build(ttl_s: float) -> tuple[Directory, Expire]:
        settings = DirectorySettings(url=redis_url, cluster=secrets.token_hex(8), worker_ttl_s=ttl_s)
        if request.param == "memory":
            clock = VirtualClock()

            async def expire_virtually() -> None:
                clock.advance(ttl_s)

            return MemoryDirectory(settings, clock), expire_virtually

        async def expire() -> None:
            await asyncio.sleep(ttl_s * 1.1)

        made.append(RedisDirectory(settings))
        return made[-1], expire

    yield build
    for directory in made:
        await directory.close()


@pytest.fixture
def directory(make) -> Directory:
    return make(TTL_S)[0]


@pytest.fixture
async def joined(directory) -> Directory:
    """Holds the sample record with blocks 1 and 2 as of event 1."""
    assert await directory.register(RECORD, 1, on_device(1, 2), take_over=True)
    return directory


def changed(sequence, stored=(), removed=(), incarnation="first"):
    return DirectoryEvent("decode-0", incarnation, sequence, on_device(*stored), tuple(digests(*removed)))


async def state(directory):
    """Everything but the stream."""
    workers = set(await directory.workers())
    return workers, {
        each.incarnation: await directory.blocks("decode-0", each.incarnation) for each in workers
    }


def holds(record_now, sequence, *numbers):
    return {record_now}, {record_now.incarnation: BlockSnapshot(sequence, on_device(*numbers))}


async def test_empty(directory):
    assert await directory.workers() == {}
    assert await directory.blocks("decode-0", "first") is None
    assert (await directory.events("", 0))[1] == []


async def test_registered(joined):
    assert await state(joined) == holds(RECORD, 1, 1, 2)
    remaining_s = (await joined.workers())[RECORD]
    assert TTL_S / 2 < remaining_s <= TTL_S


async def test_registering_again_replaces_everything(joined):
    busy = record(draining=True)
    assert await joined.register(busy, 5, on_device(3), take_over=False)
    assert await state(joined) == holds(busy, 5, 3)


async def test_registered_without_blocks(directory):
    assert await directory.register(RECORD, 1, {}, take_over=True)
    assert await state(directory) == holds(RECORD, 1)


async def test_a_held_worker_id_is_kept(joined):
    assert not await joined.register(SUCCESSOR, 1, on_device(7), take_over=False)
    assert await state(joined) == holds(RECORD, 1, 1, 2)


async def test_a_held_worker_id_is_taken_over(joined):
    assert await joined.register(SUCCESSOR, 1, on_device(7), take_over=True)
    assert await state(joined) == holds(SUCCESSOR, 1, 7)
    assert await joined.blocks("decode-0", "first") is None
    assert not await joined.publish(RECORD, changed(2, stored=[9]))
    assert await state(joined) == holds(SUCCESSOR, 1, 7)


async def test_published_changes_record_and_blocks(joined):
    busy = record(draining=True)
    assert await joined.publish(busy, changed(2, stored=[3], removed=[1]))
    assert await state(joined) == holds(busy, 2, 2, 3)


async def test_a_block_is_in_the_tier_that_it_was_stored_in_last(joined):
    await joined.publish(RECORD, DirectoryEvent("decode-0", "first", 2, in_tier(Tier.DISK, 1, 3)))
    await joined.publish(RECORD, DirectoryEvent("decode-0", "first", 3, in_tier(Tier.HOST, 1)))
    snapshot = await joined.blocks("decode-0", "first")
    assert snapshot == BlockSnapshot(3, in_tier(Tier.HOST, 1) | on_device(2) | in_tier(Tier.DISK, 3))
    assert await joined.publish(RECORD, changed(4, removed=[1, 2, 3]))
    assert await state(joined) == holds(RECORD, 4)


async def test_tiers_survive_registration_and_events(joined):
    position, _ = await joined.events("", 0)
    blocks = on_device(1) | in_tier(Tier.HOST, 2) | in_tier(Tier.DISK, 3)
    assert await joined.register(RECORD, 2, blocks, take_over=False)
    assert await joined.blocks("decode-0", "first") == BlockSnapshot(2, blocks)
    event = DirectoryEvent("decode-0", "first", 3, in_tier(Tier.HOST, 1) | in_tier(Tier.DISK, 2))
    await joined.publish(RECORD, event)
    assert (await joined.events(position, 5))[1][-1] == event


async def test_an_event_without_changes_is_applied(joined):
    assert await joined.publish(RECORD, changed(2))
    assert await state(joined) == holds(RECORD, 2, 1, 2)


async def test_removing_the_last_block_leaves_the_worker(joined):
    assert await joined.publish(RECORD, changed(2, removed=[1, 2]))
    assert await state(joined) == holds(RECORD, 2)


@pytest.mark.parametrize("sequence", [1, 3, 0])
async def test_out_of_sequence_nothing_happens(joined, sequence):
    position, _ = await joined.events("", 0)
    assert not await joined.publish(record(draining=True), changed(sequence, stored=[3]))
    assert await state(joined) == holds(RECORD, 1, 1, 2)
    assert await joined.events(position, 0.01) == (position, [])


async def test_publishing_before_registering_does_nothing(directory):
    assert not await directory.publish(RECORD, changed(1, stored=[3]))
    assert await directory.workers() == {}


@pytest.mark.parametrize("num_blocks", [999, 1000, 1001, 10_000])
async def test_many_blocks(directory, num_blocks):
    assert await directory.register(RECORD, 1, on_device(*range(num_blocks)), take_over=True)
    assert await state(directory) == holds(RECORD, 1, *range(num_blocks))
    assert await directory.publish(RECORD, changed(2, removed=range(num_blocks - 1)))
    assert await state(directory) == holds(RECORD, 2, num_blocks - 1)


async def test_removed(joined):
    await joined.remove("decode-0", "first")
    assert await joined.workers() == {}
    assert await joined.blocks("decode-0", "first") is None
    assert not await joined.publish(RECORD, changed(2))


async def test_removing_an_earlier_incarnation_touches_nothing(joined):
    await joined.register(SUCCESSOR, 1, on_device(7), take_over=True)
    await joined.remove("decode-0", "first")
    assert await state(joined) == holds(SUCCESSOR, 1, 7)


async def test_events_in_order(joined):
    start, _ = await joined.events("", 0)
    await joined.publish(RECORD, changed(2, stored=[3], removed=[1]))
    await joined.publish(RECORD, DirectoryEvent("decode-0", "first", 3, on_device(4), kind=EventKind.RELOAD))
    await joined.register(RECORD, 5, on_device(8), take_over=False)
    await joined.remove("decode-0", "first")
    end, events = await joined.events(start, 5)
    assert events == [
        changed(2, stored=[3], removed=[1]),
        DirectoryEvent("decode-0", "first", 3, kind=EventKind.RELOAD),
        DirectoryEvent("decode-0", "first", 5, kind=EventKind.RELOAD),
        DirectoryEvent("decode-0", "first", 0, kind=EventKind.LEFT),
    ]
    assert await joined.events(end, 0.01) == (end, [])


async def test_the_position_goes_on_behind_what_was_read(joined):
    position, _ = await joined.events("", 0)
    for sequence in (2, 3, 4):
        await joined.publish(RECORD, changed(sequence))
        position, events = await joined.events(position, 5)
        assert [event.sequence for event in events] == [sequence]


async def test_waits_for_the_next_event(joined):
    position, _ = await joined.events("", 0)
    reading = asyncio.create_task(joined.events(position, 10))
    await asyncio.sleep(0.02)
    assert not reading.done()
    await joined.publish(RECORD, changed(2))
    assert (await reading)[1] == [changed(2)]


async def test_waits_from_the_very_beginning(directory):
    position, _ = await directory.events("", 0)
    reading = asyncio.create_task(directory.events(position, 10))
    await directory.register(RECORD, 1, {}, take_over=True)
    assert [event.sequence for event in (await reading)[1]] == [1]


async def test_readers_do_not_take_events_from_each_other(joined):
    position, _ = await joined.events("", 0)
    await joined.publish(RECORD, changed(2))
    first, second = await asyncio.gather(joined.events(position, 5), joined.events(position, 5))
    assert first == second


async def test_unrefreshed_expires(make):
    directory, expire = make(SHORT_TTL_S)
    await directory.register(RECORD, 1, on_device(1), take_over=True)
    await expire()
    assert await directory.workers() == {}
    assert await directory.blocks("decode-0", "first") is None
    assert not await directory.publish(RECORD, changed(2))
    assert await directory.register(SUCCESSOR, 1, on_device(2), take_over=False)
    assert await state(directory) == holds(SUCCESSOR, 1, 2)


async def test_many_workers_at_once(directory):
    fleet = [record(worker_id=f"w{n}", incarnation=f"i{n}") for n in range(20)]
    results = await asyncio.gather(
        *(directory.register(each, 1, on_device(n), take_over=True) for n, each in enumerate(fleet))
    )
    assert all(results)
    assert set(await directory.workers()) == set(fleet)
    for n, each in enumerate(fleet):
        snapshot = await directory.blocks(each.worker_id, each.incarnation)
        assert snapshot == BlockSnapshot(1, on_device(n))
