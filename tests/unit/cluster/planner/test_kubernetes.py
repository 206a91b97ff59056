"""The Kubernetes actuator against a small API server over TLS that holds the requests to what the real one asks for."""

from __future__ import annotations

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headrace.bench.certificates import Authority
from headrace.cluster.planner.kubernetes import Api, KubernetesActuator
from headrace.directory.records import Role
from headrace.errors import InvalidRequest, NotFound, Unavailable

PATH = "/apis/apps/v1/namespaces/llm/statefulsets/"


class FakeApi(BaseHTTPRequestHandler):
    """Scales of StatefulSets: autoscaling/v1, merge patches, resource versions."""

    def do_GET(self):
        self.answer()

    def do_PATCH(self):
        self.answer()

    def answer(self):
        server = self.server
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        server.asked.append((self.command, self.path, dict(self.headers), body))
        if self.headers["authorization"] != f"Bearer {server.token}":
            return self.say(401, {"kind": "Status", "message": "Unauthorized"})
        name = self.path.removeprefix(PATH).removesuffix("/scale")
        if self.path != f"{PATH}{name}/scale" or name not in server.replicas:
            return self.say(404, {"kind": "Status", "message": f'statefulsets "{name}" not found'})
        if self.command == "PATCH":
            if self.headers["content-type"] != "application/merge-patch+json":
                return self.say(415, {"kind": "Status", "message": "unsupported media type"})
            patch = json.loads(body)
            assert patch.keys() == {"metadata", "spec"}
            if patch["metadata"]["resourceVersion"] != str(server.version):
                return self.say(409, {"kind": "Status", "message": "the object has been modified"})
            server.replicas[name] = patch["spec"]["replicas"]
            server.version += 1
        scale = {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": name, "namespace": "llm", "resourceVersion": str(server.version)},
            # A set of none has no field at all, as in protobuf.
            "spec": {"replicas": server.replicas[name]} if server.replicas[name] else {},
            "status": {"replicas": server.replicas[name]},
        }
        if server.meddles:
            server.version += 1
        return self.say(200, scale)

    def say(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def account(tmp_path):
    """What Kubernetes mounts into each pod."""
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    (folder / "namespace").write_text("llm")
    (folder / "token").write_text("first\n")
    return folder


@pytest.fixture
def server(tmp_path, account):
    files = Authority(tmp_path).member("router")
    (account / "ca.crt").write_bytes(files.ca.read_bytes())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeApi)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.daemon_threads = True
    server.replicas, server.asked, server.token = {"p": 2, "d": 3}, [], "first"
    server.version, server.meddles = 7, False
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
async def actuator(server, account):
    actuator = KubernetesActuator(Api.of_pod("127.0.0.1", str(server.server_port), account), "p", "d")
    yield actuator
    await actuator.close()


async def test_sets_are_scaled_by_merge_patches_of_their_scale(server, actuator):
    await actuator.add(Role.PREFILL)
    assert server.replicas == {"p": 3, "d": 3}
    command, path, headers, body = server.asked[-1]
    assert (command, path) == ("PATCH", "/apis/apps/v1/namespaces/llm/statefulsets/p/scale")
    assert headers["content-type"] == "application/merge-patch+json"
    assert json.loads(body) == {"metadata": {"resourceVersion": "7"}, "spec": {"replicas": 3}}
    await actuator.remove("d-2")
    assert server.replicas == {"p": 3, "d": 2}


async def test_the_last_pods_can_be_removed_and_no_others(server, actuator):
    assert await actuator.removable() == {"p-1", "d-2"}
    server.replicas["p"] = 0
    assert await actuator.removable() == {"d-2"}
    await actuator.add(Role.PREFILL)
    assert server.replicas["p"] == 1
    for worker_id in ("d-1", "d-3", "other-0", "d", "d-x"):
        with pytest.raises(NotFound, match="is no"):
            await actuator.remove(worker_id)
    assert server.replicas == {"p": 1, "d": 3}


async def test_a_new_token_is_used_and_refusals_are_told(server, actuator, account):
    server.token = "second"
    with pytest.raises(Unavailable, match="401 Unauthorized"):
        await actuator.removable()
    (account / "token").write_text("second")
    assert await actuator.removable()
    server.meddles = True  # somebody changes the set between our look and our word
    with pytest.raises(Unavailable, match="409 the object has been modified"):
        await actuator.add(Role.DECODE)
    assert server.replicas == {"p": 2, "d": 3}
    del server.replicas["d"]
    server.meddles = False
    with pytest.raises(Unavailable, match='404 statefulsets "d" not found'):
        await actuator.add(Role.DECODE)


async def test_an_api_that_is_away_or_a_stranger_is_unavailable(server, account, tmp_path):
    (tmp_path / "strangers").mkdir()
    stranger = Authority(tmp_path / "strangers").member("router")
    (account / "ca.crt").write_bytes(stranger.ca.read_bytes())
    for port in (server.server_port, 1):
        actuator = KubernetesActuator(Api.of_pod("127.0.0.1", str(port), account), "p", "d")
        with pytest.raises(Unavailable, match="Kubernetes, GET"):
            await actuator.removable()
        await actuator.close()
    assert server.asked == []


def test_outside_of_a_pod_it_says_what_is_missing(account, tmp_path):
    with pytest.raises(InvalidRequest, match="service account's token"):
        Api.of_pod("10.0.0.1", "443", tmp_path / "nothing")
    with pytest.raises(InvalidRequest, match="KUBERNETES_SERVICE_HOST"):
        Api.of_pod("", "", account)
    assert Api.of_pod("fd00::1", "443", account).url == "https://[fd00::1]:443"
