"""What is Redis's own: keys, expiry, strangers in the keys, errors and their texts, a server that hangs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio
from structlog.testing import capture_logs

from headrace.cluster.redis_server import RedisServer
from headrace.config import DirectorySettings
from headrace.directory import redis_directory
from headrace.directory.records import DirectoryEvent
from headrace.directory.redis_directory import RedisDirectory, shown_url
from headrace.errors import InvalidRequest, Unavailable
from tests.support.directory_samples import RECORD, on_device, record

OTHER = record(worker_id="decode-1", incarnation="other")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def settings(server) -> DirectorySettings:
    return DirectorySettings(url=server.url, cluster="blue")


@pytest.fixture
async def directory(settings) -> AsyncIterator[RedisDirectory]:
    directory = RedisDirectory(settings)
    yield directory
    await directory.close()


@pytest.fixture
async def raw(server) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(server.url) as client:
        yield client


async def test_keys_and_their_expiry(directory, raw):
    await directory.register(RECORD, 1, on_device(1), take_over=True)
    keys = {key.decode() async for key in raw.scan_iter()}
    mortal = {"headrace:{blue}:worker:decode-0", "headrace:{blue}:blocks:decode-0:first"}
    assert keys == mortal | {"headrace:{blue}:workers", "headrace:{blue}:events"}
    for key in mortal:
        assert 0 < await raw.pttl(key) <= 5000


async def test_a_publish_refreshes_all_that_expires(directory, raw):
    await directory.register(RECORD, 1, on_device(1), take_over=True)
    keys = ["headrace:{blue}:worker:decode-0", "headrace:{blue}:blocks:decode-0:first"]
    for key in keys:
        await raw.pexpire(key, 2000)
    await directory.publish(RECORD, DirectoryEvent("decode-0", "first", 2))
    assert [await raw.pttl(key) > 2000 for key in keys] == [True, True]


async def test_names_of_dead_workers_do_not_pile_up(directory, raw):
    await raw.zadd("headrace:{blue}:workers", {f"dead-{n}": n for n in range(100)})
    await directory.register(RECORD, 1, {}, take_over=True)
    assert await raw.zrange("headrace:{blue}:workers", 0, -1) == [b"decode-0"]


async def test_the_stream_is_bounded(directory, raw, monkeypatch):
    monkeypatch.setattr(redis_directory, "_MAX_EVENTS", 100)
    await directory.register(RECORD, 1, {}, take_over=True)
    for sequence in range(2, 500):
        await directory.publish(RECORD, DirectoryEvent("decode-0", "first", sequence))
    assert await raw.xlen("headrace:{blue}:events") <= 250  # a whole node of the stream more than asked for


async def test_clusters_do_not_see_each_other(directory, settings):
    green = RedisDirectory(settings.model_copy(update={"cluster": "green"}))
    position, _ = await green.events("", 0)
    await directory.register(RECORD, 1, on_device(1), take_over=True)
    assert await green.workers() == {}
    assert await green.blocks("decode-0", "first") is None
    assert (await green.events(position, 0.01))[1] == []
    await green.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw, key: raw.hset(key, "record", b"\xff{"),
        lambda raw, key: raw.hset(key, "incarnation", b"\xff"),
        lambda raw, key: raw.hdel(key, "record"),
        lambda raw, key: raw.delete(key),
        lambda raw, key: raw.persist(key),
    ],
)
async def test_one_damaged_record_hides_no_other(directory, raw, damage):
    await directory.register(RECORD, 1, {}, take_over=True)
    await directory.register(OTHER, 1, {}, take_over=True)
    await damage(raw, "headrace:{blue}:worker:decode-0")
    assert list(await directory.workers()) == [OTHER]


async def test_a_key_of_another_type_hides_no_other_worker(directory, raw):
    await directory.register(RECORD, 1, on_device(1), take_over=True)
    await directory.register(OTHER, 1, on_device(1), take_over=True)
    for key in ("headrace:{blue}:worker:decode-0", "headrace:{blue}:blocks:decode-1:other"):
        await raw.set(key, "a string")
    assert list(await directory.workers()) == [OTHER]
    with capture_logs() as logs:
        assert await directory.blocks("decode-0", "first") is None
        assert await directory.blocks("decode-1", "other") is None
    assert [line["worker"] for line in logs] == ["decode-0", "decode-1"]


async def test_a_garbled_sequence_is_no_snapshot(directory, raw):
    await directory.register(RECORD, 1, on_device(1), take_over=True)
    await raw.hset("headrace:{blue}:worker:decode-0", "sequence", "many")
    assert await directory.blocks("decode-0", "first") is None


async def test_garbled_events_are_passed_over(directory, raw):
    position, _ = await directory.events("", 0)
    await raw.xadd("headrace:{blue}:events", {"hello": "world"})
    await directory.register(RECORD, 1, {}, take_over=True)
    assert [event.worker_id for event in (await directory.events(position, 5))[1]] == ["decode-0"]


async def test_a_restarted_server_is_used_again(directory, server):
    await directory.register(RECORD, 1, {}, take_over=True)
    server.stop()
    with pytest.raises(Unavailable):
        await directory.workers()
    server.start()
    assert await directory.workers() == {}


async def test_a_demoted_primary_is_not_held_on_to(directory, raw):
    async def connections() -> set[bytes]:
        return {client["id"] for client in await raw.client_list()} - {str(await raw.client_id())}

    await directory.register(RECORD, 1, {}, take_over=True)
    before = await connections()
    await raw.replicaof("127.0.0.1", "1")
    with pytest.raises(Unavailable, match="read only"):
        await directory.publish(RECORD, DirectoryEvent("decode-0", "first", 2))
    await directory.workers()
    after = await connections()
    assert (len(before), len(after), before & after) == (1, 1, set())


async def test_a_hanging_server_times_out_and_blocks_nobody_else(directory, server, monkeypatch):
    monkeypatch.setattr(redis_directory, "_ANSWER_TIMEOUT_S", 0.2)
    await directory.register(RECORD, 1, {}, take_over=True)
    position, _ = await directory.events("", 0)
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0.001)
            num_turns += 1

    counting = asyncio.create_task(count_turns())
    os.kill(server.pid, signal.SIGSTOP)
    try:
        results = await asyncio.gather(
            directory.workers(),
            directory.events(position, 0.1),
            directory.publish(RECORD, DirectoryEvent("decode-0", "first", 2)),
            return_exceptions=True,
        )
    finally:
        os.kill(server.pid, signal.SIGCONT)
    counting.cancel()
    assert [type(result) for result in results] == [Unavailable] * 3
    assert "no answer within 0.2 s" in str(results[0])
    assert num_turns >= 5
    assert list(await directory.workers()) == [RECORD]


async def test_whoever_is_cancelled_ends(directory, raw):
    async def forever() -> None:
        while True:
            await directory.workers()

    for number in range(200):
        task = asyncio.create_task(forever())
        await asyncio.sleep(0.0002 * (number % 10))
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=10)
        if not done:
            task.cancel()  # only the first one was lost
        assert done, f"still running after cancellation {number}"
    assert len(await raw.client_list()) <= 9  # the pool's, and this one


async def failure(url: str) -> str:
    """What the first operation says."""
    directory = RedisDirectory(DirectorySettings(url=url))
    try:
        with pytest.raises(Unavailable) as caught:
            await directory.workers()
    finally:
        await directory.close()
    return str(caught.value)


async def test_errors_name_the_url_without_the_password(server):
    server.stop()
    message = await failure(f"redis://me:s3cret@127.0.0.1:{server.port}/0")
    assert f"redis://me:***@127.0.0.1:{server.port}/0" in message
    assert "s3cret" not in message


async def test_a_wrong_password_is_unavailable_and_not_shown(server, raw):
    await raw.config_set("requirepass", "right")
    message = await failure(server.url.replace("//", "//:s3cret@"))
    assert "invalid username-password" in message
    assert "s3cret" not in message


async def test_a_host_that_does_not_exist_is_unavailable():
    assert "redis://nowhere.invalid:6379" in await failure("redis://nowhere.invalid:6379")


@pytest.mark.parametrize("url", ["http://:s3cret@host/", "host:6379", "redis://:s3cret@host:notaport/0", ""])
def test_a_url_of_another_kind_is_refused(url):
    with pytest.raises(InvalidRequest, match=r"directory\.url") as caught:
        RedisDirectory(DirectorySettings(url=url))
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("rediss://:pw@redis.example:6380/2", "rediss://:***@redis.example:6380/2"),
        ("redis://user:pw@host/0?password=pw2&timeout=1", "redis://user:***@host/0"),
        ("redis://:p@w:x@host:1/0", "redis://:***@host:1/0"),
        ("redis://:p/w@host:1/0", "redis://…"),
        ("unix:///run/redis.sock?password=pw", "unix:///run/redis.sock"),
    ],
)
def test_shown_url(url, shown):
    assert shown_url(url) == shown
