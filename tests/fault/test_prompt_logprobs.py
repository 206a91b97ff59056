"""Log-probabilities of a prompt: the same, each once and in order, whoever computes it and whatever goes wrong."""

from __future__ import annotations

import pytest

from headrace.directory.records import Role
from headrace.rpc.v1 import inference_pb2
from tests.fault.test_choices import PROMPT, request, router_of
from tests.support.fleet import session_with, workers

P, D = Role.PREFILL, Role.DECODE
NUM_TOP = 3


@pytest.fixture(scope="module")
def expected(settings):
    """By one engine alone: `await expected()`."""

    async def run():
        async with workers(settings, D) as [d], session_with(d) as session:
            entries = (await session.answer(PROMPT, prompt_logprobs=NUM_TOP)).prompt_logprobs
        assert len(entries) == len(PROMPT) - 1
        assert {len(entry.top_ids) for entry in entries} == {NUM_TOP}
        return entries

    return run


async def test_through_a_hand_off_cold_and_warm(settings, expected):
    entries = await expected()
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        for request_id in ("cold", "warm"):
            answer = await session.answer(
                PROMPT, prefill=[p], request_id=request_id, prompt_logprobs=NUM_TOP, n=2
            )
            assert answer.prompt_logprobs == entries
            assert answer.end.prefill_worker == p.worker_id
            assert answer.end.cached_tokens == 0
        assert (await p.status()).prefill_tokens == 2 * len(PROMPT)
        plain = await session.answer(PROMPT, prefill=[p], request_id="plain")
        assert plain.prompt_logprobs == []


@pytest.mark.parametrize("num_prefill", [1, 2])
async def test_a_hand_off_that_fails_on_the_way(settings, expected, num_prefill):
    """What was delivered of the first attempt is not delivered again by the next one, here or elsewhere."""
    entries = await expected()
    async with workers(settings, *[P] * num_prefill, D) as [*prefill, d], session_with(d) as session:
        d.faults.fail_next = 1
        answer = await session.answer(PROMPT, prefill=prefill, prompt_logprobs=NUM_TOP)
        assert answer.prompt_logprobs == entries
        assert answer.end.failed_attempts == 1


async def test_through_the_public_api(settings, expected):
    entries = await expected()
    async with workers(settings, P, D), router_of(settings, 2) as (stub, _):
        for _ in range(2):
            call = stub.Generate(request(prompt_logprobs=NUM_TOP, max_tokens=3, temperature=0), timeout=20)
            messages = [message async for message in call]
            num_before = next(i for i, message in enumerate(messages) if message.token_ids)
            assert [
                entry for message in messages[:num_before] for entry in message.prompt_logprobs
            ] == entries
            assert [t for message in messages for t in message.prompt_token_ids] == PROMPT[1:]
            assert not any(message.prompt_logprobs for message in messages[num_before:])
            assert messages[-1].usage.cached_tokens == 0
            assert messages[-1].hand_off.prefill_worker == "prefill-0"


async def test_where_the_time_went(settings):
    async with workers(settings, P, D), router_of(settings, 2) as (stub, _):
        call = stub.Generate(request(max_tokens=6, temperature=0, ignore_eos=True), timeout=20)
        timings = [message async for message in call][-1].timings
        figures = {name.name: getattr(timings, name.name) for name in inference_pb2.Timings.DESCRIPTOR.fields}
        assert all(seconds > 0 for seconds in figures.values()), figures
        assert timings.worker_queue_s + timings.worker_prefill_s < timings.prefill_s
        assert timings.queue_s + timings.prefill_s == pytest.approx(timings.time_to_first_token_s)
        assert timings.time_to_first_token_s + timings.decode_s == pytest.approx(timings.total_s)
        assert timings.inter_token_s < timings.decode_s
