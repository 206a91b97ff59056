"""The hand-off between two workers: the same tokens whatever goes wrong, and no block lost. Faults at the transport."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from headrace.directory.records import Role
from headrace.errors import Code
from headrace.rpc.v1 import kv_pb2, kv_pb2_grpc
from tests.support.fleet import BLOCK_SIZE, NUM_BLOCKS, STEP_TOKENS, session_with, workers

P, D = Role.PREFILL, Role.DECODE
PROMPT = [3 + (7 * i) % 200 for i in range(5 * STEP_TOKENS + 3)]


@pytest.fixture(scope="module")
def reference(settings):
    """Tokens by one engine alone, nothing cached: `await reference(prompt, …)`."""

    async def run(prompt, **sampling):
        async with workers(settings, D) as [d], session_with(d) as session:
            return (await session.answer(prompt, **sampling)).token_ids

    return run


def _assert_timed(answer):
    """The report tells what the parts took, whoever prefilled."""
    end = answer.end
    assert end.prefill_tokens + end.context_tokens == len(PROMPT)
    assert end.prefill_s > 0
    assert end.queue_s >= 0
    assert end.decode_s > 0
    assert end.decode_tokens == len(answer.token_ids) - 2
    assert end.mean_batch == pytest.approx(1)
    assert len(PROMPT) < end.mean_batch_context_tokens < len(PROMPT) + len(answer.token_ids)


async def test_the_same_tokens_through_a_hand_off(settings, reference):
    expected = await reference(PROMPT)
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        answer = await session.answer(PROMPT, prefill=[p])
        assert answer.token_ids == expected
        assert answer.end.prefill_worker == p.worker_id
        assert answer.end.blocks_moved == -(-len(PROMPT) // BLOCK_SIZE)
        assert (await d.status()).prefill_tokens == 0
        _assert_timed(answer)
        again = await session.answer(PROMPT, request_id="again")  # from its own cache
        _assert_timed(again)
        assert again.end.context_tokens == again.end.cached_tokens > 0


async def test_the_priority_reaches_both_engines(settings):
    """Seen by their refusals: an engine alone knows the range."""
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        answer = await session.answer(PROMPT, prefill=[p], priority=5)
        assert answer.end.error_code == Code.INVALID_ARGUMENT
        assert f"{p.worker_id}: priority: 5 is not allowed" in answer.end.error_message
        answer = await session.answer(PROMPT, priority=-5, request_id="local")
        assert answer.end.error_message.startswith("priority: -5 is not allowed")
        assert len((await session.answer(PROMPT, prefill=[p], priority=4, request_id="right")).token_ids) == 8


@pytest.mark.parametrize(
    "num_tokens", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, STEP_TOKENS, 2 * STEP_TOKENS]
)
async def test_prompt_lengths_around_block_and_chunk_edges(settings, reference, num_tokens):
    prompt = PROMPT[:num_tokens]
    expected = await reference(prompt)
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        cold = await session.answer(prompt, prefill=[p])
        warm = await session.answer(prompt, prefill=[p])
        assert cold.token_ids == warm.token_ids == expected
        assert cold.end.prefill_worker == p.worker_id


async def test_only_blocks_that_are_missing_move(settings, reference):
    longer = [*PROMPT, *PROMPT[:20]]
    expected = await reference(longer)
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        await session.answer(PROMPT, prefill=[p], max_tokens=2)
        answer = await session.answer(longer, prefill=[p])
        assert answer.token_ids == expected
        assert answer.end.blocks_moved == -(-len(longer) // BLOCK_SIZE) - len(PROMPT) // BLOCK_SIZE
        assert answer.end.cached_tokens == len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE


async def test_seeded_sampling_does_not_depend_on_the_way(settings, reference):
    sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 7, "max_tokens": 12}
    expected = await reference(PROMPT, **sampling)
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        assert (await session.answer(PROMPT, prefill=[p], **sampling)).token_ids == expected
        assert (await session.answer(PROMPT, prefill=[p], **{**sampling, "seed": 8})).token_ids != expected


async def test_kv09_the_first_token_ends_it(settings, reference):
    first = (await reference(PROMPT, max_tokens=1))[0]
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        for options, reason in (({"max_tokens": 1}, "length"), ({"stop_token_ids": (first,)}, "stop")):
            answer = await session.answer(PROMPT, prefill=[p], **options)
            assert answer.token_ids == [first]
            assert answer.finish_reasons == {0: reason}
        assert (await d.status()).output_tokens == 0


async def test_kv09_an_end_of_text_token_first(settings, reference, tiny_model_files):
    [eos] = tiny_model_files.eos_token_ids
    forced = {"logit_bias": {eos: 100.0}}
    expected = await reference(PROMPT, **forced, ignore_eos=True)
    assert expected == [eos] * 8
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        answer = await session.answer(PROMPT, prefill=[p], **forced)
        assert answer.token_ids == [eos]
        assert answer.finish_reasons == {0: "stop"}
        assert (await d.status()).output_tokens == 0
        answer = await session.answer(PROMPT, prefill=[p], **forced, ignore_eos=True)
        assert answer.token_ids == expected


async def test_the_first_token_does_not_wait_for_the_transfer(settings):
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        d.faults.stall = True
        answer = await session.start(PROMPT, prefill=[p])
        async with asyncio.timeout(10):
            await answer.started.wait()
        assert len(answer.token_ids) == 1
        d.faults.stall = False
        async with asyncio.timeout(10):
            await answer.ended.wait()
        assert len(answer.token_ids) == 8


async def test_kv07_a_stalled_transfer_ends_by_its_deadline_and_is_recomputed(settings_with, reference):
    expected = await reference(PROMPT)
    settings = settings_with(kv={"transfer_timeout_s": 0.5})
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        d.faults.stall = True
        stalled = await session.answer(PROMPT, prefill=[p])
        assert stalled.token_ids == expected
        assert stalled.end.failed_attempts == 1
        assert stalled.end.prefill_worker == ""
        quarantined = (await d.status()).blocks.quarantined
        assert quarantined > 0  # the READ may still write: its blocks are kept out of use
        canary = await session.answer(PROMPT[:9], request_id="canary")
        assert len(canary.token_ids) == 8
        assert (await d.status()).blocks.quarantined == quarantined
        d.faults.stall = False


async def test_a_failing_transfer_tries_the_alternate_and_then_computes_here(settings, reference):
    expected = await reference(PROMPT)
    async with workers(settings, P, P, D) as [p0, p1, d], session_with(d) as session:
        d.faults.fail_next = 1
        answer = await session.answer(PROMPT, prefill=[p0, p1])
        assert answer.token_ids == expected
        assert answer.end.prefill_worker == p1.worker_id
        assert answer.end.failed_attempts == 1
        d.faults.fail_next = 2
        other = PROMPT[::-1]
        answer = await session.answer(other, prefill=[p0, p1])
        d.faults.fail_next = 0
        assert answer.token_ids == await reference(other)
        assert answer.end.prefill_worker == ""
        assert answer.end.failed_attempts == 2


async def test_a_channel_that_another_request_has_closed(settings, reference):
    """It had found the peer lost, after this one was connected to it."""
    expected = await reference(PROMPT)
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        assert (await session.answer(PROMPT[:20], prefill=[p])).end.prefill_worker == p.worker_id
        peer = await d.process._peers.connect(p.ref)
        await peer.channel.close()
        answer = await session.answer(PROMPT, prefill=[p], request_id="late")
        assert not answer.end.error_code, answer.end.error_message
        assert answer.token_ids == expected
        assert answer.end.failed_attempts == 1
        again = await session.answer(PROMPT[::-1], prefill=[p], request_id="next")
        assert again.end.prefill_worker == p.worker_id  # over a new connection


async def test_a_corrupted_block_is_never_used(settings, reference):
    expected = await reference(PROMPT)
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        d.faults.corrupt = True
        answer = await session.answer(PROMPT, prefill=[p])
        assert answer.token_ids == expected
        assert answer.end.failed_attempts == 1
        d.faults.corrupt = False
        assert (await session.answer(PROMPT, prefill=[p])).token_ids == expected


async def test_ab04_blocks_under_a_read_are_not_reused(settings_with, reference):
    """The reader's pool is so small that the second request needs the first one's blocks."""
    other = PROMPT[::-1]
    expected = await reference(other)
    settings = settings_with(engine={"num_blocks": 40}, kv={"transfer_timeout_s": 0.5})
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        d.faults.stall = True
        await session.start(PROMPT, prefill=[p], request_id="first")
        async with asyncio.timeout(10):
            while not (await d.status()).blocks.filling:
                await asyncio.sleep(0.01)
        await session.abort("first")
        async with asyncio.timeout(10):
            while not (await d.status()).blocks.quarantined:
                await asyncio.sleep(0.01)
        second = await session.start(other, request_id="second")
        await asyncio.sleep(0.2)
        assert not second.token_ids  # it waits
        d.faults.stall = False
        async with asyncio.timeout(20):
            await second.ended.wait()
        assert second.token_ids == expected


async def test_ab04_a_transfer_that_never_ends_is_torn_down_before_its_blocks_are_reused(
    settings_with, reference
):
    other = PROMPT[::-1]
    expected = await reference(other)
    settings = settings_with(engine={"num_blocks": 40}, kv={"lease_ttl_s": 1.0})
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        d.faults.stall = True
        first = await session.start(PROMPT, prefill=[p], request_id="first")
        async with asyncio.timeout(10):
            await first.started.wait()
        await session.abort("first")
        second = await session.answer(other, request_id="second")
        assert second.token_ids == expected  # though the READ of the first still stalls
        d.faults.stall = False


async def test_ab03_a_cancel_between_prefill_and_pull_releases_the_hold(settings_with):
    """By the cancel, long before the lease would end it. What comes for it later is refused and counted."""
    settings = settings_with(kv={"lease_ttl_s": 300.0})
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        d.faults.stall = True
        answer = await session.start(PROMPT, prefill=[p])
        async with asyncio.timeout(10):
            await answer.started.wait()
        [hold] = (await p.status()).holds
        await session.abort()
        d.faults.stall = False
        await p.assert_idle()
        late = kv_pb2.ReleaseRequest(lease_id=hold.owner, incarnation=p.incarnation, reader=d.incarnation)
        async with grpc.aio.insecure_channel(p.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await kv_pb2_grpc.KvExchangeStub(channel).Release(late, timeout=5)
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND
        metrics = await p.metrics()
        assert metrics['headrace_kv_refused_references_total{reason="unknown_lease"}'] == 1
        canary = await session.answer(PROMPT[::-1], prefill=[p], request_id="canary")
        assert canary.end.prefill_worker == p.worker_id


async def test_an_abort_behind_the_first_token_is_told_what_was_cached(settings):
    """As when a stop string ends the answer there."""
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        await session.answer(PROMPT, prefill=[p])
        await d.process._engine.call(lambda engine: engine.reset_cache())
        d.faults.stall = True
        answer = await session.start(PROMPT, prefill=[p], request_id="again")
        async with asyncio.timeout(10):
            await answer.started.wait()
            await session.abort("again")
            await answer.ended.wait()
        d.faults.stall = False
        assert answer.end.prefill_worker == p.worker_id
        assert answer.end.cached_tokens == len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE


async def test_a_session_that_ends_takes_its_requests_with_it(settings):
    async with workers(settings, P, D) as [p, d]:
        async with session_with(d) as session:
            for number in range(3):
                await session.start(PROMPT[number:], prefill=[p], request_id=str(number), max_tokens=100)
            async with asyncio.timeout(10):
                while not (await d.status()).output_tokens:
                    await asyncio.sleep(0.01)
        await d.assert_idle()
        assert (await d.status()).output_tokens < 300


async def test_kv01_a_prompt_that_the_prefill_worker_refuses(settings, settings_with):
    small = settings_with(engine={"num_blocks": 8})
    async with workers(small, P) as [p], workers(settings, D) as [d], session_with(d) as session:
        answer = await session.answer(PROMPT, prefill=[p])
        assert answer.end.error_code == "INVALID_ARGUMENT"
        assert "KV pool" in answer.end.error_message


async def test_kv05_another_block_size_is_refused_and_named(settings, settings_with, reference):
    expected = await reference(PROMPT)
    other = settings_with(engine={"block_size_tokens": 2 * BLOCK_SIZE})
    async with workers(other, P) as [p], workers(settings, P, D) as [q, d], session_with(d) as session:
        answer = await session.answer(PROMPT, prefill=[p, q])
        assert answer.token_ids == expected
        assert answer.end.prefill_worker == q.worker_id
        assert answer.end.failed_attempts == 1


async def test_kv04_a_prefill_worker_that_restarts_under_its_name(settings, reference):
    expected = await reference(PROMPT)
    async with workers(settings, D) as [d], session_with(d) as session:
        for number in range(3):
            async with workers(settings, P) as [p]:
                answer = await session.answer([*PROMPT[number:], 5], prefill=[p], max_tokens=1)
                assert answer.end.prefill_worker == p.worker_id
        async with workers(settings, P) as [p]:
            assert (await session.answer(PROMPT, prefill=[p])).token_ids == expected


async def test_id01_the_same_request_id_twice(settings):
    """Routers make ids that are unique; where two are not, the later request is refused and the earlier one goes on."""
    async with workers(settings, P, D) as [p, d], session_with(d) as first, session_with(d) as second:
        d.faults.stall = True
        a = await first.start(PROMPT, prefill=[p], request_id="same", max_tokens=50)
        async with asyncio.timeout(20):
            await a.started.wait()
        b = await second.answer(PROMPT[::-1], request_id="same", max_tokens=5)
        assert b.end.error_code == "ALREADY_EXISTS"
        assert not b.token_ids
        d.faults.stall = False
        async with asyncio.timeout(20):
            await a.ended.wait()
        assert len(a.token_ids) == 50


async def test_many_requests_at_once_share_the_batch(settings, reference):
    prompts = [PROMPT[i : i + 20 + 3 * i] for i in range(8)]
    expected = [await reference(prompt) for prompt in prompts]
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        answers = await asyncio.gather(
            *(session.answer(prompt, prefill=[p], request_id=str(i)) for i, prompt in enumerate(prompts))
        )
        assert [answer.token_ids for answer in answers] == expected


async def test_a_prompt_larger_than_the_reader_pool_names_it(settings):
    async with workers(settings, D) as [d], session_with(d) as session:
        answer = await session.answer([7] * (NUM_BLOCKS * BLOCK_SIZE + 1))
        assert answer.end.error_code == "INVALID_ARGUMENT"
        assert str(NUM_BLOCKS * BLOCK_SIZE) in answer.end.error_message


async def test_an_attempt_takes_no_more_than_its_share_of_the_deadline(settings, reference):
    """The transfer could take its usual 10 s, the request has 4: there is time left to compute the prompt here."""
    expected = await reference(PROMPT)
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        d.faults.stall = True
        answer = await session.answer(PROMPT, prefill=[p], timeout_s=4.0)
        assert answer.token_ids == expected
        assert answer.end.failed_attempts == 1
        d.faults.stall = False


async def test_a_deadline_that_passes_ends_the_request(settings):
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        answer = await session.answer(PROMPT, prefill=[p], timeout_s=0.002)
        assert answer.end.error_code == "DEADLINE_EXCEEDED"
