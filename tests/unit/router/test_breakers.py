"""A worker that fails again and again is set aside, probed, tried, and taken back. Pauses end by hand."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from headrace.directory.view import DirectoryView
from headrace.rpc.server import RpcServer
from router.breakers import MAX_FAILURES, Breakers, HealthProbe
from tests.support.directory_samples import record
from tests.unit.router.test_sessions import RPC


class World:
    """Breakers, what their probes are told, who was probed, and the pauses that they took."""

    def __init__(self) -> None:
        self.breakers = Breakers(self._probe, self._sleep)
        self.is_well = False
        self.probed: list[str] = []
        self.pauses: list[float] = []
        self._go_on = asyncio.Semaphore(0)

    def fail(self, times: int, incarnation: str = "a") -> None:
        for _ in range(times):
            self.breakers.failed(incarnation)

    async def let_probe(self) -> None:
        """End one pause, and wait for what the probe does."""
        before = len(self.probed)
        self._go_on.release()
        async with asyncio.timeout(10):
            while len(self.probed) == before:
                await asyncio.sleep(0)
        await asyncio.sleep(0)  # its answer is acted upon

    async def _probe(self, incarnation: str) -> bool:
        self.probed.append(incarnation)
        return self.is_well

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await self._go_on.acquire()


@asynccontextmanager
async def a_world():
    world = World()
    try:
        yield world, world.breakers
    finally:
        await world.breakers.close()


async def test_it_opens_at_the_fifth_failure_in_a_row_and_for_that_worker_alone():
    async with a_world() as (world, breakers):
        world.fail(MAX_FAILURES - 1)
        assert "a" not in breakers.set_aside
        breakers.succeeded("a")
        world.fail(MAX_FAILURES - 1)
        assert "a" not in breakers.set_aside
        world.fail(1)
        assert "a" in breakers.set_aside
        assert "b" not in breakers.set_aside


async def test_a_success_that_was_under_way_does_not_close_it():
    async with a_world() as (world, breakers):
        world.fail(MAX_FAILURES)
        breakers.succeeded("a")
        assert "a" in breakers.set_aside


async def test_it_is_probed_until_it_is_well_then_one_failure_is_enough():
    async with a_world() as (world, breakers):
        world.fail(MAX_FAILURES)
        for _ in range(2):
            await world.let_probe()
            assert "a" in breakers.set_aside
        world.is_well = True
        await world.let_probe()
        assert "a" not in breakers.set_aside
        world.fail(1)
        assert "a" in breakers.set_aside
        await world.let_probe()
        breakers.succeeded("a")
        world.fail(MAX_FAILURES - 1)
        assert "a" not in breakers.set_aside  # it counts from the beginning
        assert world.probed == ["a"] * 4


async def test_pauses_double_up_to_half_a_minute_and_a_success_makes_them_short_again():
    async with a_world() as (world, breakers):
        world.fail(MAX_FAILURES)
        for _ in range(6):
            await world.let_probe()
        world.is_well = True
        await world.let_probe()
        assert world.pauses == [1, 2, 4, 8, 16, 30, 30]
        breakers.succeeded("a")
        world.fail(MAX_FAILURES)
        await world.let_probe()
        assert world.pauses[7:] == [1]


async def test_one_that_is_never_well_is_forgotten():
    async with a_world() as (world, breakers):
        world.fail(MAX_FAILURES)
        for _ in range(20):
            assert "a" in breakers.set_aside
            await world.let_probe()
        assert "a" not in breakers.set_aside
        assert breakers._breakers == {}
        assert breakers._probing == {}


async def test_failures_while_it_is_open_start_no_further_probe():
    async with a_world() as (world, breakers):
        world.fail(10 * MAX_FAILURES)
        assert len(breakers._probing) == 1
        world.is_well = True
        await world.let_probe()
        assert "a" not in breakers.set_aside
        assert world.probed == ["a"]
        assert world.pauses == [1]


async def test_workers_that_come_and_go_leave_nothing():
    """Restarts without end, each life with a failure."""
    async with a_world() as (world, breakers):
        world.fail(MAX_FAILURES, "open")
        for number in range(5000):
            world.fail(1, f"life {number}")
        assert len(breakers._breakers) < 300
        assert "open" in breakers.set_aside
        world.fail(MAX_FAILURES - 1, "life 4999")
        assert "life 4999" in breakers.set_aside  # the latest are remembered


async def test_workers_that_end_between_a_good_probe_and_their_next_request_leave_nothing():
    async with a_world() as (world, breakers):
        world.is_well = True
        for number in range(600):
            world.fail(MAX_FAILURES, f"life {number}")
            await world.let_probe()
        assert len(breakers._breakers) < 300
        assert breakers._probing == {}


async def test_close_ends_the_probes():
    async with a_world() as (world, breakers):
        world.fail(MAX_FAILURES)
        tasks = list(breakers._probing.values())
    assert all(task.done() for task in tasks)


@pytest.mark.parametrize("is_ready", [True, False])
async def test_a_health_probe_is_told_by_the_worker(is_ready):
    server = RpcServer(RPC, [])
    address = await server.start()
    try:
        await server.set_ready(ready=is_ready)
        assert await HealthProbe(view_of(address), RPC)("i1") == is_ready
    finally:
        await server.stop(0)


async def test_who_refuses_the_connection_or_is_not_in_the_view_is_not_well():
    server = RpcServer(RPC, [])
    address = await server.start()
    await server.set_ready(ready=True)
    assert not await HealthProbe(view_of(address), RPC)("its life before")
    await server.stop(0)
    assert not await HealthProbe(view_of(address), RPC)("i1")


def view_of(address: str) -> DirectoryView:
    view = DirectoryView()
    view.admit(replace(record(worker_id="w", incarnation="i1"), address=address))
    return view
