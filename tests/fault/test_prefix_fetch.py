"""Cached blocks read from another worker under a lease: at the start of a prompt, and when a worker ends."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.block_hash import HashRoot, block_hashes
from headrace.cluster.redis_server import RedisServer
from headrace.directory.records import Role
from headrace.model_store import resolve
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc, kv_pb2, kv_pb2_grpc
from kv_transfer import prefix_fetch
from router.app import Router
from tests.support.fleet import BLOCK_SIZE, STEP_TOKENS, fleet_settings, session_with, workers

P, D = Role.PREFILL, Role.DECODE
PROMPT = [3 + (7 * i) % 200 for i in range(5 * STEP_TOKENS + 3)]
NUM_FULL = len(PROMPT) // BLOCK_SIZE
DECISION = 'headrace_kv_prefix_decisions_total{{decision="{}"}}'.format
FAILURE = 'headrace_kv_failures_total{{reason="{}"}}'.format
REFUSAL = 'headrace_kv_refused_references_total{{reason="{}"}}'.format


@pytest.fixture(scope="module")
def redis_url():
    with RedisServer() as server:
        yield server.url


@pytest.fixture(scope="module")
def settings(tiny_model_files, redis_url):
    return fleet_settings(tiny_model_files, redis_url)


@pytest.fixture
def settings_with(tiny_model_files, redis_url):
    return lambda **changes: fleet_settings(tiny_model_files, redis_url, **changes)


@pytest.fixture(scope="module")
def expected(settings):
    """The answer by one engine alone, nothing cached."""

    async def answer():
        async with workers(settings, D) as [d], session_with(d) as session:
            return (await session.answer(PROMPT)).token_ids

    return asyncio.run(answer())


async def test_the_next_turn_takes_its_prefix_from_the_decode_worker(settings, expected):
    """The decode worker alone has the first turn, answer included; the prefill worker reads it from there."""
    turn = [*PROMPT, *expected, *PROMPT[:9]]
    async with workers(settings, D) as [d], session_with(d) as session:
        reference = (await session.answer(turn)).token_ids
    async with workers(settings, P, D, D) as [p, d0, d1]:
        async with session_with(d0) as session:
            await session.answer(PROMPT)
        cached = (len(PROMPT) + len(expected) - 1) // BLOCK_SIZE
        async with session_with(d1) as session:
            answer = await session.answer(turn, prefill=[p], sources=[(d0, cached)])
        assert answer.token_ids == reference
        assert answer.end.prefill_worker == p.worker_id
        assert answer.end.cached_tokens == cached * BLOCK_SIZE
        assert (await p.status()).prefill_tokens == len(turn) - cached * BLOCK_SIZE
        metrics = await p.metrics()
        assert metrics[DECISION("fetch")] == 1
        assert metrics[f'headrace_kv_read_blocks_total{{peer="{d0.worker_id}"}}'] == cached


async def test_a_decode_worker_that_prefills_itself_fetches_too(settings, expected):
    async with workers(settings, D, D) as [d0, d1]:
        async with session_with(d0) as session:
            await session.answer(PROMPT)
        async with session_with(d1) as session:
            answer = await session.answer(PROMPT, sources=[(d0, NUM_FULL)])
        assert answer.token_ids == expected
        assert answer.end.blocks_moved == NUM_FULL
        assert (await d1.status()).prefill_tokens == len(PROMPT) - NUM_FULL * BLOCK_SIZE


async def test_blocks_in_the_owners_host_memory_are_read_from_there(settings_with, expected):
    """The owner's pool holds one prompt; the earlier one has gone to host memory."""
    settings = settings_with(engine={"num_blocks": 26, "host_memory_bytes": 1 << 20})
    async with workers(settings, D, D) as [d0, d1]:
        async with session_with(d0) as session:
            await session.answer(PROMPT)
            await session.answer(PROMPT[::-1], request_id="evicts")
        assert (await d0.status()).blocks.host_cached > 0
        before = (await d0.metrics())['headrace_kv_tier_hits_total{tier="host"}']
        async with session_with(d1) as session:
            answer = await session.answer(PROMPT, sources=[(d0, NUM_FULL)])
        assert answer.token_ids == expected
        assert answer.end.blocks_moved == NUM_FULL
        # Not by way of the owner's device pool.
        assert (await d0.metrics())['headrace_kv_tier_hits_total{tier="host"}'] == before


async def test_a_lease_and_an_offer_name_so_many_blocks_at_most(settings):
    """One more is refused with the limit, before the engine sees any; that many are looked up."""
    async with workers(settings, D) as [d], grpc.aio.insecure_channel(d.address) as channel:
        stub = kv_pb2_grpc.KvExchangeStub(channel)
        names = [number.to_bytes(16, "big") for number in range(prefix_fetch.MAX_NAMES)]
        lease = kv_pb2.LeaseRequest(
            lease_id="one", expected_incarnation=d.incarnation, lease_ttl_s=1.0, names=names
        )
        assert not (await stub.Lease(lease, timeout=20)).block_ids
        lease.names.append(b"x")
        blocks = [kv_pb2.NamedBlock(digest=name) for name in lease.names]
        offer = kv_pb2.OfferRequest(expected_incarnation=d.incarnation, blocks=blocks, timeout_s=1.0)
        for call, field in (
            (stub.Lease(lease, timeout=20), "names"),
            (stub.Offer(offer, timeout=20), "blocks"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert refused.value.details().startswith(f"{field}: '65537 of them'")
            assert "at most 65536" in refused.value.details()


async def test_a_reader_asks_for_no_more_blocks_than_a_lease_may_name(settings, expected, monkeypatch):
    monkeypatch.setattr(prefix_fetch, "MAX_NAMES", 3)
    async with workers(settings, D, D) as [d0, d1]:
        async with session_with(d0) as session:
            await session.answer(PROMPT)
        async with session_with(d1) as session:
            answer = await session.answer(PROMPT, sources=[(d0, NUM_FULL)])
        assert (answer.token_ids, answer.end.blocks_moved) == (expected, 3)


async def test_kv08_what_the_index_claims_and_nobody_has_is_computed(settings, expected):
    async with workers(settings, D, D) as [d0, d1], session_with(d1) as session:
        answer = await session.answer(PROMPT, sources=[(d0, NUM_FULL)])
        assert answer.token_ids == expected
        assert answer.end.blocks_moved == 0
        assert (await d1.metrics())[DECISION("gone")] == 1


async def test_kv08_two_requests_share_a_prefix_whose_load_fails_once(settings, expected):
    """One attempt at each source, then the prefix is computed; both answers are right."""
    other = [*PROMPT[: 2 * BLOCK_SIZE], *PROMPT[::-1]]
    async with workers(settings, D) as [d], session_with(d) as session:
        other_expected = (await session.answer(other)).token_ids
    async with workers(settings, D, D) as [d0, d1]:
        async with session_with(d0) as session:
            await session.answer(PROMPT)
        async with session_with(d1) as session:
            d1.faults.fail_next = 1
            one, two = await asyncio.gather(
                session.answer(PROMPT, sources=[(d0, NUM_FULL)], request_id="one"),
                session.answer(other, sources=[(d0, 2)], request_id="two"),
            )
        assert (one.token_ids, two.token_ids) == (expected, other_expected)


async def test_kv08_a_load_that_always_fails_is_tried_once_for_each_source(settings, expected):
    async with workers(settings, D, D, D) as [d0, d1, d2]:
        for worker in (d0, d1):
            async with session_with(worker) as session:
                await session.answer(PROMPT)
        async with session_with(d2) as session:
            d2.faults.fail_next = 1000
            answer = await session.answer(PROMPT, sources=[(d0, NUM_FULL), (d1, NUM_FULL)])
            assert answer.token_ids == expected
            assert 1000 - d2.faults.fail_next == 2
            assert (await d2.metrics())[DECISION("failed")] == 2
            d2.faults.fail_next = 0


async def test_a_corrupted_prefix_is_computed_instead(settings, expected):
    async with workers(settings, D, D) as [d0, d1]:
        async with session_with(d0) as session:
            await session.answer(PROMPT)
        async with session_with(d1) as session:
            d1.faults.corrupt = True
            answer = await session.answer(PROMPT, sources=[(d0, NUM_FULL)])
            d1.faults.corrupt = False
            assert answer.token_ids == expected
            assert (await d1.metrics())[FAILURE("checksum")] == 1
            # What arrived broken is nowhere in the tree.
            assert (await session.answer(PROMPT, request_id="again")).token_ids == expected


async def test_a_source_that_stalls_is_given_up_and_its_blocks_stay_out_of_use(settings, expected):
    async with workers(settings, D, D) as [d0, d1]:
        async with session_with(d0) as session:
            await session.answer(PROMPT)
        async with session_with(d1) as session:
            d1.faults.stall = True
            answer = await session.answer(PROMPT, sources=[(d0, NUM_FULL)])
            assert answer.token_ids == expected
            assert (await d1.status()).blocks.quarantined == NUM_FULL
            assert (await d1.metrics())["headrace_kv_quarantined_blocks"] == NUM_FULL
            d1.faults.stall = False


async def test_a_slow_link_is_not_used(settings, expected):
    async with workers(settings, D, D) as [d0, d1]:
        async with session_with(d0) as session:
            await session.answer(PROMPT[::-1])
            await session.answer(PROMPT, request_id="2")
        async with session_with(d1) as session:
            d1.faults.delay_s = 0.5  # for a handful of tiny blocks: far slower than computing
            slow = await session.answer(PROMPT[::-1], sources=[(d0, NUM_FULL)])
            assert slow.end.blocks_moved == NUM_FULL
            d1.faults.delay_s = 0.0
            answer = await session.answer(PROMPT, sources=[(d0, NUM_FULL)], request_id="2")
            assert answer.token_ids == expected
            assert answer.end.blocks_moved == 0
            assert (await d1.metrics())[DECISION("compute")] == 1


async def test_a_burst_of_equal_prompts_fetches_once(settings, expected):
    async with workers(settings, D, D) as [d0, d1]:
        async with session_with(d0) as session:
            await session.answer(PROMPT)
        async with session_with(d1) as session:
            answers = await asyncio.gather(
                *(
                    session.answer(PROMPT, sources=[(d0, NUM_FULL)], request_id=str(number))
                    for number in range(4)
                )
            )
        assert [answer.token_ids for answer in answers] == [expected] * 4
        assert sum(answer.end.blocks_moved for answer in answers) == NUM_FULL


async def test_a_worker_that_ends_leaves_its_hot_blocks_to_a_neighbour(settings, expected):
    async with workers(settings, D) as [stays]:
        async with workers(settings, P) as [leaves]:
            async with session_with(stays) as session:
                answer = await session.answer(PROMPT, prefill=[leaves], max_tokens=1)
                assert answer.token_ids == expected[:1]
            assert (await stays.status()).blocks.cached == 0  # the first token ended it: nothing was pulled
        assert (await stays.status()).blocks.cached == NUM_FULL
        async with session_with(stays) as session:
            answer = await session.answer(PROMPT)
        assert answer.token_ids == expected
        assert answer.end.cached_tokens == NUM_FULL * BLOCK_SIZE


async def test_the_router_names_the_worker_that_holds_the_last_turn(settings, expected):
    """A prefill worker that is new reads the conversation so far from the decode worker that had it alone."""
    router = Router(settings)
    turn = [*PROMPT, *expected, *PROMPT[:9]]
    num_cached = (len(PROMPT) + len(expected) - 1) // BLOCK_SIZE * BLOCK_SIZE
    address = await router.start()
    try:
        async with (
            grpc.aio.insecure_channel(address) as channel,
            asyncio.timeout(60),
            workers(settings, D) as [d],
        ):
            stub = inference_pb2_grpc.InferenceStub(channel)
            await _until(lambda: router.view.workers)
            assert await _answer(stub, PROMPT) == expected
            hashes = _hashes(settings, turn)
            await _until(lambda: d.worker_id in router.view.index.match(hashes))
            await _until(lambda: router.view.index.match(hashes)[d.worker_id].num_blocks > NUM_FULL)
            async with workers(settings, P) as [p]:
                await _until(lambda: p.worker_id in router.view.workers)
                await _answer(stub, turn)
                assert (await p.status()).prefill_tokens == len(turn) - num_cached
                assert (await p.metrics())[DECISION("fetch")] == 1
    finally:
        await router.stop()


async def _until(condition):
    while not condition():
        await asyncio.sleep(0.02)


async def _answer(stub, token_ids):
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(token_ids)
    request.sampling.temperature = 0
    request.sampling.max_tokens = 8
    return [token async for response in stub.Generate(request) for token in response.token_ids]


def _hashes(settings, token_ids):
    files = resolve(settings.model.ref)
    root = HashRoot(files.fingerprint, files.tokenizer_fingerprint, BLOCK_SIZE, "float32")
    return block_hashes(root, token_ids)


class _Owner:
    """A worker's KvExchange as a reader of our own sees it, by hand."""

    def __init__(self, channel, worker, reader="me"):
        self.stub = kv_pb2_grpc.KvExchangeStub(channel)
        self.incarnation = worker.incarnation
        self.reader = reader

    async def prefill(self, lease_id, ttl_s=2.0):
        request = kv_pb2.PrefillRequest(
            lease_id=lease_id,
            expected_incarnation=self.incarnation,
            token_ids=PROMPT,
            timeout_s=10,
            lease_ttl_s=ttl_s,
        )
        request.reader.incarnation = self.reader
        request.sampling.max_tokens = request.sampling.n = 1
        request.sampling.top_p = request.sampling.repetition_penalty = 1.0
        blocks = {}
        async for event in self.stub.Prefill(request, timeout=10):
            ready = event.blocks_ready
            blocks.update(zip(ready.block_ids, ready.generations, strict=True))
        return blocks

    async def release(self, lease_id, blocks=(), **changes):
        request = kv_pb2.ReleaseRequest(
            lease_id=lease_id,
            incarnation=self.incarnation,
            reader=self.reader,
            block_ids=list(blocks),
            generations=[blocks[i] for i in blocks],
        )
        for field, value in changes.items():
            setattr(request, field, value)
        await self.stub.Release(request, timeout=10)

    async def refusal(self, lease_id, *arguments, **changes):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.release(lease_id, *arguments, **changes)
        return refused.value.code().name


async def test_kv03_stale_forged_and_expired_references_are_refused_and_counted(settings):
    async with workers(settings, P) as [p], grpc.aio.insecure_channel(p.address) as channel:
        owner = _Owner(channel, p)
        assert await owner.refusal("nobody's") == "NOT_FOUND"

        blocks = await owner.prefill("mine")
        assert await owner.refusal("mine", incarnation="an earlier life") == "UNAVAILABLE"
        assert await owner.refusal("mine", reader="somebody else") == "PERMISSION_DENIED"
        assert (await p.status()).holds[0].reader == "me"
        await owner.release("mine", blocks)
        assert await owner.refusal("mine", blocks) == "NOT_FOUND"  # consumed

        blocks = await owner.prefill("another")
        wrong = {block_id: generation + 1 for block_id, generation in blocks.items()}
        assert await owner.refusal("another", wrong) == "FAILED_PRECONDITION"
        await owner.prefill("out of range")
        assert await owner.refusal("out of range", {10**6: 0}) == "FAILED_PRECONDITION"

        await owner.prefill("short", ttl_s=0.05)
        async with asyncio.timeout(10):
            while (await p.status()).holds:
                await asyncio.sleep(0.01)
        assert await owner.refusal("short") == "NOT_FOUND"

        metrics = await p.metrics()
        assert metrics[REFUSAL("unknown_lease")] == 3
        assert metrics[REFUSAL("other_reader")] == 1
        assert metrics[REFUSAL("generation")] == 2
        assert metrics[REFUSAL("incarnation")] == 1
        assert metrics["headrace_kv_expired_leases_total"] == 1


async def test_kv05_a_refused_peer_shows_in_status_metrics_and_health(settings, settings_with):
    other = settings_with(engine={"block_size_tokens": 2 * BLOCK_SIZE})
    async with workers(settings, D) as [d], workers(other, P) as [p]:
        async with asyncio.timeout(20):
            while not (refused := [peer for peer in (await d.status()).peers if peer.refusal]):
                await asyncio.sleep(0.05)
        assert refused[0].worker_id == p.worker_id
        assert "block_size_tokens" in refused[0].refusal
        metric = 'headrace_kv_refused_peers{field="block_size_tokens"}'
        async with grpc.aio.insecure_channel(d.address) as channel, asyncio.timeout(20):
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="headrace.v1.KvExchange")
            while (await health.Check(request)).status != health_pb2.HealthCheckResponse.NOT_SERVING:
                await asyncio.sleep(0.05)
        assert (await d.metrics())[metric] == 1


async def test_kv05_the_peer_that_notices_first_names_the_field_to_the_other(settings, settings_with):
    other = settings_with(engine={"kv_quantization": "int8"})
    async with workers(settings, P) as [p], workers(other, D) as [d], session_with(d) as session:
        answer = await session.answer(PROMPT, prefill=[p])
        assert answer.end.failed_attempts == 1
        assert answer.finish_reasons == {0: "length"}
        assert "dtype" in next(peer.refusal for peer in (await d.status()).peers if peer.refusal)
