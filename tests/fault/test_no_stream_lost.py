"""Workers and Redis are killed under streaming clients of a real router: a pause, the same tokens, no error."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import uuid
from contextlib import asynccontextmanager

import grpc
import pytest

from headrace.cluster.redis_server import RedisServer
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc
from router.app import Router
from tests.support.fleet import fleet_settings
from tests.support.process_fleet import ProcessWorker

NUM_STREAMS = 50
NUM_TOKENS = 600  # so many that streams go on when the last one begins
BEGINNING = [3 + (7 * i) % 200 for i in range(40)]
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {
            "type": "array",
            "items": {"type": "string", "maxLength": 6},
            "minItems": 20,
            "maxItems": 20,
        }
    },
    "required": ["names"],
    "additionalProperties": False,
}


@pytest.fixture
def redis():
    with RedisServer() as server:
        yield server


@pytest.fixture
def settings(tiny_model_files, redis):
    """Room for all streams; a worker that is silent is given up within two seconds."""
    return fleet_settings(
        tiny_model_files,
        redis.url,
        engine={"num_blocks": 10000, "max_step_tokens": 64},
        kv={
            "transport": "nixl",
            "connect_timeout_s": 1.5,
            "transfer_timeout_s": 1.5,
            "progress_timeout_s": 1.5,
        },
        directory={"cluster": uuid.uuid4().hex[:8], "worker_ttl_s": 2.0},
        rpc={"keepalive_s": 1.0, "keepalive_timeout_s": 1.0},
    )


class Streams:
    """Clients of one router, and what each has received."""

    def __init__(self, stub) -> None:
        self._stub = stub
        self.received: dict[int, list[inference_pb2.GenerateResponse]] = {}
        self._news = asyncio.Event()

    def start(self, requests) -> asyncio.Task[list[dict]]:
        """All answers, in time. Raises what a client is told."""
        self.received = {number: [] for number in range(len(requests))}
        return asyncio.create_task(self._run(requests))

    async def _run(self, requests) -> list[dict]:
        await asyncio.gather(*(self._one(number, request) for number, request in enumerate(requests)))
        return [answer(messages) for messages in self.received.values()]

    async def begun(self) -> None:
        """Until every stream has tokens, while some go on."""
        async with asyncio.timeout(30):
            while not all(self.received.values()):
                self._news.clear()
                await self._news.wait()
        assert len(self.over()) < len(self.received)

    def over(self) -> list[int]:
        """Streams that have ended."""
        return [number for number, m in self.received.items() if m and m[-1].HasField("usage")]

    async def _one(self, number: int, request) -> None:
        async for message in self._stub.Generate(request, timeout=60):
            self.received[number].append(message)
            self._news.set()


def answer(messages) -> dict:
    """What must not depend on who died, by choice."""
    return {
        choice: {
            "tokens": [t for m in messages if m.choice == choice for t in m.token_ids],
            "text": "".join(m.text for m in messages if m.choice == choice),
            "top": [list(e.top_ids) for m in messages if m.choice == choice for e in m.logprobs],
            "logprobs": [e.logprob for m in messages if m.choice == choice for e in m.logprobs],
            "ends": [m.finish_reason for m in messages if m.choice == choice and m.finish_reason],
        }
        for choice in sorted({m.choice for m in messages})
    }


def assert_same(found: list[dict], expected: list[dict]) -> None:
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.keys() == theirs.keys()
        for choice, got in ours.items():
            wanted = theirs[choice]
            assert got | {"logprobs": None} == wanted | {"logprobs": None}, f"request {number}, {choice}"
            assert got["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-4)


def request(number: int, **sampling) -> inference_pb2.GenerateRequest:
    options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0, **sampling}
    message = inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingParams(**options))
    message.token_ids.ids.extend([*BEGINNING, 3 + number, 5 + number % 7])
    return message


def requests() -> list[inference_pb2.GenerateRequest]:
    """Half greedy, half sampled; in both halves some with log-probabilities and penalties."""
    return [
        request(
            number,
            **({"temperature": 1.0, "seed": 1000 + number} if number % 2 else {}),
            **({"logprobs": 2} if number % 5 == 0 else {}),
            **({"frequency_penalty": 0.5} if number % 3 == 0 else {}),
        )
        for number in range(NUM_STREAMS)
    ]


@asynccontextmanager
async def fleet(settings, folder, *roles):
    """Streams, the router, and the workers by name, all in the router's view."""
    started = {
        f"{role}-{number}": ProcessWorker(settings, role, f"{role}-{number}", folder)
        for number, role in enumerate(roles)
    }
    router = Router(settings)
    try:
        await asyncio.gather(*(worker.start() for worker in started.values()))
        address = await router.start()
        async with asyncio.timeout(60):
            while len(router.view.workers) < len(roles):
                await asyncio.sleep(0.05)
        async with grpc.aio.insecure_channel(address) as channel:
            yield Streams(inference_pb2_grpc.InferenceStub(channel)), router, started
        assert not router.dispatcher.admission.num_running
        assert router.dispatcher.ledger.active_tokens == {}
        for worker in started.values():
            if worker.is_alive:
                worker.go_on()
                await worker.assert_idle()
    finally:
        await router.stop()
        for worker in started.values():
            worker.stop()


def late_word(text: str) -> str:
    """Three characters that come up in the last quarter of the text and not before."""
    return next(
        text[at : at + 3]
        for at in range(3 * len(text) // 4, len(text))
        if text[at : at + 3].isascii() and text.index(text[at : at + 3]) == at
    )


async def busiest(workers, prefix) -> ProcessWorker:
    loads = {
        name: (await worker.status()).running for name, worker in workers.items() if name.startswith(prefix)
    }
    return workers[max(loads, key=loads.__getitem__)]


@pytest.mark.parametrize("how", ["kill", "pause"])
async def test_a_decode_worker_is_lost_under_fifty_streams(settings, tmp_path, how):
    async with fleet(settings, tmp_path, "prefill", "decode", "decode") as (streams, router, workers):
        expected = await streams.start(requests())
        running = streams.start(requests())
        await streams.begun()
        victim = await busiest(workers, "decode")
        getattr(victim, how)()
        assert_same(await running, expected)
        assert router.tally.requests == {"ok": 2 * NUM_STREAMS}
        # How many depends on what was on its way; that some went on elsewhere does not.
        decisions = router.metrics.registry.get_sample_value("headrace_router_decision_seconds_count")
        assert decisions > 2 * NUM_STREAMS


async def test_so03_a_lost_decode_worker_had_choices_grammars_and_stop_strings(settings, tmp_path):
    """Also where the client gave no seed: the answer is of the grammar, as a whole."""
    schema = {"json_schema": json.dumps(SCHEMA)}
    sampled = {"temperature": 1.0, "seed": 7}
    asked = [
        request(1, n=3, **sampled),
        request(2, n=2, logprobs=1, **sampled),
        request(3, grammar=schema, ignore_eos=False, max_tokens=1800, **sampled),
        request(4, grammar=schema, ignore_eos=False, max_tokens=1800, n=2, **sampled),
    ]
    async with fleet(settings, tmp_path, "prefill", "decode", "decode") as (streams, router, workers):
        plain = await streams.start([request(5, **sampled)])
        asked.append(request(5, stop=[late_word(plain[0][0]["text"])], **sampled))
        expected = await streams.start(asked)
        for grammatical in expected[2:4]:
            for choice in grammatical.values():
                assert set(json.loads(choice["text"])) == {"names"}
        unseeded = request(6, grammar=schema, ignore_eos=False, max_tokens=1800, temperature=1.0)
        running = streams.start([*asked, unseeded])
        await streams.begun()
        (await busiest(workers, "decode")).kill()
        *found, free = await running
        assert_same(found, expected)
        assert set(json.loads(free[0]["text"])) == {"names"}
        assert router.tally.requests.keys() == {"ok"}


async def test_a_prefill_worker_is_killed_under_load(settings, tmp_path):
    async with fleet(settings, tmp_path, "prefill", "prefill", "decode") as (streams, router, workers):
        expected = await streams.start(requests())
        running = streams.start(requests()[::-1])
        async with asyncio.timeout(30):
            while not any(streams.received.values()):
                await asyncio.sleep(0)
        workers["prefill-0"].kill()
        assert_same((await running)[::-1], expected)
        assert router.tally.requests == {"ok": 2 * NUM_STREAMS}


async def test_rd01_redis_is_killed_under_load_comes_back_empty_and_is_paused(settings, tmp_path, redis):
    async with fleet(settings, tmp_path, "prefill", "decode", "decode") as (streams, router, workers):
        expected = await streams.start(requests())
        running = streams.start(requests())
        await streams.begun()
        os.kill(redis.pid, signal.SIGKILL)
        assert_same(await running, expected)
        assert_same(await streams.start(requests()), expected)  # new ones, without it
        redis.stop()
        redis.start()
        async with asyncio.timeout(60):
            while len(router.view.workers) < len(workers):
                await asyncio.sleep(0.05)
        assert_same(await streams.start(requests()), expected)
        running = streams.start(requests())
        await streams.begun()
        os.kill(redis.pid, signal.SIGSTOP)
        try:
            assert_same(await running, expected)
            assert_same(await streams.start(requests()), expected)
        finally:
            os.kill(redis.pid, signal.SIGCONT)
        assert router.tally.requests == {"ok": 6 * NUM_STREAMS}
