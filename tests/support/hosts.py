"""A fleet over two hosts: a prefill worker on one and a decode worker on the other; router, Redis and clients beside
them. What has ended is started anew, under its name and address, as a supervisor would.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import grpc

from headrace.model_config import ModelFiles
from headrace.rpc.v1 import inference_pb2
from tests.support.nodes import Network, Node
from tests.support.processes import Process, ask, assert_idle, eventually, tokens

NUM_TOKENS = 20
REQUEST_TIMEOUT_S = 30.0
PAUSE_S = 0.1  # of a client, so that processes that start meanwhile get some time of the cores
BLOCK_SIZE = 16

Reference = Callable[[list[int], int], list[int]]


@dataclass
class Hosts:
    """Processes on hosts that share a directory. A worker that is started again keeps its name and its port."""

    net: Network
    folder: Path
    files: ModelFiles
    redis_url: str
    cluster: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex[:8]}")
    processes: dict[str, Process] = field(default_factory=dict)  # the last of each name
    _before: list[Process] = field(default_factory=list)

    def start(self, kind: str, node: Node | None = None, *settings: str, name: str = "") -> Process:
        """On `node`, or beside Redis. Told what a person would tell: listen everywhere, here is Redis."""
        name = name or kind
        options = [option for pair in (*self._settings(), *settings) for option in ("--set", pair)]
        if kind != "router":
            options += ["--id", name]
        host, prefix = (node.address, node.prefix) if node else (self.net.address, ())
        known = self.processes.get(name)
        if known is not None:
            self._before.append(known)
        port = known.port if known else None
        process = Process([kind, *options], self.folder, name, host=host, prefix=prefix, port=port)
        self.processes[name] = process
        return process

    def _settings(self) -> list[str]:
        return [
            f"model.ref={self.files.path}",
            "model.dtype=float32",
            f"directory.url={self.redis_url}",
            f"directory.cluster={self.cluster}",
            "directory.worker_ttl_s=3",
            f"engine.block_size_tokens={BLOCK_SIZE}",
            "engine.num_blocks=1024",
            "engine.max_step_tokens=256",
            "engine.num_threads=1",
            "kv.lease_ttl_s=3",
            "kv.checksum=1",
            "rpc.host=0.0.0.0",
            "rpc.keepalive_s=2",
            "rpc.keepalive_timeout_s=3",
            "rpc.drain_timeout_s=5",
            "security.allow_insecure=true",
            "log_level=debug",
        ]

    def stop(self) -> None:
        for process in (*self.processes.values(), *self._before):
            process.kill()


@dataclass(frozen=True)
class Answered:
    prompt: list[int]
    num_tokens: int
    messages: list[inference_pb2.GenerateResponse]
    error: grpc.RpcError | None
    began_at: float
    ended_at: float

    @property
    def prefill_worker(self) -> str:
        return self.messages[-1].hand_off.prefill_worker if self.messages else ""


class Clients:
    """Ask one prompt after the other, each a different one, until told to stop."""

    def __init__(self, address: str, num_clients: int, seed: int, num_tokens: int) -> None:
        self.answers: list[Answered] = []
        self._address = address
        self._num_tokens = num_tokens
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(Random(seed * 1000 + number),))
            for number in range(num_clients)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Answered]:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        return self.answers

    def since(self, moment: float) -> list[Answered]:
        """Those that were asked after that moment."""
        return [answer for answer in list(self.answers) if answer.began_at >= moment]

    def handed_off(self, since: float) -> list[Answered]:
        """The same, of those whose prompt another worker computed."""
        return [answer for answer in self.since(since) if answer.prefill_worker]

    def _run(self, random: Random) -> None:
        while not self._stopping.wait(PAUSE_S):
            self.answers.append(asked(self._address, random_prompt(random), self._num_tokens))


def random_prompt(random: Random, num_tokens: int = 300) -> list[int]:
    return [random.randrange(3, 200) for _ in range(num_tokens)]


def asked(address: str, prompt: list[int], num_tokens: int = NUM_TOKENS, **options) -> Answered:
    began_at = time.monotonic()
    messages, error = [], None
    try:
        messages = ask(address, prompt, timeout_s=REQUEST_TIMEOUT_S, max_tokens=num_tokens, **options)
    except grpc.RpcError as raised:
        error = raised
    return Answered(prompt, num_tokens, messages, error, began_at, time.monotonic())


def figures(answers: list[Answered], cut_at: float, healed_at: float) -> str:
    """What clients saw of a trouble, in words."""
    during = [a for a in answers if a.ended_at > cut_at and a.began_at < healed_at]
    local = [a.ended_at - cut_at for a in during if not a.prefill_worker and a.error is None]
    again = [a.ended_at - healed_at for a in answers if a.began_at >= healed_at and a.prefill_worker]
    seconds = [a.ended_at - a.began_at for a in during]
    return (
        f"{len(answers)} answers, {sum(a.error is not None for a in answers)} errors;"
        f" {len(during)} during the {healed_at - cut_at:.1f} s, {len(local)} of them prefilled where they were decoded"
        f" (the first after {min(local, default=0):.1f} s); {sum(s > 1 for s in seconds)} took over 1 s,"
        f" the longest {max(seconds):.1f} s; handed off again {min(again, default=0):.1f} s after its end"
    )


@dataclass
class Fleet:
    hosts: Hosts
    a: Node  # prefills
    b: Node  # decodes
    reference: Reference

    @property
    def router(self) -> Process:
        return self.hosts.processes["router"]

    @property
    def prefill(self) -> Process:
        return self.hosts.processes["prefill"]

    @property
    def decode(self) -> Process:
        return self.hosts.processes["decode"]

    def ensure_running(self) -> list[str]:
        """Starts what has ended. Returns what that was."""
        ended = [
            kind
            for kind in ("router", "prefill", "decode")
            if kind not in self.hosts.processes or self.hosts.processes[kind].popen.poll() is not None
        ]
        for kind in ended:
            self.hosts.start(kind, {"prefill": self.a, "decode": self.b}.get(kind))
        for kind in ended:
            self.hosts.processes[kind].wait_until_serving()
        return ended

    def wait_for_hand_off(self, timeout_s: float = 60.0) -> None:
        numbers = Random(os.urandom(8))
        eventually(
            lambda: asked(self.router.address, random_prompt(numbers), 1).prefill_worker,
            "a hand-off",
            timeout_s,
        )

    def assert_right(self, answers: list[Answered]) -> None:
        """Every one came to its end, with the tokens of one engine alone."""
        assert [answer.error for answer in answers if answer.error is not None] == []
        for answer in answers:
            assert tokens(answer.messages) == self.reference(answer.prompt, answer.num_tokens)

    def assert_idle(self) -> None:
        assert_idle(self.prefill.address, self.decode.address)

    @contextmanager
    def clients(self, num_clients: int = 2, seed: int = 1, num_tokens: int = NUM_TOKENS) -> Iterator[Clients]:
        clients = Clients(self.router.address, num_clients, seed, num_tokens)
        clients.start()
        try:
            yield clients
        finally:
            clients.stop()
