"""SIGTERM on each kind of process under load, as a supervisor sends it: it ends, and no client notices."""

from __future__ import annotations

import signal
import threading
import uuid

import grpc
import pytest

from headrace.cluster.redis_server import RedisServer
from headrace.rpc.v1 import inference_pb2_grpc
from tests.support.load import load_on
from tests.support.processes import Process, ask, eventually, request, tokens, worker_status
from tests.support.tiny_llama import write_tiny_llama

PROMPT = [3 + (7 * i) % 200 for i in range(300)]
ENOUGH = 30  # answers after a signal


class Fleet:
    """A router, a prefill worker and two decode workers."""

    def __init__(self, folder, url, model):
        self.folder = folder
        self.settings = [
            f"model.ref={model}",
            "model.dtype=float32",
            f"directory.url={url}",
            f"directory.cluster={uuid.uuid4().hex[:8]}",
            "engine.block_size_tokens=16",
            "engine.num_blocks=256",
            "engine.num_threads=1",
            "directory.worker_ttl_s=2",
        ]
        self.router = self.start("router", "router")
        self.workers = {
            name: self.start(name.partition("-")[0], name) for name in ("prefill-0", "decode-0", "decode-1")
        }
        for process in (*self.workers.values(), self.router):
            process.wait_until_serving()

    def start(self, kind, name):
        options = [part for setting in self.settings for part in ("--set", setting)]
        return Process([kind, *options, *([] if kind == "router" else ["--id", name])], self.folder, name)

    def stop(self):
        for process in (self.router, *self.workers.values()):
            process.stop()


@pytest.fixture
def fleet(tmp_path):
    with RedisServer() as redis:
        fleet = Fleet(tmp_path, redis.url, write_tiny_llama(tmp_path / "model"))
        try:
            yield fleet
        finally:
            fleet.stop()


@pytest.mark.timeout(300)
def test_processes_told_to_end_under_load_lose_nothing(fleet):
    """The prefill worker, one of two decode workers, the router: each has work, and finishes it."""
    with load_on(fleet.router.address, num_clients=6) as load:
        for name, work in (("prefill-0", "prefill_tokens"), ("decode-0", "output_tokens")):
            worker = fleet.workers[name]
            before = getattr(worker_status(worker.address), work)
            eventually(lambda: getattr(worker_status(worker.address), work) > before, f"{name} works")  # noqa: B023
            worker.popen.send_signal(signal.SIGTERM)
            assert worker.popen.wait(60) == 0, worker.log.read_text()[-2000:]
            goal = load.num_right + ENOUGH
            eventually(lambda: load.num_right >= goal, load.figures())  # noqa: B023
        load.assert_nothing_lost(2 * ENOUGH)
        print(f"\ntwo workers told to end: {load.figures()}")
    log = fleet.workers["decode-0"].log.read_text()
    assert "cached blocks left to a neighbour" in log
    assert "drain ran out of time" not in log
    _the_router_finishes_what_it_has(fleet.router)


def _the_router_finishes_what_it_has(router):
    """And refuses what is new."""
    expected = tokens(ask(router.address, PROMPT, max_tokens=400))
    answers = {}
    begun = [threading.Event() for _ in range(4)]

    def client(number):
        with grpc.insecure_channel(router.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            messages = []
            for message in stub.Generate(request(PROMPT, max_tokens=400), timeout=60):
                messages.append(message)
                begun[number].set()
            answers[number] = tokens(messages)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for each in clients:
        each.start()
    assert all(event.wait(30) for event in begun)
    router.popen.send_signal(signal.SIGTERM)
    for each in clients:
        each.join(60)
    assert answers == dict.fromkeys(range(4), expected)
    assert router.popen.wait(60) == 0
    with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        ask(router.address, PROMPT, max_tokens=1)
