"""A thousand short requests while workers are killed and stopped and transfers go wrong: right answers, or none."""

from __future__ import annotations

import asyncio
import os
import random
import uuid
from collections import Counter
from collections.abc import Sequence

import grpc
import pytest

from headrace.directory.records import Role
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc
from router.app import Router
from tests.support.fleet import session_with, workers
from tests.support.process_fleet import ProcessWorker

NUM_REQUESTS = 1000
NUM_CLIENTS = 12
NUM_TOKENS = 6
MAX_THINK_S = 0.9  # spreads the requests over as many faults
SEED = int(os.environ.get("HEADRACE_CHAOS_SEED", "20261202"))
# Of the READs of a decode worker. The rest of its READs are sound.
TRANSFER_FAULTS = {"stall": 0.01, "delay": 0.05, "fail": 0.02, "corrupt": 0.02, "drop": 0.02, "kill": 0.02}
# What a client may be told when the worker that had its answer is gone.
DEFINITE = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}


def prompts() -> list[list[int]]:
    """Some share their beginning with others."""
    draw = random.Random(SEED)
    beginnings = [[draw.randrange(3, 200) for _ in range(40)] for _ in range(4)]
    return [
        [*draw.choice(beginnings)[: draw.randrange(0, 41)], *(draw.randrange(3, 200) for _ in range(20))]
        for _ in range(40)
    ]


@pytest.fixture
def settings(settings_with):
    """What is silent is given up within a second or two, so that a thousand requests see many faults."""
    return settings_with(
        kv={
            "transport": "nixl",
            "connect_timeout_s": 1.0,
            "transfer_timeout_s": 1.0,
            "progress_timeout_s": 1.0,
        },
        directory={"cluster": uuid.uuid4().hex[:8], "worker_ttl_s": 2.0},
        rpc={"keepalive_s": 1.0, "keepalive_timeout_s": 1.0},
    )


async def reference(settings) -> list[list[int]]:
    """Every prompt's answer by one engine alone."""
    alone = settings.model_copy(
        update={
            "kv": settings.kv.model_copy(update={"transport": "local"}),
            "directory": settings.directory.model_copy(update={"cluster": "alone"}),
        }
    )
    async with workers(alone, Role.DECODE) as [d], session_with(d) as session:
        return [
            (await session.answer(prompt, request_id=str(number), max_tokens=NUM_TOKENS)).token_ids
            for number, prompt in enumerate(prompts())
        ]


class Clients:
    """Ask for the prompts again and again; `outcomes` counts answers and status codes."""

    def __init__(self, stub, expected: list[list[int]], seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._stub = stub
        self._expected = expected
        self._draw = random.Random(seed)
        self._prompts = prompts()

    async def run(self, num_requests: int) -> None:
        numbers = iter([self._draw.randrange(len(self._prompts)) for _ in range(num_requests)])

        async def client() -> None:
            for number in numbers:
                await asyncio.sleep(self._draw.uniform(0, MAX_THINK_S))
                await self._ask(number)

        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))

    async def _ask(self, number: int) -> None:
        request = inference_pb2.GenerateRequest()
        request.token_ids.ids.extend(self._prompts[number])
        request.sampling.temperature = 0
        request.sampling.max_tokens = NUM_TOKENS
        got: list[int] = []
        outcome = "OK"
        try:
            async for response in self._stub.Generate(request, timeout=30):
                got.extend(response.token_ids)
        except grpc.aio.AioRpcError as error:
            outcome = error.code().name
        self.outcomes[outcome] += 1
        expected = self._expected[number]
        if got != (expected if outcome == "OK" else expected[: len(got)]):
            self.wrong.append(f"prompt {number}: {got} instead of {expected}, {outcome}")


async def make_trouble(victims: Sequence[ProcessWorker], draw: random.Random, done: asyncio.Event) -> Counter:
    """Kill or stop one worker after another, until `done`; all run again at the end."""
    happened: Counter[str] = Counter()
    while not done.is_set():
        victim = draw.choice(victims)
        if draw.random() < 0.4:
            victim.kill()
            happened["killed"] += 1
            await asyncio.sleep(draw.uniform(0.0, 0.5))
            await victim.start()
        else:
            victim.pause()
            happened["stopped"] += 1
            await asyncio.sleep(draw.uniform(0.1, 2.5))
            victim.go_on()
        if not victim.is_alive:  # UCX can end the owner of blocks whose reader vanished
            happened["died"] += 1
            await victim.start()
        await asyncio.sleep(draw.uniform(0.0, 0.5))
    return happened


async def phase(stub, expected, victims: Sequence[ProcessWorker], draw: random.Random) -> Clients:
    """Half of the requests, while the victims are in trouble."""
    clients, done = Clients(stub, expected, draw.randrange(1 << 30)), asyncio.Event()
    trouble = asyncio.create_task(make_trouble(victims, draw, done))
    try:
        await clients.run(NUM_REQUESTS // 2)
    finally:
        done.set()
        happened = await trouble
    print(f"seed {SEED}: {dict(clients.outcomes)} while {dict(happened)}")
    assert happened.total() > 0
    return clients


@pytest.mark.timeout(400)
async def test_chaos(settings, tmp_path):
    """First the prefill side and the transfers fail, which no client notices; then decode workers too."""
    expected = await reference(settings)
    draw = random.Random(SEED)
    prefill = [ProcessWorker(settings, "prefill", f"prefill-{n}", tmp_path) for n in range(2)]
    decode = [
        ProcessWorker(
            settings, "decode", f"decode-{n}", tmp_path, seed=SEED + n, probabilities=TRANSFER_FAULTS
        )
        for n in range(2)
    ]
    router = Router(settings)
    try:
        await asyncio.gather(*(worker.start() for worker in prefill + decode))
        address = await router.start()
        async with asyncio.timeout(60):
            while len(router.view.workers) < 4:
                await asyncio.sleep(0.05)
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for victims, allowed in ((prefill, {"OK"}), (prefill + decode, {"OK", *DEFINITE})):
                clients = await phase(stub, expected, victims, draw)
                assert clients.outcomes.total() == NUM_REQUESTS // 2
                assert not clients.wrong
                assert set(clients.outcomes) <= allowed
        for worker in prefill + decode:
            if not worker.is_alive:
                await worker.start()
            await worker.assert_idle()
    finally:
        await router.stop()
        for worker in prefill + decode:
            worker.stop()
