"""Ray places real workers; they come back when they die; nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from headrace.cluster.local_cluster import LocalCluster, core_shares
from headrace.config import Settings
from headrace.errors import HeadraceError, InvalidRequest, LayoutMismatch, ModelError, Unavailable
from tests.support.processes import ask, assert_idle, children_of, eventually, tokens, worker_status
from tests.support.tiny_llama import write_tiny_llama

PROMPT = [3 + (7 * i) % 200 for i in range(200)]

KEEPER = """
import sys, time
from headrace.cluster.local_cluster import LocalCluster
from headrace.config import Settings
settings = Settings.model_validate({"model": {"ref": sys.argv[1]}, "engine": {"num_blocks": 64}})
with LocalCluster(settings, num_prefill=1, num_decode=1) as cluster:
    print(cluster.router_address, cluster.folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Settings:
    return Settings.model_validate(
        {
            "model": {"ref": str(write_tiny_llama(tmp_path_factory.mktemp("tiny")))},
            "engine": {"num_blocks": 64},
            "directory": {"worker_ttl_s": 2.0},
            "rpc": {"drain_timeout_s": 5.0},
        }
    )


@pytest.mark.timeout(240)
def test_a_killed_worker_comes_back_and_nothing_is_left(settings):
    before = {child.pid for child in children_of(os.getpid())}
    with LocalCluster(settings, num_prefill=1, num_decode=1) as cluster:
        folder = cluster.folder
        expected = tokens(ask(cluster.router_address, PROMPT, max_tokens=10))
        address = cluster.worker_addresses["decode-0"]
        old = worker_status(address)
        assert old.role == "decode"
        (pid,) = (p.pid for p in children_of(os.getpid()) if _listens_on(p, address))
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: _answers(cluster.router_address), "the decode worker is back")
        assert tokens(ask(cluster.router_address, PROMPT, max_tokens=10)) == expected
        assert_idle(cluster.worker_addresses["prefill-0"])
        started = {child.pid for child in children_of(os.getpid())} - before
        assert len(started) >= 5  # directory, Ray's own, router, two workers
    assert not folder.exists()
    eventually(lambda: not any(map(psutil.pid_exists, started)), "all processes ended", timeout_s=20)


def _listens_on(process: psutil.Process, address: str) -> bool:
    port = int(address.rsplit(":", 1)[1])
    try:
        return any(
            c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in process.net_connections("tcp")
        )
    except psutil.NoSuchProcess:
        return False


def _answers(address: str) -> bool:
    try:
        return bool(tokens(ask(address, PROMPT, max_tokens=1)))
    except Exception:  # noqa: BLE001 - any failure means: not yet
        return False


@pytest.mark.timeout(240)
def test_a_killed_keeper_leaves_no_process(settings):
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER, settings.model.ref],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert keeper.stdout is not None
        address, folder = keeper.stdout.readline().split()
        assert tokens(ask(address, PROMPT, max_tokens=2))
        started = children_of(keeper.pid)
        assert len(started) >= 5
        keeper.kill()
        keeper.wait()
        eventually(
            lambda: not any(_alive(process) for process in started), "all processes ended", timeout_s=60
        )
        eventually(lambda: not Path(folder).exists(), "its folder is removed", timeout_s=20)
    finally:
        keeper.kill()
        keeper.wait()
        keeper.stdout.close()


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.timeout(120)
def test_a_model_that_is_missing_ends_the_start_and_cleans_up(settings):
    before = {child.pid for child in children_of(os.getpid())}
    missing = settings.model_copy(
        update={"model": settings.model.model_copy(update={"ref": "/nowhere/model.gguf"})}
    )
    cluster = LocalCluster(missing, num_prefill=1, num_decode=1)
    with pytest.raises(ModelError, match="/nowhere/model"), cluster:
        pass
    assert not cluster.folder.exists()
    assert not ray.is_initialized()
    eventually(
        lambda: {child.pid for child in children_of(os.getpid())} <= before,
        "all processes ended",
        timeout_s=20,
    )


def test_core_shares_are_disjoint_while_there_are_enough():
    assert core_shares([0, 1, 2, 3], 2) == [(0, 1), (2, 3)]
    assert core_shares([0, 1], 2) == [(0,), (1,)]
    assert core_shares([4, 7], 3) == [(4,), (7,), (4,)]
    assert core_shares([0, 1], 0) == []


def test_errors_cross_processes_whole():
    import pickle

    for error in (Unavailable("x"), InvalidRequest("a.b", 3, "at most 2"), LayoutMismatch("dtype", "x", "y")):
        copy = pickle.loads(pickle.dumps(error))
        assert isinstance(copy, HeadraceError)
        assert type(copy) is type(error)
        assert (str(copy), vars(copy)) == (str(error), vars(error))
