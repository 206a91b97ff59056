"""Two hosts, a prefill worker on one and a decode worker on the other; router, Redis and client on a third."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.engine.sequence import NewToken
from headrace.model_config import ModelFiles
from tests.support.engine_driver import make_sequence
from tests.support.engines import engine_for
from tests.support.nodes import Network, Node, network
from tests.support.processes import Process, ask, assert_idle

START_TIMEOUT_S = 90.0


@dataclass
class Hosts:
    """Processes on hosts that share a directory."""

    net: Network
    folder: Path
    files: ModelFiles
    processes: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cluster = f"test-{uuid.uuid4().hex[:8]}"

    def start(self, kind: str, node: Node | None = None, *settings: str, name: str = "") -> Process:
        """On `node`, or beside Redis. Addresses are told as a person would: listen everywhere, here is Redis."""
        name = name or f"{kind}-{len(self.processes)}"
        fixed = [
            f"model.ref={self.files.path}",
            "model.dtype=float32",
            f"directory.url={self.net.redis_url}",
            f"directory.cluster={self._cluster}",
            "directory.worker_ttl_s=3",
            "engine.block_size_tokens=16",
            "engine.num_blocks=512",
            "engine.max_step_tokens=256",
            "engine.num_threads=1",
            "kv.lease_ttl_s=3",
            "kv.checksum=1",
            "rpc.host=0.0.0.0",
            "rpc.keepalive_s=2",
            "rpc.keepalive_timeout_s=3",
            "security.allow_insecure=true",
            "log_level=debug",
        ]
        options = [option for pair in (*fixed, *settings) for option in ("--set", pair)]
        if kind != "router":
            options += ["--id", name]
        host, prefix = (node.address, node.prefix) if node else (self.net.address, ())
        process = Process([kind, *options], self.folder, name, host=host, prefix=prefix)
        (node.processes if node else self.processes).append(process)
        return process

    def stop(self) -> None:
        everywhere = [*self.processes, *(process for node in self.net.nodes for process in node.processes)]
        for process in everywhere:
            process.terminate()
        for process in everywhere:
            process.stop()


@dataclass
class Fleet:
    hosts: Hosts
    a: Node
    b: Node
    router: Process
    prefill: Process
    decode: Process

    def ask(self, prompt: list[int], **options):
        return ask(self.router.address, prompt, **options)

    def assert_idle(self) -> None:
        assert_idle(self.prefill.address, self.decode.address)


@pytest.fixture(scope="session")
def net() -> Iterator[Network]:
    with network() as net:
        net.add_node()
        net.add_node()
        yield net


@pytest.fixture
def hosts(net, tmp_path, tiny_model_files) -> Iterator[Hosts]:
    hosts = Hosts(net, tmp_path, tiny_model_files)
    try:
        yield hosts
    finally:
        for node in net.nodes:
            node.restore()
        hosts.stop()


@pytest.fixture
def fleet(hosts) -> Fleet:
    a, b = hosts.net.nodes[:2]
    fleet = Fleet(hosts, a, b, hosts.start("router"), hosts.start("prefill", a), hosts.start("decode", b))
    for process in (fleet.prefill, fleet.decode, fleet.router):
        process.wait_until_serving()
    return fleet


@pytest.fixture(scope="session")
def reference(tiny_model_files) -> Callable[[list[int], int], list[int]]:
    """The tokens that one engine alone draws: `reference(prompt, num_tokens)`."""
    engine = engine_for(tiny_model_files, block_size_tokens=16, num_blocks=512)

    def answer(prompt: list[int], num_tokens: int) -> list[int]:
        sequence = make_sequence("reference", prompt, num_tokens, root=os.urandom(16))
        engine.submit(sequence)
        found: list[int] = []
        while len(found) < num_tokens:
            events = engine.step().events
            found += [event.token_id for event in events if isinstance(event, NewToken)]
        return found

    return answer
