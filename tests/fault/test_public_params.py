"""Settings of requests through both gRPC APIs and a whole fleet: odd ones are served right, bad ones disturb nobody."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager

import grpc
import pytest

from headrace.directory.records import Role
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc
from headrace.rpc.vllm import vllm_engine_pb2, vllm_engine_pb2_grpc
from router.app import Router
from tests.support.fleet import STEP_TOKENS, workers
from tests.unit.router.test_bad_values import violations

P, D = Role.PREFILL, Role.DECODE
PROMPT = [3 + (7 * i) % 200 for i in range(2 * STEP_TOKENS + 3)]
VOCAB_SIZE = 259
NAN, INF = float("nan"), float("inf")


class Doors:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.own = inference_pb2_grpc.InferenceStub(channel)
        self.vllm = vllm_engine_pb2_grpc.VllmEngineStub(channel)

    async def answer(self, prompt=PROMPT, **sampling) -> list[inference_pb2.GenerateResponse]:
        message = inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingParams(**sampling))
        message.token_ids.ids.extend(prompt)
        return [response async for response in self.own.Generate(message, timeout=30)]

    async def tokens(self, prompt=PROMPT, **sampling) -> list[int]:
        return [t for message in await self.answer(prompt, **sampling) for t in message.token_ids]

    async def by_vllm(self, *, stream, **sampling) -> list[vllm_engine_pb2.GenerateResponse]:
        message = vllm_engine_pb2.GenerateRequest(
            tokenized=vllm_engine_pb2.TokenizedInput(input_ids=PROMPT),
            sampling_params=vllm_engine_pb2.SamplingParams(**sampling),
            stream=stream,
        )
        return [response async for response in self.vllm.Generate(message, timeout=30)]


@asynccontextmanager
async def doors_of(settings):
    """The doors, and the workers behind."""
    async with workers(settings, P, D) as behind:
        router = Router(settings)
        address = await router.start()
        try:
            async with asyncio.timeout(10):
                while len(router.view.workers) < 2:
                    await asyncio.sleep(0.01)
            async with grpc.aio.insecure_channel(address) as channel:
                yield Doors(channel), behind
        finally:
            await router.stop()


BAD = [
    *({"temperature": t} for t in (NAN, INF, -1, 1e-9, 1e9)),
    *({"top_p": p} for p in (NAN, 1.5)),
    {"min_p": NAN},
    {"repetition_penalty": 1e9},
    {"presence_penalty": NAN},
    *({"logit_bias": {token_id: 1}} for token_id in (VOCAB_SIZE, -1)),
    {"max_tokens": 2**31},
    {"logprobs": 10**6},
    {"n": 10**6},
    {"stop": ["x"] * 10**5},
    {"stop": ["x" * 10**6]},
]


async def test_pa01_pa04_bad_requests_leave_those_in_flight_as_they_are(settings):
    greedy = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    async with doors_of(settings) as (doors, behind):
        expected = await doors.tokens(**greedy)
        running = [asyncio.create_task(doors.tokens(**greedy)) for _ in range(3)]
        for sampling in BAD:
            for bad in (doors.answer(**sampling), doors.by_vllm(stream=True, **sampling)):
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await bad
                assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert next(iter(sampling)) in failure.value.details()
        assert await asyncio.gather(*running) == [expected] * 3
        statuses = [await worker.status() for worker in behind]
        assert sum(status.output_tokens for status in statuses) == 4 * 40  # no engine has seen the bad ones


@pytest.mark.parametrize("top_k", [0, -1, VOCAB_SIZE, VOCAB_SIZE + 1, 10**7])
async def test_pa01_top_k_of_the_vocabulary_or_more_is_off(settings, top_k):
    sampled = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    async with doors_of(settings) as (doors, _):
        assert await doors.tokens(top_k=top_k, **sampled) == await doors.tokens(**sampled)
        if top_k >= 0:
            *_, last = await doors.by_vllm(stream=False, top_k=top_k, **sampled)
            assert list(last.complete.output_ids) == await doors.tokens(**sampled)


async def test_pa02_a_bias_on_the_last_token_decides(settings):
    async with doors_of(settings) as (doors, _):
        bias = {"logit_bias": {VOCAB_SIZE - 1: 100.0}, "max_tokens": 3, "temperature": 0}
        assert await doors.tokens(ignore_eos=True, **bias) == [VOCAB_SIZE - 1] * 3
        last = (await doors.answer(**bias))[-1]  # it is the end-of-text token
        assert last.finish_reason == inference_pb2.FINISH_REASON_STOP
        assert last.usage.completion_tokens == 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 1},
        {"grammar": {"choice": {"texts": ["a", "b"]}}},
        {"logit_bias": dict.fromkeys(range(1, VOCAB_SIZE), -100.0)},
    ],
)
async def test_pa05_logprobs_where_nearly_nothing_can_be_drawn(settings, sampling):
    """They are the model's own: the drawn token's is what it has as part of a prompt."""
    async with doors_of(settings) as (doors, _):
        messages = await doors.answer(logprobs=5, max_tokens=1, **sampling)
        [token_id] = [t for message in messages for t in message.token_ids]
        [entry] = [entry for message in messages for entry in message.logprobs]
        assert all(map(math.isfinite, (entry.logprob, *entry.top_logprobs)))
        assert len(entry.top_logprobs) == 5
        prompt = [*PROMPT, token_id]
        again = await doors.answer(prompt, prompt_logprobs=5, max_tokens=1)
        reference = [entry for message in again for entry in message.prompt_logprobs][-1]
        assert entry.logprob == pytest.approx(reference.logprob, abs=1e-4)
        assert entry.top_logprobs == pytest.approx(reference.top_logprobs, abs=1e-4)


async def test_both_doors_give_the_same_answer(settings):
    sampling = {"seed": 11, "max_tokens": 9, "n": 2, "logprobs": 2, "prompt_logprobs": 1}
    async with doors_of(settings) as (doors, _):
        own = await doors.answer(**sampling)
        chunks = [m.chunk for m in await doors.by_vllm(stream=True, **sampling) if m.HasField("chunk")]
        completes = [m.complete for m in await doors.by_vllm(stream=False, **sampling)]
        for choice in range(2):
            mine = [message for message in own if message.choice == choice]
            token_ids = [t for message in mine for t in message.token_ids]
            logprobs = [entry.logprob for message in mine for entry in message.logprobs]
            theirs = [chunk for chunk in chunks if chunk.index == choice]
            assert [t for chunk in theirs for t in chunk.token_ids] == token_ids
            assert list(completes[choice].output_ids) == token_ids
            assert completes[choice].output_logprobs.token_logprobs == pytest.approx(logprobs)
            of_prompt = [entry.logprob for message in own for entry in message.prompt_logprobs]
            for given in (theirs[0].input_logprobs, completes[choice].input_logprobs):
                assert list(given.token_ids) == PROMPT
                assert [each.value for each in given.token_logprobs[1:]] == pytest.approx(of_prompt)


@pytest.mark.parametrize("is_split", [False, True])
async def test_so01_a_grammar_that_a_worker_refuses_is_named_as_by_the_router(settings_with, is_split):
    settings = settings_with(kv={"min_remote_tokens": 1 if is_split else 10_000})
    async with doors_of(settings) as (doors, _):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await doors.answer(grammar={"regex": "("})
        assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert ("prefill-0: grammar" in failure.value.details()) is is_split
        [(field, description)] = violations(failure.value)
        assert field == "grammar"
        assert "regex" in description
