"""A worker that fails again and again is set aside, probed, tried, and taken back."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from router.breakers import MAX_FAILURES, Breakers

PAUSE_S = 0.01


class Health:
    """What probes are told, and who was probed."""

    def __init__(self) -> None:
        self.is_well = False
        self.probed: list[str] = []
        self.asked = asyncio.Event()

    async def __call__(self, incarnation: str) -> bool:
        self.probed.append(incarnation)
        self.asked.set()
        return self.is_well


@asynccontextmanager
async def breakers():
    health = Health()
    made = Breakers(health, PAUSE_S)
    try:
        yield made, health
    finally:
        await made.close()


def fail(breakers: Breakers, times: int, incarnation: str = "a") -> None:
    for _ in range(times):
        breakers.failed(incarnation)


async def until_allowed(breakers: Breakers, incarnation: str = "a") -> None:
    async with asyncio.timeout(10):
        while not breakers.allows(incarnation):
            await asyncio.sleep(PAUSE_S / 4)


async def test_it_opens_at_the_fifth_failure_in_a_row_and_for_that_worker_alone():
    async with breakers() as (made, _):
        fail(made, MAX_FAILURES - 1)
        assert made.allows("a")
        made.succeeded("a")
        fail(made, MAX_FAILURES - 1)
        assert made.allows("a")
        fail(made, 1)
        assert not made.allows("a")
        assert made.allows("b")


async def test_a_success_that_was_under_way_does_not_close_it():
    async with breakers() as (made, _):
        fail(made, MAX_FAILURES)
        made.succeeded("a")
        assert not made.allows("a")


async def test_it_is_probed_until_it_is_well_then_one_failure_is_enough():
    async with breakers() as (made, health):
        fail(made, MAX_FAILURES)
        for _ in range(2):
            health.asked.clear()
            async with asyncio.timeout(10):
                await health.asked.wait()
            assert not made.allows("a")
        health.is_well = True
        await until_allowed(made)
        fail(made, 1)
        assert not made.allows("a")
        await until_allowed(made)
        made.succeeded("a")
        fail(made, MAX_FAILURES - 1)
        assert made.allows("a")  # it counts from the beginning
        assert set(health.probed) == {"a"}


async def test_failures_while_it_is_open_start_no_further_probe():
    async with breakers() as (made, health):
        fail(made, 10 * MAX_FAILURES)
        assert len(made._probing) == 1
        health.is_well = True
        await until_allowed(made)
        assert health.probed == ["a"]


async def test_workers_that_come_and_go_leave_nothing():
    """Restarts without end, each life with a failure."""
    async with breakers() as (made, _):
        fail(made, MAX_FAILURES, "open")
        for number in range(5000):
            fail(made, 1, f"life {number}")
        assert len(made._breakers) < 300
        assert not made.allows("open")
        fail(made, MAX_FAILURES - 1, "life 4999")
        assert not made.allows("life 4999")  # the latest are remembered


async def test_close_ends_the_probes():
    async with breakers() as (made, _):
        fail(made, MAX_FAILURES)
        tasks = list(made._probing.values())
    assert all(task.done() for task in tasks)
