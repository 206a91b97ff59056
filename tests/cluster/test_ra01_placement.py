"""Case RA-01 on a real Ray with two CPUs: places that can never be had, that are taken, and processes that die."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import threading
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray
from ray.util import placement_group_table

from headrace.cluster import keeper as keeper_module
from headrace.cluster.keeper import Keeper
from headrace.cluster.local_cluster import start_ray
from headrace.cluster.process import ProcessSpec
from headrace.cluster.redis_server import RedisServer
from headrace.config import Settings
from headrace.errors import ModelError, Unavailable
from tests.support.processes import ask, children_of, eventually
from tests.support.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def two_cpus():
    short = Path(
        tempfile.mkdtemp(prefix="hr-")
    )  # Ray's sockets lie in it, and their paths may have 107 bytes
    start_ray(2, short)
    yield
    ray.shutdown()
    shutil.rmtree(short, ignore_errors=True)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Of routers and workers that take a CPU each."""
    with RedisServer() as redis:
        yield Settings.model_validate(
            {
                "model": {"ref": str(write_tiny_llama(tmp_path_factory.mktemp("tiny")))},
                "engine": {"num_blocks": 64},
                "directory": {"url": redis.url},
                "rpc": {"drain_timeout_s": 2.0},
                "http": {"enabled": False},
                "ray": {"router": {"CPU": 1.0}, "place_timeout_s": 60.0, "start_timeout_s": 60.0},
            }
        )


def changed(settings, **fields):
    return settings.model_copy(update={"ray": settings.ray.model_copy(update=fields)})


class Stages:
    """What the keeper told, by process; some stages call back."""

    def __init__(self):
        self.told = defaultdict(list)
        self.calls = {}

    def __call__(self, name, stage):
        self.told[name].append(stage)
        for beginning, call in list(self.calls.items()):
            if stage.startswith(beginning):
                del self.calls[beginning]
                call()


@contextmanager
def kept(settings, folder, *names, stages=None, kind="router"):
    """A keeper of these processes, not yet started; afterwards all of Ray is free again."""
    specs = [ProcessSpec(name, kind, settings, (), folder / f"{name}.log") for name in names]
    keeper = Keeper(specs, settings, stages or Stages())
    try:
        yield keeper
    finally:
        keeper.stop()
        eventually(lambda: ray.available_resources().get("CPU") == 2, "both CPUs are free", timeout_s=20)
        assert not groups_alive()


def groups_alive():
    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def actors():
    """Of ours that live."""
    found = []
    for process in children_of(os.getpid()):
        try:
            if process.name().startswith("ray::ProcessAct"):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.parametrize(
    ("needs", "names", "words"),
    [
        (
            {"CPU": 3.0},
            ["a"],
            r"a can not be placed: it needs 3 CPU, the largest machine has 2 \(machines: 2 CPU",
        ),
        ({"CPU": 1.0}, ["a", "b", "c"], r"3 processes .* need 3 CPU, the cluster has 2"),
        ({"GPU": 1.0}, ["a"], "it needs 1 GPU, the largest machine has 0"),
        ({"CPU": 1.0, "accelerator_type:H100": 0.001}, ["a"], "needs 0.001 accelerator_type:H100, .* has 0"),
    ],
)
def test_ra01_what_the_cluster_can_never_give_is_refused_and_named(
    two_cpus, settings, tmp_path, needs, names, words
):
    with kept(changed(settings, router=needs), tmp_path, *names) as keeper:
        with pytest.raises(Unavailable, match=words):
            keeper.start()
        assert not groups_alive()  # nothing was even tried


def test_ra01_a_place_that_is_taken_is_waited_for(two_cpus, settings, tmp_path):
    """Two are wanted, one CPU is in use and free after 5 s: until then it is said what is missing."""
    blocker = ray.remote(Blocker).options(num_cpus=1).remote()
    ray.get(blocker.ready.remote(), timeout=60)
    stages = Stages()
    with kept(settings, tmp_path, "a", "b", stages=stages) as keeper:
        timer = threading.Timer(5.0, ray.kill, [blocker])
        timer.start()
        keeper.start()
        timer.join()
        waited = [stage for told in stages.told.values() for stage in told if "waits" in stage]
        assert waited
        assert all(re.fullmatch("waits for a place: needs 1 CPU, free [012] CPU", stage) for stage in waited)
        assert all(told[-1] == "serving" for told in stages.told.values())


def test_ra01_a_place_that_stays_taken_ends_the_wait(two_cpus, settings, tmp_path):
    blocker = ray.remote(Blocker).options(num_cpus=1).remote()
    ray.get(blocker.ready.remote(), timeout=60)
    with kept(changed(settings, place_timeout_s=1.0), tmp_path, "a", "b") as keeper:
        with pytest.raises(Unavailable, match=r"found no place within 1 s: needs 1 CPU, free [01] CPU"):
            keeper.start()
        keeper.stop()
        assert not groups_alive()
        ray.kill(blocker)


class Blocker:
    def ready(self):
        return True


def test_ra01_an_actor_killed_while_it_starts_surfaces(two_cpus, settings, tmp_path):
    os.mkfifo(tmp_path / "a.log")  # nobody reads it: the start stops where its log is opened

    def kill():
        eventually(actors, "the process is there", timeout_s=30)
        for process in actors():
            process.kill()

    stages = Stages()
    stages.calls["starting"] = kill
    died = pytest.raises(Unavailable, match=r"a died: .*log: .*a\.log")
    with kept(settings, tmp_path, "a", stages=stages) as keeper, died:
        keeper.start()


def test_ra01_an_actor_killed_while_it_serves_is_replaced(two_cpus, settings, tmp_path):
    stages = Stages()
    with kept(settings, tmp_path, "a", "b", stages=stages) as keeper:
        keeper.start()
        address = keeper.status("a").address
        before = {process.pid for process in actors()}
        (killed,) = [process for process in actors() if _listens_on(process, address)]
        killed.send_signal(signal.SIGKILL)
        eventually(lambda: stages.told["a"].count("serving") == 2, "it serves again", timeout_s=60)
        assert "starts anew in 1 s" in stages.told["a"]
        assert stages.told["b"].count("serving") == 1
        assert len({process.pid for process in actors()} - before) == 1


def _listens_on(process, address):
    port = int(address.rpartition(":")[2])
    return any(c.laddr.port == port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN)


def test_ra01_one_that_can_not_live_is_started_ever_more_rarely(two_cpus, settings, tmp_path, monkeypatch):
    """Its model goes away while it serves: each further life ends at once."""
    monkeypatch.setattr(keeper_module, "_FIRST_PAUSE_S", 0.1)
    model = shutil.copytree(settings.model.ref, tmp_path / "model")
    gone = settings.model_copy(update={"model": settings.model.model_copy(update={"ref": str(model)})})
    stages = Stages()
    with kept(gone, tmp_path, "a", stages=stages) as keeper:
        keeper.start()
        shutil.rmtree(model)
        for process in actors():
            process.kill()
        pauses = lambda: [stage for stage in stages.told["a"] if "anew" in stage]  # noqa: E731
        eventually(lambda: len(pauses()) >= 4, "it has failed four times", timeout_s=60)
        assert pauses()[:4] == [f"starts anew in {pause} s" for pause in ("0.1", "0.2", "0.4", "0.8")]
        write_back = shutil.copytree(settings.model.ref, model)
        assert write_back.exists()
        eventually(lambda: stages.told["a"][-1] == "serving", "it serves again", timeout_s=60)


def test_one_more_is_kept_like_the_others_until_it_is_removed(two_cpus, settings, tmp_path):
    stages = Stages()
    with kept(settings, tmp_path, "a", stages=stages) as keeper:
        keeper.start()
        keeper.add(ProcessSpec("b", "router", settings, (), tmp_path / "b.log"))
        eventually(lambda: stages.told["b"][-1] == "serving", "it serves", timeout_s=60)
        keeper.remove("b")
        assert keeper.names() == {"a"}
        assert stages.told["b"][-1] == "ended"
        eventually(lambda: len(actors()) == 1, "its process has ended", timeout_s=20)
        with pytest.raises(Unavailable, match="it needs 3 CPU, the largest machine has 2"):
            keeper.add(ProcessSpec("c", "router", changed(settings, router={"CPU": 3.0})))
        assert keeper.names() == {"a"}


def test_ra01_a_start_that_fails_says_why(two_cpus, settings, tmp_path):
    missing = settings.model_copy(
        update={"model": settings.model.model_copy(update={"ref": "/nowhere/model.gguf"})}
    )
    with kept(missing, tmp_path, "a") as keeper, pytest.raises(ModelError, match="/nowhere/model"):
        keeper.start()


def test_ra01_a_child_by_spawn_works_after_ray_and_grpc_are_up(two_cpus, settings, tmp_path):
    with kept(settings, tmp_path, "a") as keeper:
        keeper.start()
        address = keeper.status("a").address
        child = multiprocessing.get_context("spawn").Process(target=_refused, args=(address,))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert keeper.status("a").stage == "serving"


def _refused(address):
    """Asks the router, which has no worker; so the answer is an error, and it comes from there."""
    import grpc

    try:
        ask(address, [1, 2, 3], max_tokens=1, timeout_s=30)
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "no worker that serves" in error.details()
    else:
        raise AssertionError("nobody is there to answer")
