"""Mutual TLS between processes: who gets in, with real servers and real certificates."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.bench.certificates import DAY, Authority, Files
from headrace.config import RpcSettings, SecuritySettings
from headrace.errors import InvalidRequest
from headrace.rpc.channel import open_channel
from headrace.rpc.server import RpcServer
from headrace.rpc.tls import CALLER, Identity, Part, cluster_certificates, front_door_context
from headrace.rpc.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    kv_pb2,
    kv_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

WORKER_NAME = "worker.default.headrace.internal"


class Worker(worker_pb2_grpc.WorkerServicer, kv_pb2_grpc.KvExchangeServicer):
    async def Status(self, request, context):
        return worker_pb2.StatusResponse(worker_id=str(CALLER.get()))

    async def Session(self, request_iterator, context):
        yield worker_pb2.StepFrame(incarnation=str(CALLER.get()))
        async for _ in request_iterator:
            yield worker_pb2.StepFrame()

    async def Renew(self, request, context):
        return kv_pb2.RenewResponse()


class Front(inference_pb2_grpc.InferenceServicer):
    async def ListModels(self, request, context):
        return inference_pb2.ListModelsResponse()


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@asynccontextmanager
async def worker_at(files: Files):
    server = RpcServer(RpcSettings.model_validate({"tls": files.tls()}), [])
    worker_pb2_grpc.add_WorkerServicer_to_server(Worker(), server.grpc_server)
    kv_pb2_grpc.add_KvExchangeServicer_to_server(Worker(), server.grpc_server)
    try:
        yield await server.start()
    finally:
        await server.stop(0)


def channel_of(address: str, files: Files | None, name: str = WORKER_NAME, ca=None) -> grpc.aio.Channel:
    """As anybody could open one."""
    if files is None and ca is None:
        return grpc.aio.insecure_channel(address)
    credentials = grpc.ssl_channel_credentials(ca.read_bytes() if ca else files.ca.read_bytes())
    if files is not None:
        _, key, cert = files.read()
        root = ca.read_bytes() if ca else files.ca.read_bytes()
        credentials = grpc.ssl_channel_credentials(root, key, cert)
    options = [("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(address, credentials, options=options if name else options[1:])


async def outcome(call) -> str:
    """ "OK", or the name of the status."""
    try:
        if hasattr(call, "read"):
            await call.read()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def outcomes(channel: grpc.aio.Channel) -> dict[str, str]:
    worker, exchange = worker_pb2_grpc.WorkerStub(channel), kv_pb2_grpc.KvExchangeStub(channel)
    return {
        "Session": await outcome(worker.Session(timeout=5)),
        "Status": await outcome(worker.Status(worker_pb2.StatusRequest(), timeout=5)),
        "Renew": await outcome(exchange.Renew(kv_pb2.RenewRequest(), timeout=5)),
        "health": await outcome(
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        ),
    }


@pytest.mark.parametrize(
    ("role", "cluster", "allowed"),
    [
        ("router", "default", {"Session", "Status", "health"}),
        ("worker", "default", {"Renew", "health"}),
        ("operator", "default", {"Status", "health"}),
        ("router", "other", {"health"}),
        ("worker", "other", {"health"}),
        ("client", "default", {"health"}),  # no role of ours
    ],
)
async def test_a_certificate_of_the_authority_is_good_for_its_role_only(authority, role, cluster, allowed):
    caller = authority.member(role, cluster, file="caller")
    async with worker_at(authority.member("worker")) as address, channel_of(address, caller) as channel:
        found = await outcomes(channel)
    assert {name for name, status in found.items() if status == "OK"} == allowed
    assert {status for name, status in found.items() if name not in allowed} <= {"PERMISSION_DENIED"}


@pytest.mark.parametrize("who", ["plaintext", "no certificate", "another authority", "expired"])
async def test_strangers_do_not_even_get_the_health(authority, tmp_path, who):
    (tmp_path / "other").mkdir()
    stranger = {
        "plaintext": None,
        "no certificate": None,
        "another authority": Authority(tmp_path / "other").member("router"),
        "expired": authority.member("router", file="late", valid_for=-DAY),
    }[who]
    ca = None if who == "plaintext" else authority.ca
    async with (
        worker_at(authority.member("worker")) as address,
        channel_of(address, stranger, ca=ca) as channel,
        channel_of(address, authority.member("router")) as good,
    ):
        assert set((await outcomes(channel)).values()) == {"UNAVAILABLE"}
        assert (await outcomes(good))["Session"] == "OK"


@pytest.mark.parametrize("impostor", ["client", "router", "another cluster", "another authority"])
async def test_a_channel_of_ours_talks_to_workers_of_its_cluster_only(authority, tmp_path, impostor):
    """Whoever can write into the directory can give any address: what answers there has to be a worker."""
    (tmp_path / "other").mkdir()
    files = {
        "client": lambda: authority.issue(
            "i", names=["localhost"], uris=["spiffe://headrace/default/worker"]
        ),
        "router": lambda: authority.member("router", file="i"),
        "another cluster": lambda: authority.member("worker", "other", file="i"),
        "another authority": lambda: Authority(tmp_path / "other").member("worker"),
    }[impostor]()
    rpc = RpcSettings.model_validate({"tls": authority.member("router").tls()})
    for server, reachable in ((files, False), (authority.member("worker"), True)):
        async with worker_at(server) as address, open_channel(address, rpc) as channel:
            session = worker_pb2_grpc.WorkerStub(channel).Session(timeout=5)
            assert (await outcome(session) == "OK") == reachable


async def test_new_connections_get_the_new_certificate_and_old_streams_go_on(authority):
    files = authority.member("worker")
    router = authority.member("router")
    rpc = RpcSettings.model_validate({"tls": router.tls()})
    async with worker_at(files) as address, open_channel(address, rpc) as channel:
        session = worker_pb2_grpc.WorkerStub(channel).Session()
        await session.read()
        before = await asyncio.to_thread(served_certificate, address, router)
        authority.member("worker")  # the same files, anew
        authority.member("router")
        after = await asyncio.to_thread(served_certificate, address, router)
        assert before != after == ssl.PEM_cert_to_DER_cert(files.cert.read_text())
        async with open_channel(address, rpc) as renewed:
            assert await outcome(worker_pb2_grpc.WorkerStub(renewed).Session(timeout=5)) == "OK"
        assert cluster_certificates(rpc.tls).get().chain == router.cert.read_bytes()
        await session.write(worker_pb2.SessionRequest())
        assert isinstance(await session.read(), worker_pb2.StepFrame)
        session.cancel()


async def test_half_a_rotation_changes_nothing(authority, tmp_path):
    """The certificate is there and its key is not yet: what served before serves on."""
    files, router = authority.member("worker"), authority.member("router")
    newer = authority.member("worker", file="newer")
    async with worker_at(files) as address:
        before = await asyncio.to_thread(served_certificate, address, router)
        files.cert.write_bytes(newer.cert.read_bytes())
        assert await asyncio.to_thread(served_certificate, address, router) == before
        files.key.write_bytes(newer.key.read_bytes())
        assert await asyncio.to_thread(served_certificate, address, router) != before


def test_files_that_can_not_serve_are_named_at_the_start(authority, tmp_path):
    good = authority.member("worker")
    cases = {
        "expired": authority.member("worker", file="late", valid_for=-DAY).tls(),
        "is not the key of": {**good.tls(), "key_file": str(authority.member("worker", file="b").key)},
        "No such file": {**good.tls(), "cert_file": str(tmp_path / "none")},
        "CLUSTER/ROLE": authority.issue("roleless", names=["localhost"]).tls(),
    }
    for message, tls in cases.items():
        with pytest.raises(InvalidRequest, match=message):
            RpcServer(RpcSettings.model_validate({"tls": tls}), [])
    with pytest.raises(ValueError, match="key_file must be set, too"):
        RpcSettings.model_validate({"tls": {**good.tls(), "key_file": None}})


@pytest.mark.parametrize(
    "uri", ["spiffe://headrace/a", "spiffe://x/a/worker", "spiffe://headrace/a/root", ""]
)
def test_other_names_are_no_identity(uri):
    assert Identity.from_uri(uri) is None


def test_identities_are_read_as_they_are_written():
    identity = Identity("c", Part.WORKER, "decode-0")
    assert Identity.from_uri(str(identity)) == identity


@asynccontextmanager
async def front_at(rpc: RpcSettings, security: SecuritySettings):
    server = RpcServer(rpc, [], front=security)
    inference_pb2_grpc.add_InferenceServicer_to_server(Front(), server.grpc_server)
    try:
        yield await server.start()
    finally:
        await server.stop(0)


async def test_the_front_door_asks_clients_for_certificates_where_it_is_told_to(authority, tmp_path):
    (tmp_path / "clients").mkdir()
    clients = Authority(tmp_path / "clients", "clients")
    own = authority.issue("front")
    for client_ca, client, expected in (
        (None, None, "OK"),
        (clients.ca, None, "UNAVAILABLE"),
        (clients.ca, clients.issue("alice"), "OK"),
        (clients.ca, authority.issue("bob"), "UNAVAILABLE"),
    ):
        security = SecuritySettings(
            front_cert_file=own.cert, front_key_file=own.key, client_ca_file=client_ca
        )
        async with (
            front_at(RpcSettings(), security) as address,
            channel_of(address, client, name="", ca=authority.ca) as channel,
        ):
            stub = inference_pb2_grpc.InferenceStub(channel)
            assert await outcome(stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5)) == expected


async def test_a_client_sees_when_the_name_does_not_fit(authority):
    own = authority.issue("front", names=["api.example.org"], addresses=())
    security = SecuritySettings(front_cert_file=own.cert, front_key_file=own.key)
    async with front_at(RpcSettings(), security) as address:
        for name, expected in (("api.example.org", "OK"), ("", "UNAVAILABLE")):
            async with channel_of(address, None, name=name, ca=authority.ca) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                assert (
                    await outcome(stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5)) == expected
                )


async def test_the_context_for_http_follows_the_files(authority):
    files = authority.issue("front")
    security = SecuritySettings(front_cert_file=files.cert, front_key_file=files.key)
    context = front_door_context(RpcSettings(), security)

    async def on_connection(reader, writer):
        writer.write(await reader.readline())
        await writer.drain()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0, ssl=context)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        trusting = ssl.create_default_context(cafile=files.ca)
        reader, writer = await asyncio.open_connection(*address.split(":"), ssl=trusting)
        before = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        authority.issue("front")
        after = await asyncio.to_thread(served_certificate, address, files)
        assert before != after == ssl.PEM_cert_to_DER_cert(files.cert.read_text())
        writer.write(b"still here\n")
        assert await reader.readline() == b"still here\n"
        writer.close()
        await writer.wait_closed()


def test_no_certificate_no_context():
    assert front_door_context(RpcSettings(), SecuritySettings()) is None


def served_certificate(address: str, files: Files) -> bytes:
    host, port = address.split(":")
    context = ssl.create_default_context(cafile=files.ca)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        context.load_cert_chain(files.cert, files.key)
        with context.wrap_socket(connection) as secured:
            return secured.getpeercert(binary_form=True)
