"""Real processes of ours, started by the command line as a user would, and surely ended."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.audit import is_idle

HEADRACE = Path(sys.executable).parent / "headrace"
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
_PORTS = random.SystemRandom()


def free_port() -> int:
    """Below those that the system gives to connections, which would take it before its owner binds it."""
    while True:
        port = _PORTS.randrange(15_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Process:
    """`headrace …` with its output in a file. `address` is of its gRPC server, where it has one."""

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        name: str,
        *,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
        port: int | None = None,
    ) -> None:
        """`prefix`: what runs it, on another host whose address is `host`. `port`: None for any free one."""
        self.name = name
        self._is_run_by_another = bool(prefix)
        self.log = folder / f"{name}.log"
        self.port = free_port() if port is None else port
        self.address = f"{host}:{self.port}"
        ports = ("--set", f"rpc.port={self.port}", "--set", f"http.port={free_port()}")
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [*prefix, str(HEADRACE), *arguments, *ports],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_serving(self) -> None:
        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            eventually(
                lambda: self._is_serving(stub), f"{self.name} serves; its log: {self.log.read_text()[-2000:]}"
            )

    def _is_serving(self, stub: health_pb2_grpc.HealthStub) -> bool:
        assert self.popen.poll() is None, f"{self.name} ended: {self.log.read_text()[-3000:]}"
        try:
            status = stub.Check(health_pb2.HealthCheckRequest(), timeout=2).status
        except grpc.RpcError:
            return False
        return status == health_pb2.HealthCheckResponse.SERVING

    def send(self, signum: signal.Signals) -> None:
        os.killpg(self.popen.pid, signum)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        self.popen.wait(STOP_TIMEOUT_S)

    def terminate(self) -> None:
        """SIGTERM, past what runs the process: that would not hand it on."""
        if self.popen.poll() is not None:
            return
        if self._is_run_by_another:
            self.send(signal.SIGTERM)
        else:
            self.popen.terminate()

    def stop(self) -> int:
        """SIGTERM, and SIGKILL if that takes too long. Returns the exit status."""
        self.terminate()
        if self.popen.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        return self.popen.wait()


def eventually(condition, what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Poll until `condition()` is true; fail saying `what` after the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.05)


def ask(
    address: str, prompt, *, timeout_s: float = 60, explain: bool = False, **sampling
) -> list[inference_pb2.GenerateResponse]:
    """All messages of one answer, greedy unless told otherwise. `prompt` is a text or a list of token ids."""
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        message = request(prompt, **sampling)
        message.explain = explain
        return list(stub.Generate(message, timeout=timeout_s))


def request(prompt, **sampling) -> inference_pb2.GenerateRequest:
    message = inference_pb2.GenerateRequest(
        sampling=inference_pb2.SamplingParams(**{"temperature": 0, **sampling})
    )
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.ids.extend(prompt)
    return message


def tokens(messages) -> list[int]:
    return [token for message in messages for token in message.token_ids]


def worker_status(address: str) -> worker_pb2.StatusResponse:
    with grpc.insecure_channel(address) as channel:
        return worker_pb2_grpc.WorkerStub(channel).Status(worker_pb2.StatusRequest(), timeout=10)


def assert_idle(*addresses: str) -> None:
    """After idling: free + cached = total on every worker, nothing held, nothing running."""
    for address in addresses:
        eventually(
            lambda address=address: is_idle(worker_status(address)),
            f"idle: {worker_status(address)}",
            timeout_s=30,
        )


def children_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)
