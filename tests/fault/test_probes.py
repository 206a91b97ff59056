"""What a kubelet gets from real processes, at the ports and paths that the chart names."""

from __future__ import annotations

import asyncio
from urllib.error import HTTPError
from urllib.request import urlopen

from headrace.directory.records import Role
from tests.fault.test_choices import router_of
from tests.support.fleet import Worker, workers
from tests.unit.router.test_service import until


async def probe(address: str, path: str) -> int:
    def ask() -> int:
        try:
            with urlopen(f"http://{address}{path}", timeout=30) as response:
                return response.status
        except HTTPError as error:
            return error.code

    return await asyncio.to_thread(ask)


async def test_a_router_is_ready_while_there_is_a_worker_and_healthy_without(settings):
    async with router_of(settings, 0) as (_, router):
        address = router.metrics_address
        assert await probe(address, "/health") == 200
        assert await probe(address, "/ready") == 503
        async with workers(settings, Role.DECODE) as (worker,):
            own = (await worker.status()).metrics_address
            assert (await probe(own, "/health"), await probe(own, "/ready")) == (200, 200)
            await until(lambda: router.ready)
            assert await probe(address, "/ready") == 200
        await until(lambda: not router.ready)
        assert (await probe(address, "/health"), await probe(address, "/ready")) == (200, 503)


async def test_a_worker_that_drains_is_not_ready(settings):
    worker = Worker(settings, Role.DECODE, "decode-0")
    await worker.start()
    address = (await worker.status()).metrics_address
    go_on = asyncio.Event()
    evacuate = worker.process._neighbours.evacuate

    async def held_up(*args):
        await go_on.wait()
        await evacuate(*args)

    worker.process._neighbours.evacuate = held_up
    stopping = asyncio.create_task(worker.process.stop())
    try:
        await until(lambda: worker.process._draining)
        assert (await probe(address, "/health"), await probe(address, "/ready")) == (200, 503)
    finally:
        go_on.set()
        await stopping
