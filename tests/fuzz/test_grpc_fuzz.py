"""Random requests to the gRPC doors of a whole small fleet: each is answered or refused for what is wrong with it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import asynccontextmanager

import grpc
import pytest

from headrace.directory.records import Role
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc
from headrace.rpc.vllm import vllm_engine_pb2
from router.app import Router
from tests.fuzz.messages import mangled, mutated
from tests.support.fleet import workers

SEED = 20260119
NUM_CLIENTS = 16
TIMEOUT_S = 20.0
MAX_MESSAGES = 8  # a client that has seen enough leaves

# Of a request that is wrong: never INTERNAL, UNKNOWN, or a deadline that passes.
DEFINITE = {"OK", "LEFT", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS"}


@asynccontextmanager
async def fleet(settings):
    """The router's address; workers, ledger and queue are empty at the end."""
    async with workers(settings, Role.PREFILL, Role.DECODE):
        router = Router(settings)
        try:
            address = await router.start()
            async with asyncio.timeout(30):
                while len(router.view.workers) < 2:
                    await asyncio.sleep(0.02)
            yield router, address
            async with asyncio.timeout(30):
                while router.dispatcher.admission.num_running:
                    await asyncio.sleep(0.02)
            assert router.dispatcher.ledger.active_tokens == {}
            assert not router.dispatcher.admission.num_queued
        finally:
            await router.stop()


def plain(draw: random.Random) -> inference_pb2.GenerateRequest:
    """A small request that is right, of a kind that is drawn."""
    message = inference_pb2.GenerateRequest()
    message.sampling.max_tokens = draw.randint(1, 4)
    match draw.randrange(4):
        case 0:
            message.text = "abc " * draw.randint(1, 12)
        case 1:
            message.token_ids.ids.extend(draw.randrange(3, 200) for _ in range(draw.randint(1, 60)))
        case 2:
            message.chat.messages.add(role="user", content="hello")
        case _:
            message.text = "x"
            message.sampling.grammar.choice.texts.extend(["a", "b"])
    return message


def plain_of_vllm(draw: random.Random) -> vllm_engine_pb2.GenerateRequest:
    message = vllm_engine_pb2.GenerateRequest(stream=draw.random() < 0.5)
    message.sampling_params.max_tokens = draw.randint(1, 4)
    if draw.random() < 0.5:
        message.text = "abc " * draw.randint(1, 12)
    else:
        message.tokenized.input_ids.extend(draw.randrange(3, 200) for _ in range(draw.randint(1, 60)))
    return message


DOORS = {
    "headrace": ("/headrace.v1.Inference/Generate", plain),
    "vllm": ("/vllm.grpc.engine.VllmEngine/Generate", plain_of_vllm),
}


class Clients:
    def __init__(self, channel: grpc.aio.Channel, door: str, num_requests: int) -> None:
        method, self._plain = DOORS[door]
        self._call = channel.unary_stream(method)  # of bytes
        self._left = iter(range(num_requests))
        self.outcomes: Counter[str] = Counter()
        self.unexpected: list[str] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._one_client() for _ in range(NUM_CLIENTS)))

    async def _one_client(self) -> None:
        for number in self._left:
            draw = random.Random(SEED + number)
            message = mutated(draw, self._plain(draw), draw.randint(0, 4))
            data = message.SerializeToString()
            outcome, details = await self._ask(mangled(draw, data) if draw.random() < 0.2 else data)
            self.outcomes[outcome] += 1
            if outcome not in DEFINITE:
                self.unexpected.append(f"{number}: {outcome} {details[:300]} for {str(message)[:600]}")

    async def _ask(self, data: bytes) -> tuple[str, str]:
        call = self._call(data, timeout=TIMEOUT_S)
        count = 0
        try:
            async for _ in call:
                count += 1
                if count == MAX_MESSAGES:
                    call.cancel()
                    return "LEFT", ""
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""
        return "OK", ""


async def canary(stub: inference_pb2_grpc.InferenceStub) -> list[int]:
    request = inference_pb2.GenerateRequest(
        text="a canary", sampling=inference_pb2.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    )
    return [token for m in [m async for m in stub.Generate(request, timeout=30)] for token in m.token_ids]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("door", DOORS)
async def test_random_requests_are_answered_or_refused(settings, num_requests, door):
    async with fleet(settings) as (_, address), grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        expected = await canary(stub)
        clients = Clients(channel, door, num_requests)
        await clients.run()
        print(f"seed {SEED}: {dict(clients.outcomes)}")
        assert clients.unexpected == []
        assert clients.outcomes["OK"] > num_requests / 10
        assert clients.outcomes["INVALID_ARGUMENT"] > num_requests / 10
        assert await canary(stub) == expected
