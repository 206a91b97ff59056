"""Workers change their roles under real requests: nothing fails, the same tokens, the cache stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import uuid
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from headrace.cluster.redis_server import RedisServer
from headrace.cluster.workers import set_role
from headrace.directory.records import Role
from headrace.errors import HeadraceError, PeerError
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc, worker_pb2
from router.app import Router
from router.breakers import MAX_FAILURES
from tests.support.fleet import Gate, session_with, workers
from tests.support.process_fleet import ProcessWorker
from tests.support.processes import HEADRACE

P, D = Role.PREFILL, Role.DECODE


@pytest.fixture
def settings(settings_with):
    """A cluster of its own, with room for many streams."""
    return settings_with(engine={"num_blocks": 2000}, directory={"cluster": uuid.uuid4().hex[:8]})


def request(number: int, num_tokens: int = 40) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    message = inference_pb2.GenerateRequest(sampling=sampling)
    message.token_ids.ids.extend([3 + (7 * i + 13 * number) % 200 for i in range(40)])
    return message


class Client:
    def __init__(self, router: Router, channel: grpc.aio.Channel) -> None:
        self.router = router
        self._stub = inference_pb2_grpc.InferenceStub(channel)

    async def ask(
        self, number: int, num_tokens: int = 40
    ) -> tuple[list[int], inference_pb2.GenerateResponse]:
        """Tokens, and the last message."""
        tokens: list[int] = []
        last = inference_pb2.GenerateResponse()
        async for message in self._stub.Generate(request(number, num_tokens), timeout=60):
            tokens += message.token_ids
            last = message
        return tokens, last

    async def sees(self, **roles: Role) -> None:
        """Until the router's view has these, by worker."""
        wanted = {name.replace("_", "-"): role for name, role in roles.items()}
        async with asyncio.timeout(20):
            while not self.router.ready:  # its self-test is work, too
                await asyncio.sleep(0.01)
            while True:
                known = {n: r.role for n, r in self.router.view.workers.items() if not r.draining}
                if wanted.items() <= known.items():
                    return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def fleet(settings, *roles):
    router = Router(settings)
    address = await router.start()
    try:
        async with workers(settings, *roles) as started, grpc.aio.insecure_channel(address) as channel:
            client = Client(router, channel)
            names = {f"{role}_{number}": role for number, role in enumerate(roles)}
            await client.sees(**names)
            yield client, started
    finally:
        await router.stop()


async def flip(client, worker, role, settings, **options) -> worker_pb2.SetRoleResponse:
    record = client.router.view.workers[worker.worker_id]
    answer = await set_role(record, worker_pb2.SetRoleRequest(role=role, **options), settings.rpc)
    assert answer.switch_s >= 0
    print(f"\n{worker.worker_id} to {role}: drain {answer.drain_s:.4f} s, beside {answer.switch_s:.4f} s")
    await client.sees(**{worker.worker_id.replace("-", "_"): role})
    return answer


async def load(client, until: asyncio.Event, num_streams: int = 4) -> list[tuple[int, list[int]]]:
    """Requests one after another on each of some streams, until the event. Raises what a client is told."""
    answers: list[tuple[int, list[int]]] = []

    async def stream(first: int) -> None:
        number = first
        while not until.is_set():
            tokens, _ = await client.ask(number % 8)
            answers.append((number % 8, tokens))
            number += num_streams

    await asyncio.gather(*(stream(first) for first in range(num_streams)))
    return answers


async def test_flips_under_load_cost_no_request(settings):
    """Both directions, twice: each request is answered, with the tokens of a fleet at rest."""
    async with fleet(settings, P, P, D, D) as (client, [p0, _, d2, _]):
        expected = [(await client.ask(number))[0] for number in range(8)]
        over = asyncio.Event()
        loading = asyncio.create_task(load(client, over))
        for _ in range(2):
            for worker, role in ((d2, P), (p0, D), (d2, D), (p0, P)):
                await flip(client, worker, role, settings)
                num_before = client.router.tally.requests["ok"]
                async with asyncio.timeout(20):  # it goes on in each of the states
                    while client.router.tally.requests["ok"] < num_before + 8 and not loading.done():
                        await asyncio.sleep(0.01)
        over.set()
        answers = await loading
        assert len(answers) >= 64
        assert all(tokens == expected[number] for number, tokens in answers)
        assert set(client.router.tally.requests) == {"ok"}


@pytest.mark.parametrize(("roles", "to"), [((P, D, D), P), ((P, P, D), D)])
async def test_the_cache_survives_and_stays_published(settings, roles, to):
    """What the worker held in the old role it gives to others, and uses itself, in the new one."""
    async with fleet(settings, *roles) as (client, started):
        worker = started[1]
        await client.ask(0)
        async with session_with(worker) as session:  # for it to have something in either case
            prompt = [3 + (11 * i) % 200 for i in range(60)]
            if worker.worker_id.startswith("decode"):
                await session.answer(prompt, max_tokens=4)
        if worker.worker_id.startswith("prefill"):
            async with session_with(started[2]) as session:
                await session.answer(prompt, prefill=[worker], max_tokens=4)
        blocks = (await worker.status()).blocks.cached
        assert blocks >= 15
        incarnation = worker.incarnation
        await flip(client, worker, to, settings)
        assert (await worker.status()).blocks.cached == blocks
        assert client.router.view.has(worker.worker_id, incarnation)
        assert client.router.view.index.num_entries >= blocks
        decode = worker if to is D else started[2]
        async with session_with(decode) as session:
            prefill = [worker] if to is P else []
            answer = await session.answer([*prompt, 9, 8, 7, 6, 5], prefill=prefill, max_tokens=2)
            assert answer.end.cached_tokens >= 56
            assert answer.end.failed_attempts == 0


async def test_work_for_the_old_role_is_turned_away(settings):
    """A router and a reader with an old view are told to go elsewhere."""
    async with fleet(settings, P, P, D, D) as (client, [_, p1, d2, d3]):
        expected, _ = await client.ask(0)
        prompt = list(request(0).token_ids.ids)
        async with session_with(d2) as old, session_with(d3) as other:
            await flip(client, d2, P, settings)
            await flip(client, p1, D, settings)
            answer = await old.answer(prompt)
            assert (answer.end.error_code, answer.token_ids) == ("UNAVAILABLE", [])
            async with session_with(d2) as fresh:
                assert (await fresh.answer(prompt)).end.error_code == "UNAVAILABLE"
            answer = await other.answer(prompt[::-1], prefill=[p1], request_id="o", max_tokens=8)
            assert (answer.end.failed_attempts, answer.end.prefill_worker) == (1, "")
            assert len(answer.token_ids) == 8
            assert (await other.answer(prompt, request_id="p", max_tokens=40)).token_ids == expected


@pytest.mark.parametrize("drain_timeout_s", [20.0, 0.0])
async def test_a_flip_during_a_hand_off(settings, drain_timeout_s):
    """The prompt is being computed. Given time it is finished there, else the decode worker goes on without it."""
    async with fleet(settings, P, P, D) as (client, [p0, p1, d2]), session_with(d2) as session:
        prompt = list(request(0).token_ids.ids)
        expected = (await session.answer(prompt, prefill=[p1], request_id="first")).token_ids
        gate = Gate(p0)
        answer = await session.start([*prompt[1:], 7], prefill=[p0], request_id="handed over")
        await gate.begun(1)
        flipping = asyncio.create_task(flip(client, p0, D, settings, drain_timeout_s=drain_timeout_s))
        async with asyncio.timeout(20):
            while p0.process._exchange.prefills:
                await asyncio.sleep(0.005)
        gate.open()
        change = await flipping
        async with asyncio.timeout(20):
            await answer.ended.wait()
        assert (len(answer.token_ids), answer.end.error_code) == (8, "")
        assert change.handed_back == (0 if drain_timeout_s else 1)
        assert answer.end.prefill_worker == (p0.worker_id if drain_timeout_s else "")
        async with session_with(p0) as now_decodes:
            assert (await now_decodes.answer(prompt, prefill=[p1])).token_ids == expected


async def test_what_runs_too_long_goes_on_elsewhere(settings):
    async with fleet(settings, P, D, D) as (client, [_, d1, d2]):
        expected = [(await client.ask(number, 400))[0] for number in range(6)]
        gates = [Gate(d1), Gate(d2)]
        asking = [asyncio.create_task(client.ask(number, 400)) for number in range(6)]
        for gate in gates:
            gate.allow(50)
            await gate.begun(51)
        worker = d1 if d1.process._decode.num_requests else d2
        num_running = worker.process._decode.num_requests
        assert num_running
        change = asyncio.create_task(flip(client, worker, P, settings, drain_timeout_s=0))
        assert (await change).handed_back >= num_running
        for each in gates:
            each.open()
        assert [tokens for tokens, _ in await asyncio.gather(*asking)] == expected


async def test_prompts_that_are_turned_away_are_no_reason_to_avoid_the_worker(settings):
    """More than it takes to open a breaker. It is well, and decodes."""
    async with fleet(settings, P, P, D) as (client, [p0, p1, d2]):
        numbers = range(24)
        expected = [(await client.ask(number))[0] for number in numbers]
        async with session_with(d2) as session:  # for nothing of it to be cached
            await session.answer([5] * 20)
        for worker in (p0, p1, d2):
            await worker.process._engine.call(lambda engine: engine.reset_cache())
        gates = [Gate(p0), Gate(p1)]
        asking = [asyncio.create_task(client.ask(number)) for number in numbers]
        for gate in gates:
            await gate.begun(1)
        async with asyncio.timeout(20):
            while p0.process._exchange.num_streams <= MAX_FAILURES:
                await asyncio.sleep(0.005)
        flipping = asyncio.create_task(flip(client, p0, D, settings, drain_timeout_s=0.0))
        async with asyncio.timeout(20):
            while p0.process._exchange.prefills:
                await asyncio.sleep(0.005)
        for gate in gates:
            gate.open()
        assert (await flipping).handed_back > MAX_FAILURES
        assert [tokens for tokens, _ in await asyncio.gather(*asking)] == expected
        assert client.router._breakers.state(p0.incarnation) == "closed"


async def test_without_the_directory_a_change_has_to_be_forced(settings_with):
    with RedisServer() as redis:
        settings = settings_with(engine={"num_blocks": 2000}, directory={"url": redis.url})
        async with workers(settings, P, P, D) as [p0, p1, _]:
            record = p0.process._record()
            os.kill(redis.pid, signal.SIGKILL)
            change = worker_pb2.SetRoleRequest(role=D)
            with pytest.raises(HeadraceError, match="directory at"):
                await set_role(record, change, settings.rpc)
            assert (await p0.status()).role == P
            change.force = True
            assert (await set_role(record, change, settings.rpc)).previous_role == P
            async with session_with(p0) as session:
                answer = await session.answer(list(range(3, 60)), prefill=[p1])
                assert answer.end.prefill_worker == p1.worker_id


async def refusal(client, worker, role, settings, **options) -> HeadraceError:
    with pytest.raises(HeadraceError) as caught:
        await flip(client, worker, role, settings, **options)
    return caught.value


async def test_the_last_of_its_role_stays_unless_forced(settings):
    async with fleet(settings, P, D) as (client, [p0, d1]):
        for worker, role, missing in ((p0, D, "prefills"), (d1, P, "decodes")):
            error = await refusal(client, worker, role, settings)
            assert error.code == "FAILED_PRECONDITION"
            assert f"{worker.worker_id} can not become {role}" in str(error)
            assert f"no worker that {missing}" in str(error)
            assert not (await worker.status()).draining
        expected, _ = await client.ask(0)
        await flip(client, p0, D, settings, force=True)
        assert (await client.ask(0))[0] == expected
        await flip(client, p0, P, settings)  # a pair again: nothing to force
        assert (await client.ask(1))[1].usage.completion_tokens == 40


async def test_two_that_would_leave_together_do_not(settings):
    """One at least stays, whoever asks first."""
    async with fleet(settings, P, D, D) as (client, [_, d1, d2]):
        asked = (set_role_of(client, worker, P, settings) for worker in (d1, d2))
        results = await asyncio.gather(*asked, return_exceptions=True)
        roles = [(await worker.status()).role for worker in (d1, d2)]
        assert D in roles
        refused = [result for result in results if isinstance(result, HeadraceError)]
        assert len(refused) == roles.count(D)
        assert {error.code for error in refused} == {"FAILED_PRECONDITION"}
        assert (await client.ask(0))[1].usage.completion_tokens == 40


def set_role_of(client, worker, role, settings, **options):
    record = client.router.view.workers[worker.worker_id]
    return set_role(record, worker_pb2.SetRoleRequest(role=role, **options), settings.rpc)


async def test_the_same_change_twice_is_one_and_another_one_is_refused(settings):
    async with fleet(settings, P, P, D) as (client, [p0, _, d2]), session_with(d2) as session:
        gate = Gate(p0)
        answer = await session.start(list(range(3, 60)), prefill=[p0])
        await gate.begun(1)
        first = asyncio.create_task(set_role_of(client, p0, D, settings))
        async with asyncio.timeout(20):
            while not p0.process._role.is_leaving:
                await asyncio.sleep(0.005)
        with pytest.raises(PeerError, match="is changing its role to decode"):
            await set_role_of(client, p0, P, settings)
        impatient = asyncio.create_task(set_role_of(client, p0, D, settings))
        second = asyncio.create_task(set_role_of(client, p0, D, settings))
        await asyncio.sleep(0)
        impatient.cancel()  # the others' change goes on
        gate.open()
        assert (await first) == (await second)
        async with asyncio.timeout(20):
            await answer.ended.wait()
        assert (await set_role_of(client, p0, D, settings)).previous_role == D
        stale = client.router.view.workers[p0.worker_id]
        record = replace(stale, incarnation="before")
        with pytest.raises(PeerError, match="not before"):
            await set_role(record, worker_pb2.SetRoleRequest(role=P), settings.rpc)
        with pytest.raises(PeerError, match="one of prefill, decode, both"):
            await set_role_of(client, p0, "router", settings)


async def test_a_worker_that_is_stopped_while_it_changes_ends(settings):
    async with fleet(settings, P, P, D) as (client, [p0, _, d2]), session_with(d2) as session:
        gate = Gate(p0)
        answer = await session.start(list(range(3, 60)), prefill=[p0])
        await gate.begun(1)
        changing = asyncio.create_task(set_role_of(client, p0, D, settings))
        async with asyncio.timeout(20):
            while not p0.process._role.is_leaving:
                await asyncio.sleep(0.005)
        closing = asyncio.create_task(p0.process._role.close())
        gate.open()
        await closing
        with pytest.raises(PeerError, match="keeps its role prefill"):
            await changing
        with pytest.raises(PeerError, match="about to end"):
            await set_role_of(client, p0, D, settings)
        async with asyncio.timeout(20):
            await answer.ended.wait()
        assert len(answer.token_ids) == 8


async def test_a_request_before_and_after(settings):
    async with fleet(settings, P, D, D) as (client, [_, d1, _]):
        expected, _ = await client.ask(0)
        before = await d1.status()
        answer = await flip(client, d1, P, settings)
        assert (answer.previous_role, answer.handed_back) == (D, 0)
        tokens, _ = await client.ask(0)
        assert tokens == expected
        after = await d1.status()
        assert (after.role, after.incarnation) == (P, before.incarnation)
        assert not after.draining


async def test_a_worker_that_is_killed_while_it_changes_costs_a_pause(settings_with, tmp_path):
    """As one that is killed at any other time. Its next life has the role that it is started with."""
    settings = settings_with(
        engine={"num_blocks": 2000},
        kv={"transport": "nixl", "connect_timeout_s": 1.5, "transfer_timeout_s": 1.5},
        directory={"cluster": uuid.uuid4().hex[:8], "worker_ttl_s": 2.0},
        rpc={"keepalive_s": 1.0, "keepalive_timeout_s": 1.0},
    )
    started = [ProcessWorker(settings, role, f"{role}-{n}", tmp_path) for n, role in enumerate((P, D, D))]
    router = Router(settings)
    try:
        await asyncio.gather(*(worker.start() for worker in started))
        async with grpc.aio.insecure_channel(await router.start()) as channel:
            client = Client(router, channel)
            await client.sees(prefill_0=P, decode_1=D, decode_2=D)
            expected = [(await client.ask(number, 900))[0] for number in range(4)]
            asking = [asyncio.create_task(client.ask(number, 900)) for number in range(4)]
            async with asyncio.timeout(20):
                while not (await started[1].status()).running:
                    await asyncio.sleep(0.005)
            changing = asyncio.create_task(set_role_of(client, started[1], P, settings))
            async with asyncio.timeout(20):
                while not router.view.workers["decode-1"].draining and not changing.done():
                    await asyncio.sleep(0.002)
            started[1].kill()
            assert [tokens for tokens, _ in await asyncio.gather(*asking)] == expected
            [outcome] = await asyncio.gather(changing, return_exceptions=True)
            # A change that the kill came too late for is over.
            assert isinstance(outcome, HeadraceError) or outcome.previous_role == D
            await started[1].start()
            await client.sees(decode_1=D)
            line = await asyncio.to_thread(flip_by_command, settings)
            assert line.startswith("decode-1 was decode and is prefill: drained for 0.0")
            await client.sees(decode_1=P)
            assert (await client.ask(0, 900))[0] == expected[0]
            for worker in started:
                await worker.assert_idle()
    finally:
        await router.stop()
        for worker in started:
            worker.stop()


def flip_by_command(settings) -> str:
    directory = settings.directory
    options = ("--set", f"directory.url={directory.url}", "--set", f"directory.cluster={directory.cluster}")
    done = subprocess.run(
        [str(HEADRACE), "flip", "decode-1", "--to", "prefill", *options],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout
