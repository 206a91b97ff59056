"""Whole requests, with mutual TLS on every hop and API keys at the door."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import httpx2
import pytest

from headrace.bench.certificates import Authority
from headrace.cluster.redis_server import RedisServer
from headrace.cluster.worker_process import WorkerProcess
from headrace.config import Settings
from headrace.directory.records import Role
from headrace.rpc.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    kv_pb2,
    kv_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from router.app import Router
from router.callers import make_callers
from tests.security.test_credentials import new_key
from tests.support.fleet import BLOCK_SIZE, fleet_settings

PROMPT = list(range(10, 10 + 6 * BLOCK_SIZE))
NAMES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}


@pytest.fixture(scope="module")
def redis():
    with RedisServer("a-password-of-the-directory") as server:
        yield server


class Fleet:
    def __init__(self, router: Router, authority: Authority, keys: dict[str, str]) -> None:
        self.router, self.keys = router, keys
        self.channel = grpc.aio.secure_channel(
            router.address, grpc.ssl_channel_credentials(authority.ca.read_bytes())
        )
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)

    async def ask(self, tenant: str, metadata=(), **fields) -> inference_pb2.GenerateResponse:
        """The last message."""
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=PROMPT),
            sampling=inference_pb2.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
            **fields,
        )
        metadata = (("authorization", f"Bearer {self.keys[tenant]}"), *metadata)
        call = self.stub.Generate(request, timeout=30, metadata=metadata)
        return [message async for message in call][-1]


@asynccontextmanager
async def fleet(files, url: str, folder, **changes) -> AsyncIterator[Fleet]:
    authority, keys_file = Authority(folder), folder / "keys.yaml"
    keys = {tenant: new_key(keys_file, tenant) for tenant in ("a", "b")}
    secret = folder / "secret"
    secret.write_bytes(b"s" * 32)
    base = fleet_settings(files, url, **changes)

    def of(member) -> Settings:
        security = {"api_keys_file": keys_file, "cache_secret_file": secret}
        sections = base.model_dump()
        sections["rpc"]["tls"] = member.tls()
        sections["security"].update(security)
        return Settings.model_validate(sections)

    started: list = [
        WorkerProcess(of(authority.member("worker", name=name)), role, name) for name, role in NAMES.items()
    ]
    router = Router(of(authority.member("router")))
    try:
        await asyncio.gather(*(worker.start() for worker in started))
        await router.start()
        started.append(router)
        async with asyncio.timeout(20):
            while not (router.ready and len(router.view.workers) == len(NAMES)):
                await asyncio.sleep(0.05)
        found = Fleet(router, authority, keys)
        found.authority, found.callers = authority, make_callers(of(authority.member("router")).security)
        try:
            yield found
        finally:
            await found.channel.close()
    finally:
        await asyncio.gather(*(process.stop() for process in reversed(started)))


@pytest.mark.parametrize("transport", ["local", "nixl"])
async def test_a_request_passes_all_hops_under_mutual_tls(tiny_model_files, redis, tmp_path, transport):
    async with fleet(tiny_model_files, redis.url, tmp_path, kv={"transport": transport}) as cluster:
        answer = await cluster.ask("a")
        assert answer.usage.completion_tokens == 4
        assert answer.hand_off.prefill_worker == "prefill-0"
        assert answer.hand_off.blocks_moved > 0
        for key in ("", "Bearer hr_000000000000_x"):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await cluster.stub.ListModels(
                    inference_pb2.ListModelsRequest(), metadata=(("authorization", key),), timeout=5
                )
            assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_http_has_the_same_certificate_and_the_same_keys(tiny_model_files, redis, tmp_path):
    async with fleet(tiny_model_files, redis.url, tmp_path) as cluster:
        url = cluster.router.http_address
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=cluster.authority.ca)
        async with httpx2.AsyncClient(base_url=url, verify=trusting) as client:
            key = {"authorization": f"Bearer {cluster.keys['a']}"}
            assert (await client.get("/v1/models", headers=key)).status_code == 200
            assert (await client.get("/v1/models")).status_code == 401
            assert (await client.get("/v1/models", headers={"authorization": "Bearer x"})).status_code == 401
        with pytest.raises(httpx2.ConnectError):
            async with httpx2.AsyncClient(base_url=url) as stranger:
                await stranger.get("/v1/models")


async def test_pc03_tenants_never_hit_each_others_blocks(tiny_model_files, redis, tmp_path):
    async with fleet(tiny_model_files, redis.url, tmp_path) as cluster:
        cached = [(await cluster.ask(tenant)).usage.cached_tokens for tenant in ("a", "a", "b")]
        assert cached[0] == cached[2] == 0 < cached[1]
        # Whatever b says of its salt, by field, metadata or the very salt that a's blocks have, finds nothing of a's.
        of_a = (await cluster.callers.caller(f"Bearer {cluster.keys['a']}")).cache_salt
        for salt in ("a", of_a, f'["{of_a}", ""]'):
            found = await cluster.ask(
                "b", cache_salt=salt, metadata=(("cache_salt", of_a), ("x-tenant", "a"))
            )
            assert found.usage.cached_tokens == 0, salt
        assert (await cluster.ask("b")).usage.cached_tokens == cached[1]  # b's own
        # a's own field divides what is a's; left out, all of it is there as before.
        assert (await cluster.ask("a", cache_salt="x")).usage.cached_tokens == 0
        assert (await cluster.ask("a")).usage.cached_tokens == cached[1]


async def test_limits_are_those_of_the_authenticated_tenant(tiny_model_files, redis, tmp_path):
    """No request of b may wait or run beside another; a is not told apart from others."""
    tenants = {"b": {"max_running": 1, "max_queued_requests": 0}}
    async with fleet(tiny_model_files, redis.url, tmp_path, router={"tenants": tenants}) as cluster:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=PROMPT),
            sampling=inference_pb2.SamplingParams(max_tokens=100, temperature=0, ignore_eos=True),
        )
        metadata = (("authorization", f"Bearer {cluster.keys['b']}"),)
        running = cluster.stub.Generate(request, timeout=60, metadata=metadata)
        await running.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await cluster.ask("b")
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "'b'" in error.value.details()
        assert (await cluster.ask("a")).usage.completion_tokens == 4
        running.cancel()


# --- leases


@asynccontextmanager
async def exchange_with(address: str, files) -> AsyncIterator[kv_pb2_grpc.KvExchangeStub]:
    credentials = grpc.ssl_channel_credentials(*files.read())
    options = [
        ("grpc.ssl_target_name_override", "worker.default.headrace.internal"),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        yield kv_pb2_grpc.KvExchangeStub(channel)


async def denied(call) -> bool:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        assert error.code() == grpc.StatusCode.PERMISSION_DENIED, error.details()
        return True
    return False


async def test_a_lease_is_its_readers_whatever_a_third_worker_says(tiny_model_files, redis, tmp_path):
    """The thief knows everything: the lease's id, the reader's name and incarnation. It has a worker's certificate."""
    async with fleet(tiny_model_files, redis.url, tmp_path) as cluster:
        await cluster.ask("a")
        records = {record.worker_id: record for record in cluster.router.view.workers.values()}
        owner, reader = records["prefill-0"], records["decode-0"]
        victim = worker_pb2.PeerRef(
            worker_id="decode-0", address=reader.address, incarnation=reader.incarnation
        )
        lease = {"lease_id": "the-lease", "expected_incarnation": owner.incarnation, "lease_ttl_s": 30.0}
        names = [name for name, _ in await snapshot(redis.url, owner)]
        thief_files = cluster.authority.member("worker", name="thief")
        nameless = cluster.authority.member("worker", file="nameless")
        async with (
            exchange_with(owner.address, cluster.authority.member("worker", name="decode-0")) as good,
            exchange_with(owner.address, thief_files) as thief,
            exchange_with(owner.address, nameless) as stranger,
        ):
            held = await good.Lease(kv_pb2.LeaseRequest(reader=victim, names=names, **lease), timeout=5)
            assert held.block_ids
            renew = kv_pb2.RenewRequest(
                lease_id="the-lease", incarnation=owner.incarnation, reader=victim.incarnation
            )
            release = kv_pb2.ReleaseRequest(
                lease_id="the-lease", incarnation=owner.incarnation, reader=victim.incarnation
            )
            for other in (thief, stranger):
                assert await denied(other.Renew(renew, timeout=5))
                assert await denied(other.Release(release, timeout=5))
                assert await denied(
                    other.Lease(kv_pb2.LeaseRequest(reader=victim, names=names, **lease), timeout=5)
                )
                prefill = other.Prefill(
                    kv_pb2.PrefillRequest(
                        lease_id="l2", reader=victim, expected_incarnation=owner.incarnation, lease_ttl_s=1
                    ),
                    timeout=5,
                )
                assert await denied(prefill.read())
                for claimed in (
                    victim,
                    worker_pb2.PeerRef(worker_id="thief", incarnation=victim.incarnation),
                ):
                    shake = kv_pb2.HandshakeRequest(self=claimed, expected_incarnation=owner.incarnation)
                    assert await denied(other.Handshake(shake, timeout=5))
            await good.Renew(renew, timeout=5)
            await good.Release(release, timeout=5)


async def snapshot(url: str, record):
    from headrace.config import DirectorySettings
    from headrace.directory.redis_directory import RedisDirectory

    directory = RedisDirectory(DirectorySettings(url=url))
    try:
        async with asyncio.timeout(10):
            while True:
                found = await directory.blocks(record.worker_id, record.incarnation)
                if found is not None and found.blocks:
                    return list(found.blocks.items())
                await asyncio.sleep(0.05)
    finally:
        await directory.close()


async def test_a_client_with_a_certificate_can_not_open_a_session(tiny_model_files, redis, tmp_path):
    async with fleet(tiny_model_files, redis.url, tmp_path) as cluster:
        worker = next(r for r in cluster.router.view.workers.values() if r.role == Role.DECODE)
        client = cluster.authority.issue("client")
        options = [("grpc.ssl_target_name_override", "worker.default.headrace.internal")]
        credentials = grpc.ssl_channel_credentials(*client.read())
        async with grpc.aio.secure_channel(worker.address, credentials, options=options) as channel:
            assert await denied(worker_pb2_grpc.WorkerStub(channel).Session(timeout=5).read())
