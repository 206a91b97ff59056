"""Several answers to one prompt, and answers whose client leaves: through prefill, hand-off, decode and router."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from headrace.directory.records import Role
from headrace.engine.sequence import NewToken, Sequence
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc
from headrace.sampling_params import SamplingParams
from router.app import Router
from tests.support.fleet import BLOCK_SIZE, STEP_TOKENS, session_with, workers

P, D = Role.PREFILL, Role.DECODE
PROMPT = [3 + (7 * i) % 200 for i in range(5 * STEP_TOKENS + 3)]
SAMPLED = {"temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def alone(settings):
    """Token ids of choice c of n, computed as the only one, by one engine: `await alone(c, n)`."""

    async def run(choice, n):
        async with workers(settings, D) as [d]:
            engine = d.process._engine
            tokens: asyncio.Queue[NewToken] = asyncio.Queue()
            sampling = SamplingParams(n=n, **SAMPLED)
            root = d.process._root_digest("")
            sequence = Sequence(
                "alone", list(PROMPT), len(PROMPT), sampling, root, choices=range(choice, choice + 1)
            )
            with engine.subscribed("alone", lambda e: isinstance(e, NewToken) and tokens.put_nowait(e)):
                await engine.submit(sequence)
                async with asyncio.timeout(20):
                    return [(await tokens.get()).token_id for _ in range(SAMPLED["max_tokens"])]

    return run


@asynccontextmanager
async def router_of(settings, num_workers):
    """A stub of a router that knows so many workers, and the router."""
    router = Router(settings)
    address = await router.start()
    try:
        async with asyncio.timeout(10):
            while len(router.view.workers) < num_workers:
                await asyncio.sleep(0.01)
        async with grpc.aio.insecure_channel(address) as channel:
            yield inference_pb2_grpc.InferenceStub(channel), router
    finally:
        await router.stop()


def request(**sampling) -> inference_pb2.GenerateRequest:
    message = inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingParams(**sampling))
    message.token_ids.ids.extend(PROMPT)
    return message


async def test_kv10_three_choices_equal_three_runs_of_one_choice_each(settings, alone):
    """Choice c of seed s is what an engine draws for (s, c) alone, whatever n; n = 1 gives choice 0."""
    expected = {choice: await alone(choice, 3) for choice in range(3)}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        answer = await session.answer(PROMPT, prefill=[p], n=3, **SAMPLED)
        assert answer.choices == expected
        assert answer.finish_reasons == dict.fromkeys(range(3), "length")
        assert answer.end.blocks_moved == -(-len(PROMPT) // BLOCK_SIZE)  # once
        assert (await d.status()).prefill_tokens == 0
        assert (await p.status()).prefill_tokens == len(PROMPT)
        single = await session.answer(PROMPT, prefill=[p], request_id="single", **SAMPLED)
        assert single.token_ids == expected[0]
        two = await session.answer(PROMPT, request_id="two", n=2, **SAMPLED)
        assert two.choices == {choice: expected[choice] for choice in range(2)}


async def test_kv10_choices_through_the_public_api(settings, alone):
    expected = [await alone(choice, 3) for choice in range(3)]
    async with workers(settings, P, D), router_of(settings, 2) as (stub, router):
        messages = [m async for m in stub.Generate(request(n=3, **SAMPLED), timeout=20)]
        found = [[t for m in messages if m.choice == choice for t in m.token_ids] for choice in range(3)]
        assert found == expected
        assert len([m for m in messages if m.finish_reason]) == 3
        assert messages[-1].usage.completion_tokens == 3 * SAMPLED["max_tokens"]
        assert messages[-1].hand_off.prefill_worker == "prefill-0"
        greedy = [m async for m in stub.Generate(request(n=3, max_tokens=6, temperature=0), timeout=20)]
        texts = ["".join(m.text for m in greedy if m.choice == choice) for choice in range(3)]
        assert len(set(texts)) == 1
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            [_ async for _ in stub.Generate(request(n=1000))]
        assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert router.tally.requests == {"ok": 2}


@pytest.mark.parametrize("num_prefill", [1, 2])
async def test_kv10_a_hand_off_that_fails_after_the_first_tokens(settings_with, alone, num_prefill):
    expected = {choice: await alone(choice, 3) for choice in range(3)}
    settings = settings_with(kv={"transfer_timeout_s": 0.5})
    async with workers(settings, *[P] * num_prefill, D) as [*prefill, d], session_with(d) as session:
        d.faults.stall = True
        answer = await session.answer(PROMPT, prefill=prefill, n=3, **SAMPLED)
        assert answer.choices == expected
        assert answer.end.failed_attempts == 1
        assert answer.end.prefill_worker == ""
        d.faults.stall = False


async def test_kv10_one_choice_is_aborted_and_the_others_go_on(settings, alone):
    expected = {choice: await alone(choice, 3) for choice in range(3)}
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        d.faults.stall = True
        answer = await session.start(PROMPT, prefill=[p], n=3, **SAMPLED)
        async with asyncio.timeout(10):
            while len(answer.choices) < 3:
                await asyncio.sleep(0.01)
        await session.abort(choice=1)
        d.faults.stall = False
        async with asyncio.timeout(10):
            await answer.ended.wait()
        assert {c: answer.choices[c] for c in (0, 2)} == {c: expected[c] for c in (0, 2)}
        assert answer.choices[1] == expected[1][: len(answer.choices[1])]
        assert answer.finish_reasons == {0: "length", 2: "length"}
        assert not answer.end.error_code
        whole = await session.start(PROMPT, prefill=[p], request_id="whole", n=3, **SAMPLED)
        await session.abort("whole")
        async with asyncio.timeout(10):
            await whole.ended.wait()


async def test_kv10_first_tokens_that_end_choices(settings, alone):
    first = (await alone(1, 3))[0]
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        one = await session.answer(PROMPT, prefill=[p], n=3, **{**SAMPLED, "max_tokens": 1})
        assert one.finish_reasons == dict.fromkeys(range(3), "length")
        assert (await d.status()).output_tokens == 0
        some = await session.answer(PROMPT, prefill=[p], n=3, stop_token_ids=(first,), **SAMPLED)
        assert some.choices[1] == [first]
        assert some.finish_reasons[1] == "stop"


async def test_kv10_choices_in_a_pool_that_holds_one_of_them(settings_with, alone):
    expected = {choice: await alone(choice, 3) for choice in range(3)}
    settings = settings_with(engine={"num_blocks": -(-(len(PROMPT) + 12) // BLOCK_SIZE)})
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        assert (await session.answer(PROMPT, prefill=[p], n=3, **SAMPLED)).choices == expected


async def stopped_within_two_steps(worker) -> int:
    """Wait until the worker knows that its request is over; returns the tokens drawn in all."""
    async with asyncio.timeout(10):
        while worker.process._decode.num_requests:
            await asyncio.sleep(0)
    noticed = worker.process._core.load().output_tokens
    await worker.assert_idle()
    drawn = (await worker.status()).output_tokens
    assert drawn <= noticed + 2
    return drawn


async def test_ab06_a_dropped_session_stops_the_decode(settings_with):
    settings = settings_with(engine={"num_blocks": 256})
    async with workers(settings, P, D) as [p, d]:
        async with session_with(d) as session:
            answer = await session.start(PROMPT, prefill=[p], max_tokens=500, ignore_eos=True)
            async with asyncio.timeout(10):
                while len(answer.token_ids) < 3:
                    await asyncio.sleep(0)
        assert await stopped_within_two_steps(d) < 400


async def test_ab06_a_client_that_drops_the_connection_stops_the_decode(settings_with):
    settings = settings_with(engine={"num_blocks": 256})
    async with workers(settings, P, D) as [_, d], router_of(settings, 2) as (stub, router):
        call = stub.Generate(request(max_tokens=500, temperature=0, ignore_eos=True))
        received = 0
        async for message in call:
            received += len(message.token_ids)
            if received >= 3:
                break
        call.cancel()
        async with asyncio.timeout(10):
            while not router.tally.requests:
                await asyncio.sleep(0)
        drawn = await stopped_within_two_steps(d)
        assert drawn < 400
        assert router.tally.requests == {"cancelled": 1}
        assert received <= router.tally.output_tokens["cancelled"] <= drawn + 1  # one is the prefill worker's


@pytest.mark.parametrize("is_split", [False, True])
async def test_kv10_more_choices_than_a_step_has_tokens(settings_with, alone, is_split):
    """In a pool that has room for a few of them beside the prompt."""
    settings = settings_with(engine={"num_blocks": -(-len(PROMPT) // BLOCK_SIZE) + 5})
    num_choices = 4 * STEP_TOKENS
    expected = await alone(num_choices - 1, 3)
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        answer = await session.answer(PROMPT, prefill=[p] if is_split else [], n=num_choices, **SAMPLED)
        assert answer.finish_reasons == dict.fromkeys(range(num_choices), "length")
        assert answer.choices[num_choices - 1] == expected
