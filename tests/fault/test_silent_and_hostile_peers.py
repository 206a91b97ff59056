"""Workers that answer nothing, answer nonsense, or ask for it: whoever depends on them gets the same tokens."""

from __future__ import annotations

import asyncio
import socket
import threading

import grpc
import pytest

from headrace.cluster.redis_server import RedisServer
from headrace.directory.records import Role
from headrace.errors import TransferFailed
from headrace.rpc.v1 import kv_pb2, kv_pb2_grpc, worker_pb2
from tests.support.fleet import STEP_TOKENS, fleet_settings, session_with, workers

P, D = Role.PREFILL, Role.DECODE
PROMPT = [3 + (7 * i) % 200 for i in range(5 * STEP_TOKENS + 3)]


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


class _Gated:
    """A model that computes nothing until the gate opens."""

    def __init__(self, runner):
        self._runner = runner
        self.gate = threading.Event()
        self.entered = threading.Event()

    def run(self, plan):
        self.entered.set()
        assert self.gate.wait(30)
        return self._runner.run(plan)


@pytest.fixture
def black_hole():
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def test_a_prefill_worker_whose_engine_hangs_before_the_prompt_starts(settings, expected):
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        gate = threading.Event()
        p.process._engine.post(lambda engine: gate.wait(30))
        try:
            answer = await session.answer(PROMPT, prefill=[p], timeout_s=6.0)
        finally:
            gate.set()
        assert (answer.token_ids, answer.end.error_code) == (expected, "")
        assert answer.end.failed_attempts == 1


async def test_a_prefill_worker_whose_engine_hangs_once_the_prompt_has_started(settings_with, expected):
    """It answers no renewal either, so that nothing is pulled: the silence of its stream has to count."""
    settings = settings_with(kv={"progress_timeout_s": 1.0})
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        core = p.process._core
        core._runner = hanging = _Gated(core._runner)
        try:
            answer = await session.answer(PROMPT, prefill=[p], timeout_s=20.0)
            assert hanging.entered.is_set()
        finally:
            hanging.gate.set()
        assert (answer.token_ids, answer.end.error_code) == (expected, "")
        assert answer.end.failed_attempts == 1
        metrics = await d.metrics()
        assert metrics['headrace_kv_failures_total{reason="no_progress"}'] == 1


async def test_a_prefill_worker_that_does_not_shake_hands(settings, expected, black_hole):
    """The handshake could take its usual 5 s, the request has 4: there is time left to compute the prompt here."""
    async with workers(settings, D) as [d], session_with(d) as session:
        silent = _Named("silent", black_hole)
        answer = await session.answer(PROMPT, prefill=[silent], timeout_s=4.0)
        assert (answer.token_ids, answer.end.error_code) == (expected, "")


async def test_a_source_that_does_not_shake_hands(settings, expected, black_hole):
    async with workers(settings, D) as [d], session_with(d) as session:
        silent = _Named("silent", black_hole)
        answer = await session.answer(PROMPT, sources=[(silent, 10), (silent, 10)], timeout_s=4.0)
        assert (answer.token_ids, answer.end.error_code) == (expected, "")


class _Named:
    """A worker by name only."""

    def __init__(self, worker_id, address, incarnation="of old"):
        self.ref = worker_pb2.PeerRef(worker_id=worker_id, address=address, incarnation=incarnation)


async def test_kv04_an_old_name_of_a_live_peer_disturbs_none_of_its_reads(settings, expected):
    """A router that has not noticed a restart names the incarnation before; the one of now goes on."""
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        d.faults.stall = True
        under_way = await session.start(PROMPT, prefill=[p], request_id="under way")
        async with asyncio.timeout(10):
            while not (await d.status()).blocks.filling:
                await asyncio.sleep(0.01)
        stale = _Named(p.worker_id, p.address)
        other = await session.answer(PROMPT[::-1], prefill=[stale], request_id="other")
        assert other.end.failed_attempts == 1
        d.faults.stall = False
        async with asyncio.timeout(20):
            await under_way.ended.wait()
        assert under_way.token_ids == expected
        assert under_way.end.failed_attempts == 0


async def test_a_lease_id_that_is_in_use_harms_nobody(settings, expected):
    """Whoever comes second is refused; the prompt and the blocks of the first go on as they were."""
    async with workers(settings, P) as [p], grpc.aio.insecure_channel(p.address) as channel:
        stub = kv_pb2_grpc.KvExchangeStub(channel)
        core = p.process._core
        core._runner = hanging = _Gated(core._runner)
        try:
            first = stub.Prefill(_prefill(p, "one"), timeout=20)
            assert (await first.read()).HasField("started")
            second = stub.Prefill(_prefill(p, "one"), timeout=20)
            hanging.gate.set()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await second.read()
            assert refused.value.code() == grpc.StatusCode.ALREADY_EXISTS
        finally:
            hanging.gate.set()
        while (event := await first.read()) is not grpc.aio.EOF:
            last = event
        assert last.first_token.token_id == expected[0]
        release = kv_pb2.ReleaseRequest(lease_id="one", incarnation=p.incarnation, reader="me")
        await stub.Release(release, timeout=5)


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0])
async def test_ha01_times_that_are_none_are_refused(settings, timeout_s):
    async with workers(settings, P, D) as [p, d], grpc.aio.insecure_channel(p.address) as channel:
        stub = kv_pb2_grpc.KvExchangeStub(channel)
        offer = kv_pb2.OfferRequest(owner=d.ref, expected_incarnation=p.incarnation, timeout_s=timeout_s)
        offer.blocks.add(digest=bytes(16), parent_digest=bytes(16))
        calls = (stub.Prefill(_prefill(p, "one", timeout_s=timeout_s)).read(), stub.Offer(offer))
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "timeout_s" in refused.value.details()
        async with session_with(d) as session:
            answer = await session.answer(PROMPT, timeout_s=timeout_s)
            assert answer.end.error_code == "INVALID_ARGUMENT"
            assert "timeout_s" in answer.end.error_message


@pytest.mark.parametrize("choices", [[7], [0, 0]])
async def test_first_tokens_of_choices_that_nobody_asked_for(settings, expected, choices):
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        exchange = p.process._exchange
        follow = exchange._follow

        async def spoiled(*arguments, **options):
            async for message in follow(*arguments, **options):
                if not message.HasField("first_token"):
                    yield message
                    continue
                for choice in choices:
                    token = kv_pb2.FirstToken(token_id=message.first_token.token_id, choice=choice)
                    yield kv_pb2.PrefillEvent(first_token=token)

        exchange._follow = spoiled
        num_choices = 1 if len(choices) == 1 else 2
        answer = await session.answer(PROMPT, prefill=[p], n=num_choices)
        assert {choice: list(tokens) for choice, tokens in answer.choices.items()} == dict.fromkeys(
            range(num_choices), expected
        )
        assert answer.end.failed_attempts == 1


async def test_a_transport_that_hangs_gives_the_blocks_back_when_it_goes_on(settings_with, monkeypatch):
    """The command that tears the peer down times out; the blocks under the READ wait for as long as it takes."""
    monkeypatch.setattr("kv_transfer.transfer_thread._COMMAND_TIMEOUT_S", 0.2)
    settings = settings_with(kv={"lease_ttl_s": 0.5, "transfer_timeout_s": 0.2})
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        gate = threading.Event()
        transport = d.process._transfers._transport
        disconnect = transport.disconnect
        timed_out = asyncio.Event()
        tear_down = d.process._transfers.disconnect

        async def noted(peer):
            try:
                await tear_down(peer)
            except TransferFailed:
                timed_out.set()
                raise

        d.process._transfers.disconnect = noted

        def hang(peer):
            assert gate.wait(30)
            disconnect(peer)

        transport.disconnect = hang
        d.faults.stall = True
        try:
            answer = await session.answer(PROMPT, prefill=[p])
            assert answer.end.failed_attempts == 1
            async with asyncio.timeout(10):
                await timed_out.wait()
            assert (await d.status()).blocks.quarantined
        finally:
            gate.set()
            d.faults.stall = False


def _prefill(worker, lease_id, timeout_s=20.0):
    request = kv_pb2.PrefillRequest(
        lease_id=lease_id,
        expected_incarnation=worker.incarnation,
        token_ids=PROMPT,
        timeout_s=timeout_s,
        lease_ttl_s=10.0,
    )
    request.reader.incarnation = "me"
    request.sampling.max_tokens = request.sampling.n = 1
    request.sampling.top_p = request.sampling.repetition_penalty = 1.0
    return request
