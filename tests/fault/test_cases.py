"""Situations that broke other systems, by their ids; those of the hand-off's everyday life are in test_hand_off.py."""

from __future__ import annotations

import asyncio

import pytest

from headrace.directory.records import Role
from kv_transfer.faulty_transport import Faults
from tests.support.fleet import BLOCK_SIZE, STEP_TOKENS, Gate, Worker, session_with, workers
from tests.support.tiny_llama import write_tiny_llama

P, D = Role.PREFILL, Role.DECODE
PROMPT = [3 + (7 * i) % 200 for i in range(5 * STEP_TOKENS + 3)]


@pytest.mark.parametrize("is_split", [True, False])
async def test_ab01_requests_that_are_cancelled_in_an_engines_queue_leave_nothing_there(
    settings_with, is_split
):
    """A long prompt runs at the engine that prefills; ten wait behind it, and are cancelled."""
    settings = settings_with(engine={"max_sequences": 1, "num_blocks": 400})
    long = [3 + i % 200 for i in range(30 * STEP_TOKENS)]
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        engine, prefill = (p, [p]) if is_split else (d, [])
        gate = Gate(engine)

        async def until_waiting(number):
            async with asyncio.timeout(20):
                while engine.process._core.load().waiting != number:
                    num_begun = gate.num_begun
                    gate.allow()
                    await gate.begun(num_begun + 1)

        running = await session.start(long, prefill=prefill, max_tokens=1)
        await gate.begun(1)
        waiting = [
            await session.start([number, *PROMPT], prefill=prefill, request_id=str(number))
            for number in range(10)
        ]
        await until_waiting(10)
        for number in range(10):
            await session.abort(str(number))
        await until_waiting(0)
        assert not running.ended.is_set()
        gate.open()
        async with asyncio.timeout(20):
            await asyncio.gather(*(answer.ended.wait() for answer in [running, *waiting]))
        assert not any(answer.token_ids for answer in waiting)
        assert (await engine.status()).prefill_tokens == len(long)


async def test_ab02_a_cancel_in_the_middle_of_a_long_prefill(settings_with):
    """40 chunks, cancelled after the second: the prefill worker runs at most the one that is under way."""
    settings = settings_with(engine={"num_blocks": 200})
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        gate = Gate(p)
        long = [3 + i % 200 for i in range(40 * STEP_TOKENS)]
        answer = await session.start(long, prefill=[p])
        gate.allow(2)
        await gate.begun(3)
        await session.abort()
        async with asyncio.timeout(20):
            await answer.ended.wait()
            while p.process._exchange.num_streams:
                await asyncio.sleep(0.005)
        gate.allow(1000)
        canary = await session.answer(PROMPT[:STEP_TOKENS], prefill=[p], request_id="canary", max_tokens=1)
        assert len(canary.token_ids) == 1
        assert gate.num_begun == 4  # the one under way, and the canary's


async def test_ab03_the_front_dies_between_the_two_legs(settings):
    """Nobody cancels and nobody releases: the lease ends it, and late notices for it change nothing."""
    async with workers(settings, P, D) as [p, d]:
        async with session_with(d) as session:
            d.faults.stall = True
            answer = await session.start(PROMPT, prefill=[p])
            async with asyncio.timeout(10):
                await answer.started.wait()
        # The session is gone, and with it the request; its READ still stalls.
        async with asyncio.timeout(20):
            while (await p.status()).holds:
                await asyncio.sleep(0.05)
        d.faults.stall = False


async def test_kv01_an_exception_in_the_prefill_workers_forward_pass(settings):
    """Its request falls back at once; without anybody else to compute it, the error is the answer."""
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        engine = p.process._core
        runner, engine._runner = engine._runner, _Broken()
        answer = await session.answer(PROMPT, prefill=[p])
        assert answer.end.failed_attempts == 1
        assert answer.finish_reasons == {0: "length"}
        own = d.process._core
        own_runner, own._runner = own._runner, _Broken()
        other = await session.answer(PROMPT[::-1], prefill=[p], request_id="other")
        assert other.end.error_code == "INTERNAL"
        engine._runner, own._runner = runner, own_runner
        again = await session.answer(PROMPT[::-1], prefill=[p], request_id="again")
        assert again.end.prefill_worker == p.worker_id


class _Broken:
    def run(self, plan):
        raise ArithmeticError("injected")


async def test_kv05_another_dtype_and_other_weights_are_refused_and_named(settings, settings_with, tmp_path):
    """Weights of another revision have equal shapes: their KV would be read without an error, and be wrong."""
    other_weights = {"model": {"ref": str(write_tiny_llama(tmp_path / "other", seed=1))}}
    for changes, field in (
        ({"model": {"dtype": "bfloat16"}}, "dtype"),
        (other_weights, "model_fingerprint"),
    ):
        other = settings_with(**changes)
        async with workers(settings, D) as [d], workers(other, P) as [p], session_with(d) as session:
            answer = await session.answer(PROMPT, prefill=[p])
            assert answer.end.failed_attempts == 1
            alone = await session.answer(PROMPT, request_id="alone")
            assert answer.token_ids == alone.token_ids
            assert field in next(peer.refusal for peer in (await d.status()).peers if peer.refusal)


async def test_kv07_one_stalled_link_delays_nobody_else(settings_with):
    """Ten requests through one prefill worker while the READs from another one stall."""
    settings = settings_with(kv={"transfer_timeout_s": 1.0})
    async with workers(settings, P, P, D) as [slow, fast, d], session_with(d) as session:
        d.faults.by_peer[slow.incarnation] = Faults(stall=True)
        stalled = await session.start(PROMPT, prefill=[slow], request_id="stalled")
        async with asyncio.timeout(10):
            await stalled.started.wait()
        for number in range(10):
            answer = await session.answer([number + 3, *PROMPT[:20]], prefill=[fast], request_id=str(number))
            assert answer.end.prefill_worker == fast.worker_id
        assert not stalled.ended.is_set() or stalled.end.failed_attempts == 1
        async with asyncio.timeout(20):
            await stalled.ended.wait()
        assert stalled.finish_reasons == {0: "length"}
        d.faults.by_peer[slow.incarnation].stall = False


async def test_kv07_a_reader_without_room_for_the_prompt_says_so(settings, settings_with):
    """The receiving pool is smaller than the prompt: refused with the numbers, and nobody spins."""
    small = settings_with(engine={"num_blocks": 8})
    async with workers(settings, P) as [p], workers(small, D) as [d], session_with(d) as session:
        answer = await session.answer(PROMPT, prefill=[p])
        assert answer.end.error_code == "INVALID_ARGUMENT"
        assert str(8 * BLOCK_SIZE) in answer.end.error_message


@pytest.mark.parametrize("drain_timeout_s", [10.0, 0.3])
async def test_hd02_a_prefill_worker_drains_with_kv_that_was_not_pulled(
    settings, settings_with, drain_timeout_s
):
    """Given time, the READs end before the worker does; with less, the prompts are computed elsewhere."""
    prompts = [[3 + (7 * i + number) % 200 for i in range(50)] for number in range(5)]
    short = settings_with(rpc={"drain_timeout_s": drain_timeout_s})
    async with workers(settings, D) as [d], session_with(d) as session:
        expected = [
            (await session.answer(prompt, request_id=f"e{number}")).token_ids
            for number, prompt in enumerate(prompts)
        ]
    async with workers(settings, D) as [d], session_with(d) as session:
        p = Worker(short, P, "prefill-x")
        await p.start()
        d.faults.delay_s = 1.0
        answers = [
            await session.start(prompt, prefill=[p], request_id=str(number))
            for number, prompt in enumerate(prompts)
        ]
        async with asyncio.timeout(10):
            await asyncio.gather(*(answer.started.wait() for answer in answers))
        stopping = asyncio.create_task(p.process.stop())
        await asyncio.sleep(0)
        late = await session.answer(PROMPT, prefill=[p], request_id="late")
        assert late.end.prefill_worker == ""  # nothing new is taken
        await stopping
        async with asyncio.timeout(30):
            await asyncio.gather(*(answer.ended.wait() for answer in answers))
        assert [answer.token_ids for answer in answers] == expected
        d.faults.delay_s = 0.0
