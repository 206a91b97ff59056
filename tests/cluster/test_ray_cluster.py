"""`headrace up --address`: on the machines of a Ray that was there before, which stays when we go."""

from __future__ import annotations

import asyncio
import json
import re
import signal

import pytest

from headrace import config
from headrace.cluster.redis_server import RedisServer
from headrace.config import DirectorySettings
from headrace.directory.redis_directory import RedisDirectory
from tests.support.directory_samples import record
from tests.support.processes import ask, eventually, tokens
from tests.support.ray_machines import Launcher, RayMachines
from tests.support.tiny_llama import write_tiny_llama

PROMPT = [3 + (7 * i) % 200 for i in range(200)]


@pytest.fixture(scope="module")
def redis():
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def ray_machines():
    """Two, with two CPUs each."""
    with RayMachines() as machines:
        machines.add(2)
        machines.add(2)
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_serves_and_leaves_nothing(ray_machines, arguments, tmp_path, signum):
    with Launcher(tmp_path, "--address", ray_machines.address, *arguments) as up:
        router = up.wait_until_serving()
        assert router.partition(":")[0] == ray_machines.ip
        answer = ask(router, PROMPT, max_tokens=5)
        assert len(tokens(answer)) == 5
        assert answer[-1].hand_off.prefill_worker == "prefill-0"
        assert processes_of_ours(ray_machines) == 3
        assert all(machine.processes("ray::ProcessActor") for machine in ray_machines.machines)  # spread
        _check_settings(ray_machines, arguments)
        assert up.end(signum) == 0
    eventually(lambda: not processes_of_ours(ray_machines), "its actors have ended", timeout_s=20)


def _check_settings(machines, arguments) -> None:
    """All that the launcher was told has come to every process, and all but the address is as it was."""
    told = config.load(assignments=arguments[1::2], environment={}).describe()
    told["rpc"].update(host=machines.ip)
    lines = [line for line in machines.logged("settings in force") if told["directory"]["cluster"] in line]
    logged = [json.loads(line) for line in lines]
    assert len(logged) == 3
    for process in logged:
        process["rpc"]["port"] = process["http"]["port"] = 0  # the router's are those of the command line
        assert {name: process[name] for name in told} == {**told, "log_level": process["log_level"]}


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_through_rays_client(ray_machines, arguments, tmp_path):
    """From a machine that is none of Ray's."""
    address = f"ray://127.0.0.1:{ray_machines.client_port}"
    with Launcher(tmp_path, "--address", address, *arguments) as up:
        assert len(tokens(ask(up.wait_until_serving(), PROMPT, max_tokens=5))) == 5
        assert up.end(signal.SIGINT) == 0
    eventually(lambda: not processes_of_ours(ray_machines), "its actors have ended", timeout_s=20)


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        (
            ["--address", "nonsense"],
            2,
            "--address: 'nonsense' is not allowed; auto, HOST:PORT or ray://HOST:PORT",
        ),
        (["--set", "security.allow_insecure=false"], 2, "rpc.host: .*no TLS between processes"),
        (
            ["--set", "directory.url=redis://127.0.0.1:1/0"],
            1,
            "machine .*directory at redis://127.0.0.1:1/0: .*refused",
        ),
        (
            ["--decode", "5"],
            1,
            "7 processes can not be placed: together they need 6.01 CPU, the cluster has 4",
        ),
        (
            ["--set", "ray.decode.GPU=1"],
            1,
            "decode-0 can not be placed: it needs 1 GPU, the largest machine has 0",
        ),
        (["--model", "/nowhere/model.gguf"], 1, "/nowhere/model.gguf"),
    ],
)
def test_what_can_not_work_is_refused_and_named(ray_machines, arguments, tmp_path, more, status, words):
    with Launcher(tmp_path, "--address", ray_machines.address, *arguments, *more) as up:
        assert up.wait() == status, up.text
        assert re.search(words, up.text.splitlines()[-1]), up.text
    eventually(lambda: not processes_of_ours(ray_machines), "its actors have ended", timeout_s=20)


def test_two_of_one_name_are_refused(ray_machines, arguments, tmp_path, redis):
    """The first is another launcher's, on a machine whose files we do not see."""
    name = arguments[arguments.index(f"directory.cluster={tmp_path.name}")].partition("=")[2]
    settings = DirectorySettings(url=redis.url, cluster=name, worker_ttl_s=60.0)

    async def register():
        directory = RedisDirectory(settings)
        await directory.register(record(worker_id="decode-0"), 1, {}, take_over=True)
        await directory.close()

    asyncio.run(register())
    with Launcher(tmp_path, "--address", ray_machines.address, *arguments) as up:
        assert up.wait() == 2, up.text
        assert "directory.cluster" in up.text and "decode-0 at redis://" in up.text
