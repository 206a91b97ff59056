"""Workers that die, stop or come back at the same address, as processes of their own, over NIXL."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import asynccontextmanager

import pytest

from tests.support.fleet import session_with
from tests.support.process_fleet import ProcessWorker

PROMPT = [3 + (7 * i) % 200 for i in range(83)]


@pytest.fixture
def settings(settings_with):
    """A cluster of its own; a silent peer is noticed within two seconds."""
    return settings_with(
        kv={
            "transport": "nixl",
            "connect_timeout_s": 1.5,
            "transfer_timeout_s": 1.5,
            "progress_timeout_s": 1.5,
        },
        directory={"cluster": uuid.uuid4().hex[:8], "worker_ttl_s": 2.0},
        rpc={"keepalive_s": 1.0, "keepalive_timeout_s": 1.0},
    )


@asynccontextmanager
async def processes(settings, folder, *roles):
    """Started workers, idle at the end unless the test killed them."""
    started = [ProcessWorker(settings, role, f"{role}-{n}", folder) for n, role in enumerate(roles)]
    try:
        await asyncio.gather(*(worker.start() for worker in started))
        yield started
        for worker in started:
            if worker.is_alive:
                worker.go_on()
                await worker.assert_idle()
    finally:
        for worker in started:
            worker.stop()


def prompts(count):
    """No two share a block."""
    return [[3 + (7 * i + 13 * number) % 200 for i in range(60 + number)] for number in range(count)]


async def test_kv04_workers_restart_at_the_same_address(settings, tmp_path):
    """kill -9, three times on each side. The first request after the start succeeds, with the same tokens."""
    async with processes(settings, tmp_path, "prefill", "decode") as [p, d]:
        async with session_with(d) as session:
            expected = (await session.answer(PROMPT)).token_ids
            for number in range(3):
                answer = await session.answer([*PROMPT[1:], number], prefill=[p], request_id=f"n{number}")
                assert answer.end.prefill_worker == p.worker_id
                old = p.incarnation
                p.kill()
                await p.start()
                assert p.incarnation != old
                # A reference to the life before is refused, and the answer comes all the same.
                stale = await session.answer(
                    [*PROMPT[2:], number], prefill=[_Stale(p, old)], request_id=f"s{number}"
                )
                assert stale.finish_reasons == {0: "length"}
                assert stale.end.failed_attempts == 1
                answer = await session.answer([*PROMPT[3:], number], prefill=[p], request_id=f"a{number}")
                assert answer.end.prefill_worker == p.worker_id
        for _ in range(3):
            d.kill()
            await d.start()
            async with session_with(d) as session:
                answer = await session.answer(PROMPT, prefill=[p])
                assert answer.token_ids == expected
                assert answer.end.prefill_worker == p.worker_id
        async with asyncio.timeout(20):  # the lives before are forgotten, the one now is a neighbour
            while {peer.incarnation for peer in (await p.status()).peers} != {d.incarnation}:
                await asyncio.sleep(0.1)


class _Stale:
    """A reference that the router still has."""

    def __init__(self, worker, incarnation):
        self.ref = worker.ref
        self.ref.incarnation = incarnation


async def test_ab05_cancels_while_the_prefill_worker_dies(settings, tmp_path):
    """Requests that wait for KV are cancelled in the moment in which its owner is killed: no block is lost."""
    async with processes(settings, tmp_path, "prefill", "decode") as [p, d], session_with(d) as session:
        for round_number in range(3):
            waiting = [
                await session.start(prompt, prefill=[p], request_id=f"{round_number}/{number}", max_tokens=50)
                for number, prompt in enumerate(prompts(8))
            ]
            p.kill()
            for number in range(len(waiting)):
                await session.abort(f"{round_number}/{number}")
            async with asyncio.timeout(30):
                await asyncio.gather(*(answer.ended.wait() for answer in waiting))
            await d.assert_idle()
            await p.start()
        total = (await d.status()).blocks.total
        large = [3 + i % 200 for i in range(int(0.9 * total) * settings.engine.block_size_tokens)]
        answer = await session.answer(large, request_id="large", max_tokens=2)
        assert len(answer.token_ids) == 2


async def test_a_stopped_prefill_worker_costs_time_and_no_answer(settings, tmp_path):
    async with processes(settings, tmp_path, "prefill", "prefill", "decode") as [p0, p1, d]:
        async with session_with(d) as session:
            expected = (await session.answer(PROMPT)).token_ids
            other = PROMPT[::-1]
            other_expected = (await session.answer(other, request_id="other")).token_ids
            await session.answer([*PROMPT[1:]], prefill=[p0], request_id="connects")
            p0.pause()
            answer = await session.answer([9, *PROMPT], prefill=[p0, p1], request_id="paused")
            assert answer.finish_reasons == {0: "length"}
            assert answer.end.prefill_worker == p1.worker_id
            p0.go_on()
            again = await session.answer([9, *PROMPT], prefill=[p1], request_id="again")
            assert again.token_ids == answer.token_ids
        async with session_with(d) as session:
            assert (await session.answer(PROMPT)).token_ids == expected
            assert (await session.answer(other, request_id="other")).token_ids == other_expected


async def test_a_stopped_source_of_a_prefix_costs_time_and_no_answer(settings, tmp_path):
    num_full = len(PROMPT) // settings.engine.block_size_tokens
    async with processes(settings, tmp_path, "decode", "decode") as [d0, d1]:
        async with session_with(d0) as session:
            expected = (await session.answer(PROMPT)).token_ids
        d0.pause()
        async with session_with(d1) as session:
            answer = await session.answer(PROMPT, sources=[(d0, num_full)])
            assert answer.token_ids == expected
            assert answer.end.blocks_moved == 0
