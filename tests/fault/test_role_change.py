"""Workers change their roles under real requests: nothing fails, the same tokens, the cache stays."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import asynccontextmanager

import grpc
import pytest

from headrace.cluster.workers import set_role
from headrace.directory.records import Role
from headrace.errors import PeerError
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc, worker_pb2
from router.app import Router
from tests.support.fleet import workers

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


async def record_of(worker, client):
    return client.router.view.workers[worker.worker_id]


async def flip(client, worker, role, settings, **options) -> worker_pb2.SetRoleResponse:
    record = client.router.view.workers[worker.worker_id]
    answer = await set_role(record, worker_pb2.SetRoleRequest(role=role, **options), settings.rpc)
    assert answer.switch_s >= 0
    print(f"\n{worker.worker_id} to {role}: drain {answer.drain_s:.4f} s, beside {answer.switch_s:.4f} s")
    await client.sees(**{worker.worker_id.replace("-", "_"): role})
    return answer


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
