"""`headrace up --address`: on the machines of a Ray that was there before, which stays when we go."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from headrace.cluster.redis_server import RedisServer
from tests.support.processes import ask, eventually, tokens
from tests.support.ray_machines import ENVIRONMENT, Launcher, RayMachines
from tests.support.tiny_llama import write_tiny_llama

PROMPT = [3 + (7 * i) % 200 for i in range(200)]


@pytest.fixture(scope="module")
def redis():
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def ray_machines():
    """Three CPUs."""
    with RayMachines() as machines:
        machines.add(3)
        yield machines


@pytest.fixture
def arguments(tmp_path, tmp_path_factory, redis):
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    settings = [
        f"model.ref={model}",
        f"model.cache_dir={tmp_path}",
        f"directory.url={redis.url}",
        f"directory.cluster={tmp_path.name}",
        "engine.num_blocks=64",
        "security.allow_insecure=true",
        "rpc.drain_timeout_s=5",
    ]
    return [part for setting in settings for part in ("--set", setting)]


def processes_of_ours(machines: RayMachines) -> int:
    return sum(len(machine.processes("ray::ProcessActor")) for machine in machines.machines)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_serves_and_leaves_nothing(ray_machines, arguments, tmp_path, signum):
    with Launcher(tmp_path, "--address", ray_machines.address, *arguments) as up:
        router = up.wait_until_serving()
        assert router.partition(":")[0] == ray_machines.ip
        answer = ask(router, PROMPT, max_tokens=5)
        assert len(tokens(answer)) == 5
        assert answer[-1].hand_off.prefill_worker == "prefill-0"
        assert processes_of_ours(ray_machines) == 3
        assert up.end(signum) == 0
    eventually(lambda: not processes_of_ours(ray_machines), "its actors have ended", timeout_s=20)
