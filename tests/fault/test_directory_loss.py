"""Redis away, back, and empty (cases RD-01, RO-04): the router's view serves on, and the workers refill the directory.

Real Redis processes, real publishers and watchers. Nothing here restarts a worker.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
from structlog.testing import capture_logs

from headrace.cluster.redis_server import RedisServer
from headrace.config import DirectorySettings
from headrace.directory import redis_directory
from headrace.directory.base import retry_delay_s
from headrace.directory.publisher import Publisher
from headrace.directory.redis_directory import RedisDirectory
from headrace.directory.view import DirectoryView
from headrace.directory.watcher import Watcher
from tests.support.directory_samples import digests, lengths, on_device, record, until

TTL_S = 0.6


class Worker:
    def __init__(self, settings: DirectorySettings, worker_id: str, incarnation: str = "first") -> None:
        self.record = record(worker_id=worker_id, incarnation=incarnation)
        self.directory = RedisDirectory(settings)
        self.publisher = Publisher(self.directory, lambda: self.record, settings)

    async def crash(self) -> None:
        """Ends without a word to the directory."""
        task = self.publisher._task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self.directory.close()


class Fleet:
    """Workers and one router's view, all on one Redis."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.settings = DirectorySettings(url=server.url, worker_ttl_s=TTL_S, publish_interval_s=0.01)
        self.workers: list[Worker] = []
        self.views: list[tuple[RedisDirectory, asyncio.Task[None]]] = []
        self.view = self.new_router()

    def new_router(self) -> DirectoryView:
        view, directory = DirectoryView(), RedisDirectory(self.settings)
        watching = asyncio.create_task(Watcher(directory, view, self.settings).run())
        self.views.append((directory, watching))
        return view

    async def start(self, worker_id: str, *numbers: int, incarnation: str = "first") -> Worker:
        worker = Worker(self.settings, worker_id, incarnation)
        worker.publisher.add(on_device(*numbers), [])
        await worker.publisher.start()
        self.workers.append(worker)
        return worker

    async def crash(self, worker: Worker) -> None:
        self.workers.remove(worker)
        await worker.crash()

    def matched(self, *numbers: int, view: DirectoryView | None = None) -> dict[str, int]:
        return lengths((view or self.view).index.match(digests(*numbers)))

    async def close(self) -> None:
        for worker in self.workers:
            await worker.publisher.stop()
            await worker.directory.close()
        for directory, watching in self.views:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await directory.close()


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
async def fleet(server) -> AsyncIterator[Fleet]:
    """Two workers: a with blocks 1 2 3, b with blocks 1 2."""
    fleet = Fleet(server)
    await fleet.start("a", 1, 2, 3)
    await fleet.start("b", 1, 2)
    await until(lambda: fleet.matched(1, 2, 3) == {"a": 3, "b": 2})
    yield fleet
    await fleet.close()


async def longer_than_the_ttl(fleet: Fleet, *, seen: set[str]) -> None:
    """Two TTLs go by, and at every moment the view has these workers."""
    for _ in range(40):
        await asyncio.sleep(TTL_S / 20)
        assert set(fleet.view.workers) == seen


async def test_rd01_killed_and_restarted_empty(fleet, server):
    with capture_logs() as logs:
        os.kill(server.pid, signal.SIGKILL)
        await longer_than_the_ttl(fleet, seen={"a", "b"})
        fleet.workers[0].publisher.add(on_device(4), digests(2))  # work goes on without a directory
        assert fleet.matched(1, 2, 3) == {"a": 3, "b": 2}
        server.stop()
        server.start()
        await until(lambda: fleet.matched(1, 2, 3) == {"a": 1, "b": 2})
        await longer_than_the_ttl(fleet, seen={"a", "b"})
    # One for each process that lost it: two publishers and a watcher.
    assert [line["log_level"] for line in logs].count("warning") == 3
    await fleet.start("c", 1)
    await until(lambda: fleet.matched(1) == {"a": 1, "b": 1, "c": 1})


async def test_rd01_killed_and_restarted_with_its_data(fleet, server, tmp_path, monkeypatch):
    """What it kept is older than what the workers did meanwhile, and names one that is gone."""
    async with asyncio.timeout(20):
        await fleet.workers[0].directory._redis.save()
    folder = shutil.copytree(server._folder, tmp_path / "kept")
    os.kill(server.pid, signal.SIGKILL)
    await fleet.crash(fleet.workers[1])
    fleet.workers[0].publisher.add(on_device(4), digests(2))
    server.stop()
    monkeypatch.setattr("headrace.cluster.redis_server.tempfile.mkdtemp", lambda **_: str(folder))
    server.start()
    assert "Done loading RDB" in (folder / "log").read_text()
    await until(lambda: fleet.view.index.blocks("a") == set(on_device(1, 3, 4)))
    await until(lambda: set(fleet.view.workers) == {"a"})
    assert fleet.matched(1, 2) == {"a": 1}
    await fleet.start("c", 1)
    await until(lambda: fleet.matched(1) == {"a": 1, "c": 1})


def test_rd01_who_lost_it_comes_back_less_and_less_often_and_not_together():
    for num_failures, longest_s in ((1, 0.2), (2, 0.4), (3, 0.8), (10, 3.0), (10_000, 3.0)):
        delays = [retry_delay_s(num_failures, 3.0) for _ in range(200)]
        assert longest_s / 2 <= min(delays) < max(delays) <= longest_s
        assert max(delays) - min(delays) > longest_s / 4


async def test_a_worker_that_died_during_the_outage_is_dropped_after_it(fleet, server):
    os.kill(server.pid, signal.SIGKILL)
    await fleet.crash(fleet.workers[0])
    await longer_than_the_ttl(fleet, seen={"a", "b"})
    server.stop()
    server.start()
    await until(lambda: set(fleet.view.workers) == {"b"})
    assert fleet.matched(1, 2) == {"b": 2}


async def test_a_worker_that_restarted_during_the_outage_replaces_itself(fleet, server):
    os.kill(server.pid, signal.SIGKILL)
    await fleet.crash(fleet.workers[0])
    server.stop()
    starting = asyncio.create_task(fleet.start("a", 1, incarnation="second"))
    await asyncio.sleep(0.05)
    server.start()
    await starting
    await until(lambda: fleet.matched(1, 2, 3) == {"a": 1, "b": 2})
    assert fleet.view.workers["a"].incarnation == "second"


async def test_flushed_while_everybody_is_connected(fleet, server):
    async with asyncio.timeout(20):
        await fleet.workers[0].directory._redis.flushall()
    await longer_than_the_ttl(fleet, seen={"a", "b"})
    fleet.workers[1].publisher.add(on_device(3), [])
    await until(lambda: fleet.matched(1, 2, 3) == {"a": 3, "b": 3})


async def test_rd01_paused(fleet, server, monkeypatch):
    monkeypatch.setattr(redis_directory, "_ANSWER_TIMEOUT_S", 0.1)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        await longer_than_the_ttl(fleet, seen={"a", "b"})
        fleet.workers[0].publisher.add(on_device(4), digests(2))
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await until(lambda: fleet.matched(1, 2, 3) == {"a": 1, "b": 2})
    await longer_than_the_ttl(fleet, seen={"a", "b"})


async def test_many_restarts_in_a_row(fleet, server):
    for number in range(10, 15):
        server.stop()
        fleet.workers[0].publisher.add(on_device(number), digests(number - 1))
        server.start()
        await until(lambda number=number: fleet.view.index.blocks("a") == set(digests(1, 2, 3, number)))
    assert set(fleet.view.workers) == {"a", "b"}


async def test_a_crashed_worker_expires(fleet):
    await fleet.crash(fleet.workers[0])
    await until(lambda: set(fleet.view.workers) == {"b"})
    assert fleet.matched(1, 2, 3) == {"b": 2}
    await longer_than_the_ttl(fleet, seen={"b"})


async def test_a_stopped_worker_is_gone_before_its_ttl(server):
    fleet = Fleet(server)
    fleet.settings = fleet.settings.model_copy(update={"worker_ttl_s": 1000.0})
    worker = await fleet.start("a", 1)
    await until(lambda: "a" in fleet.view.workers)
    await worker.publisher.stop()
    await until(lambda: fleet.view.workers == {})
    assert len(fleet.view.index) == 0
    await fleet.close()


async def test_restarted_under_the_same_id_without_leaving(fleet):
    await fleet.crash(fleet.workers[0])
    await fleet.start("a", incarnation="second")
    await until(lambda: fleet.view.workers["a"].incarnation == "second")
    assert fleet.matched(1, 2, 3) == {"b": 2}


async def test_an_old_process_that_lives_on_does_not_take_its_id_back(fleet):
    with capture_logs() as logs:
        await fleet.start("a", 7, incarnation="second")
        fleet.workers[0].publisher.add(on_device(8), [])
        await until(lambda: any(line["log_level"] == "error" for line in logs))
    for _ in range(40):
        await asyncio.sleep(TTL_S / 20)
        assert fleet.view.workers["a"].incarnation == "second"
    assert fleet.matched(7, 8) == {"a": 1}


async def test_ro04_a_new_router_learns_everything_from_the_directory(fleet):
    view = fleet.new_router()
    await until(lambda: fleet.matched(1, 2, 3, view=view) == {"a": 3, "b": 2})
    assert view.workers == fleet.view.workers


async def test_a_router_that_starts_without_redis_waits_for_it(fleet, server):
    server.stop()
    view = fleet.new_router()
    await asyncio.sleep(0.1)
    assert view.workers == {}
    server.start()
    await until(lambda: fleet.matched(1, 2, 3, view=view) == {"a": 3, "b": 2})


async def test_marked_gone_and_alive_heals(fleet):
    fleet.view.mark_gone("a", "first")
    assert set(fleet.view.workers) == {"b"}
    await until(lambda: fleet.matched(1, 2, 3) == {"a": 3, "b": 2})
