"""The planner over a real fleet: it changes roles while requests go on, acts alone, and nobody misses it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import uuid
from contextlib import asynccontextmanager

import grpc
import pytest

from headrace.cluster.planner.actuators import NoActuator
from headrace.cluster.planner.process import Planner
from headrace.directory.records import Role
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc
from router.app import Router
from tests.support.fleet import workers
from tests.support.processes import HEADRACE

P, D = Role.PREFILL, Role.DECODE


@pytest.fixture
def settings(settings_with):
    """Prefill workers count as loaded when they compute at all, decode workers never."""
    return settings_with(
        engine={"num_blocks": 2000},
        directory={"cluster": uuid.uuid4().hex[:8], "worker_ttl_s": 1.0},
        router={"itl_target_s": 100.0},
        planner={
            "interval_s": 0.1,
            "short_intervals": 2,
            "hold_s": 0.3,
            "max_prefill_busy": 0.01,
            "max_prefill": 2,
        },
    )


@asynccontextmanager
async def fleet(settings, *roles):
    """The router, and a channel to it."""
    router = Router(settings)
    address = await router.start()
    try:
        async with workers(settings, *roles), grpc.aio.insecure_channel(address) as channel:
            async with asyncio.timeout(20):
                while not router.ready or len(router.view.workers) < len(roles):
                    await asyncio.sleep(0.01)
            yield router, inference_pb2_grpc.InferenceStub(channel)
    finally:
        await router.stop()


@asynccontextmanager
async def planning(settings, decisions):
    planner = Planner(settings, NoActuator(), decisions.append)
    await planner.start()
    try:
        yield planner
    finally:
        await planner.stop()


class Prompts:
    """Long prompts and short answers, no two alike, until it is left. `tokens` by number."""

    def __init__(self, stub, num_streams: int = 4) -> None:
        self._stub = stub
        self._over = asyncio.Event()
        self._next = 0
        self._num_streams = num_streams
        self.tokens: dict[int, list[int]] = {}

    async def __aenter__(self) -> Prompts:
        self._streams = [asyncio.create_task(self._stream()) for _ in range(self._num_streams)]
        return self

    async def __aexit__(self, *exc_info) -> None:
        self._over.set()
        await asyncio.gather(*self._streams)

    async def more(self, count: int) -> None:
        """Until so many more were answered."""
        wanted = len(self.tokens) + count
        async with asyncio.timeout(30):
            while len(self.tokens) < wanted:
                for stream in self._streams:
                    if stream.done():
                        stream.result()
                await asyncio.sleep(0.01)

    async def _stream(self) -> None:
        while not self._over.is_set():
            number, self._next = self._next, self._next + 1
            self.tokens[number] = await ask(self._stub, number)


async def ask(stub, number: int) -> list[int]:
    sampling = inference_pb2.SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
    message = inference_pb2.GenerateRequest(sampling=sampling)
    message.token_ids.ids.extend([3 + (7 * i + 13 * number + i * i * number) % 200 for i in range(200)])
    messages = [message async for message in stub.Generate(message, timeout=60)]
    return [token for message in messages for token in message.token_ids]


def roles_in(router) -> list[Role]:
    return [record.role for record in router.view.workers.values() if not record.draining]


async def until(condition, what: str) -> None:
    try:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"not in time: {what}")


async def test_prompts_make_a_decode_worker_prefill(settings):
    """No request fails, the answers are those of a fleet at rest, and the last decode worker stays one."""
    decisions = []
    async with fleet(settings, P, D, D) as (router, stub):
        async with planning(settings, decisions) as planner:
            async with Prompts(stub) as prompts:
                await prompts.more(20)
                await until(
                    lambda: roles_in(router).count(P) == 2, f"a second one prefills: {decisions[-3:]}"
                )
                await prompts.more(100)
            assert sorted(roles_in(router)) == [D, P, P]
            counted = planner.metrics.registry.get_sample_value(
                "headrace_planner_decisions_total", {"kind": "flip", "role": "prefill", "outcome": "done"}
            )
            assert counted == 1
        assert set(router.tally.requests) == {"ok"}
        for number in list(prompts.tokens)[:: len(prompts.tokens) // 10]:
            assert await ask(stub, number) == prompts.tokens[number]
    [decision] = [each for each in decisions if each["actions"]]
    [action] = decision["actions"]
    assert (action["kind"], action["role"]) == ("flip", "prefill")
    assert "prefill pressure" in action["reason"]


async def test_of_two_planners_one_decides_and_the_other_takes_over(settings):
    first_decisions, second_decisions = [], []
    async with fleet(settings, P, D, D) as (router, stub):
        async with planning(settings, second_decisions) as second:
            await until(lambda: second_decisions, "the only one decides")
            async with planning(settings, first_decisions) as first:
                active = (first.metrics, second.metrics)
                looks = "headrace_planner_looks_total", {"outcome": "ok"}
                before = second.metrics.registry.get_sample_value(*looks)
                async with Prompts(stub) as prompts:
                    await until(lambda: roles_in(router).count(P) == 2, "a second one prefills")
                    await until(
                        lambda: second.metrics.registry.get_sample_value(*looks) > before + 3, "it looks on"
                    )
                    assert [m.registry.get_sample_value("headrace_planner_active") for m in active] == [0, 1]
                assert first_decisions == []
                await second.stop()
                await until(lambda: first_decisions, "the other one takes over")
                await second.start()  # for the stop at the end
        assert await ask(stub, 1) == prompts.tokens[1]


async def test_a_dry_run_says_what_it_would_do_and_does_nothing(settings):
    planner_settings = settings.planner.model_copy(update={"dry_run": True})
    async with fleet(settings, P, D, D) as (router, stub):
        decisions = []
        dry = settings.model_copy(update={"planner": planner_settings})
        async with planning(dry, decisions), Prompts(stub) as prompts:
            await until(lambda: sum(bool(each["actions"]) for each in decisions) >= 2, "it decides twice")
        assert sorted(roles_in(router)) == [D, D, P]
        assert prompts.tokens
        assert all(each["dry_run"] for each in decisions)
        lines = await asyncio.to_thread(_planner_lines, settings, 3)
        assert [line["workers"] for line in lines] == [{"prefill": 1, "decode": 2}] * 3
        assert all(line["actions"] == [] and line["dry_run"] for line in lines)


def _planner_lines(settings, count: int) -> list[dict]:
    """Of `headrace planner --dry-run --json`."""
    directory = settings.directory
    options = [
        f"directory.url={directory.url}",
        f"directory.cluster={directory.cluster}",
        "planner.interval_s=0.1",
    ]
    command = [str(HEADRACE), "planner", "--dry-run", "--json"]
    popen = subprocess.Popen(
        [*command, *(part for option in options for part in ("--set", option))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        return [json.loads(popen.stdout.readline()) for _ in range(count)]
    finally:
        popen.terminate()
        assert popen.wait(30) == 0
        popen.stdout.close()
