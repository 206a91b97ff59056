"""Case HD-01: health tells the truth, both ways. Case HD-02 at the router."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import router.readiness
from headrace.directory.records import Role
from headrace.rpc.server import LIVENESS
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc
from router.app import Router
from tests.support.fleet import Worker, workers
from tests.support.process_fleet import ProcessWorker

P, D = Role.PREFILL, Role.DECODE
PROMPT = [3 + (7 * i) % 200 for i in range(40)]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def ids(token_ids, **sampling) -> inference_pb2.GenerateRequest:
    options = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **sampling}
    message = inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingParams(**options))
    message.token_ids.ids.extend(token_ids)
    return message


async def health(address: str, service: str = "") -> int:
    """Answered within a second, or the test fails."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=1)).status


async def until_health(address: str, status: int) -> None:
    async with asyncio.timeout(20):
        while await health(address) != status:
            await asyncio.sleep(0.02)


class Front:
    def __init__(self, running: Router, address: str, stub) -> None:
        self.router = running
        self.address = address
        self.stub = stub

    async def ask(self, message) -> list[inference_pb2.GenerateResponse]:
        return [m async for m in self.stub.Generate(message, timeout=30)]

    async def until_ready(self, *, ready: bool = True) -> None:
        await until_health(self.address, SERVING if ready else NOT_SERVING)
        assert await health(self.address, LIVENESS) == SERVING


@asynccontextmanager
async def front_of(settings):
    running = Router(settings)
    address = await running.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield Front(running, address, inference_pb2_grpc.InferenceStub(channel))
    finally:
        await running.stop()


def engine_hangs(worker: Worker) -> threading.Event:
    """Until the event is set."""
    go_on = threading.Event()
    worker.process._engine.post(lambda engine: go_on.wait(60))
    return go_on


@pytest.mark.parametrize("stop", ["pause", "kill"])
async def test_hd01_a_worker_that_is_stopped_or_killed_ends_readiness(settings_with, tmp_path, stop):
    """One process, so none is left; when it goes on, or has started again, its own answer makes the router ready."""
    settings = settings_with(
        directory={"worker_ttl_s": 1.5},
        rpc={"keepalive_s": 1.0, "keepalive_timeout_s": 1.0},
        router={"placement_timeout_s": 0.2},
    )
    d = ProcessWorker(settings, "decode", f"d-{stop}", tmp_path)
    try:
        await d.start()
        async with front_of(settings) as front:
            await front.until_ready()
            getattr(d, stop)()
            await front.until_ready(ready=False)
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await front.ask(ids(PROMPT))
            if stop == "pause":
                d.go_on()
            else:
                await d.start()
            await front.until_ready()
            assert len(await front.ask(ids(PROMPT))) >= 1
    finally:
        d.stop()


async def test_hd01_an_engine_that_hangs_is_not_ready_and_requests_go_elsewhere(settings_with):
    settings = settings_with(
        engine={"stall_warning_s": 0.5}, router={"placement_timeout_s": 0.2, "policy": "round_robin"}
    )
    async with workers(settings, D, D) as (d0, d1), front_of(settings) as front:
        await front.until_ready()
        go_on = engine_hangs(d0)
        try:
            await until_health(d0.address, NOT_SERVING)
            assert await health(d0.address, LIVENESS) == SERVING
            async with asyncio.timeout(10):
                while not front.router.view.workers["decode-0"].draining:
                    await asyncio.sleep(0.02)
            for number in range(4):
                messages = await front.ask(ids([*PROMPT, number]))
                assert messages[-1].hand_off.decode_worker == "decode-1"
            assert (await d1.metrics())["headrace_worker_ready"] == 1
            other_goes_on = engine_hangs(d1)
            try:
                await front.until_ready(ready=False)
                with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                    await front.ask(ids(PROMPT))
            finally:
                other_goes_on.set()
        finally:
            go_on.set()
        await until_health(d0.address, SERVING)
        await front.until_ready()


async def test_hd01_a_fleet_that_gives_no_answer_is_not_ready_whatever_it_says(settings_with, monkeypatch):
    """The worker does not notice that it hangs; the self-test does."""
    monkeypatch.setattr(router.readiness, "TEST_TIMEOUT_S", 0.5)
    settings = settings_with(engine={"stall_warning_s": 60.0}, router={"self_test_interval_s": 0.3})
    async with workers(settings, D) as [d], front_of(settings) as front:
        await front.until_ready()
        go_on = engine_hangs(d)
        try:
            await front.until_ready(ready=False)
            assert await health(d.address) == SERVING
            registry = front.router.metrics.registry
            failed = {"result": "failed"}
            assert registry.get_sample_value("headrace_router_self_tests_total", failed) >= 1
            assert registry.get_sample_value("headrace_router_ready") == 0
        finally:
            go_on.set()
        await front.until_ready()


async def test_hd01_health_answers_while_a_long_prompt_is_read(settings_with):
    """10 MB of text: more than the model takes, so it is refused once it has been tokenized."""
    settings = settings_with()
    async with workers(settings, D), front_of(settings) as front:
        await front.until_ready()
        message = ids([], max_tokens=1)
        message.text = "many words, and more. " * (10 * 2**20 // 22)
        asking = asyncio.create_task(front.ask(message))
        num_checks = 0
        while not asking.done():
            assert await health(front.address) == SERVING
            num_checks += 1
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
            asking.result()
        assert num_checks > 2


async def test_hd01_an_idle_fleet_stays_ready_by_answers_that_count_as_nobodys(settings_with):
    settings = settings_with(router={"self_test_interval_s": 0.1})
    async with workers(settings, P, D) as (p, d), front_of(settings) as front:
        await front.until_ready()
        tests = front.router._readiness.self_tests
        async with asyncio.timeout(20):
            while tests["ok"] < 5 or (await p.status()).prefill_tokens == 0:
                assert await health(front.address) == SERVING
                await asyncio.sleep(0.02)
        assert tests["failed"] == 0
        assert front.router.tally.requests == {}
        assert front.router.tally.output_tokens == {}
        assert front.router.dispatcher.admission.num_admitted == 0
        assert (await d.status()).output_tokens > 0


async def test_hd02_the_router_leaves_a_prefill_worker_that_drains(settings_with):
    """Its KV, not yet pulled, is; those that come later are computed by the other one."""
    settings = settings_with(router={"policy": "round_robin"}, engine={"num_blocks": 400})
    prompts = [[3 + (11 * i + number) % 200 for i in range(40)] for number in range(5)]
    p0, p1 = Worker(settings, P, "prefill-0"), Worker(settings, P, "prefill-1")
    async with workers(settings, D) as [d], front_of(settings) as front:
        await p0.start()
        await front.until_ready()
        expected = [_tokens(await front.ask(ids(prompt))) for prompt in prompts]
        await d.process._engine.call(lambda engine: engine.reset_cache())
        d.faults.delay_s = 0.5
        asking = [asyncio.create_task(front.ask(ids(prompt))) for prompt in prompts]
        async with asyncio.timeout(10):
            while not (await p0.status()).holds:
                await asyncio.sleep(0.01)
        stopping = asyncio.create_task(p0.process.stop())
        await p1.start()
        try:
            async with asyncio.timeout(10):
                while not _left(front.router.view.workers):
                    await asyncio.sleep(0.01)
            late = await front.ask(ids([*PROMPT, 7]))
            assert late[-1].hand_off.prefill_worker == "prefill-1"
            assert [_tokens(await each) for each in asking] == expected
        finally:
            await asyncio.gather(stopping, p1.process.stop())


def _left(known) -> bool:
    """The one that drains is no candidate any more, and the new one is."""
    old = known.get("prefill-0")
    return (old is None or old.draining) and "prefill-1" in known


def _tokens(messages) -> list[int]:
    return [token for message in messages for token in message.token_ids]
