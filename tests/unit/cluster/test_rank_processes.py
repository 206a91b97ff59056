"""Ranks that do not get as far as the first step: the worker's start fails, and says which one and why."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import psutil
import pytest

from headrace.cluster.rank import Job
from headrace.cluster.rank_processes import RankProcesses
from headrace.cluster.worker_process import WorkerProcess
from headrace.config import DirectorySettings, Settings
from headrace.directory.records import Role
from headrace.errors import InvalidRequest, RankLost

TIMEOUT_S = 60.0


def settings_of(ref: str, **kv: object) -> Settings:
    engine = {"tensor_parallel_size": 2, "num_blocks": 8, "num_threads": 1}
    return Settings.model_validate({"model": {"ref": ref, "dtype": "float32"}, "engine": engine, "kv": kv})


@pytest.fixture
def started():
    """`started(ref)`: the other ranks of a worker of two. They are gone at the end, whatever became of them."""
    made: list[RankProcesses] = []

    def start(ref: str) -> RankProcesses:
        made.append(RankProcesses(settings_of(ref), "w", "incarnation"))
        return made[-1]

    yield start
    for processes in made:
        processes.kill()
        for process in processes.each:
            process.close()
    assert [child for child in psutil.Process().children() if "rank_process" in str(child.cmdline())] == []


def meet(processes: RankProcesses) -> None:
    processes.meet(100, pytest.fail)


def test_what_a_rank_can_not_load_is_said(started, tmp_path):
    with pytest.raises(RankLost, match=r"rank 1 failed to start: .*no such file or folder"):
        meet(started(str(tmp_path / "nothing")))


def test_a_rank_that_is_killed_while_it_starts_is_named(started, tiny_model_files):
    processes = started(str(tiny_model_files.path))
    processes.kill()
    with pytest.raises(RankLost, match=r"rank 1 was killed by signal 9 \(SIGKILL\) while it started"):
        meet(processes)


def test_a_rank_that_does_not_start_in_time_is_named(started, tiny_model_files):
    [process] = started(str(tiny_model_files.path)).each
    with pytest.raises(RankLost, match="rank 1 did not start in time"):
        process.wait(time.monotonic())


def test_a_rank_ends_when_its_connections_do(started, tiny_model_files):
    [process] = started(str(tiny_model_files.path)).each
    process.link.close()
    process.control.close()
    assert str(process.ended(TIMEOUT_S)).startswith("ended with status")


def test_a_rank_is_told_no_secrets(tmp_path):
    directory = {"url": "redis://:geheim@127.0.0.1/0", "password_file": "/etc/geheim"}
    settings = settings_of("m").model_copy(update={"directory": DirectorySettings(**directory)})
    job = Job(1, 2, "w", "incarnation", settings, tmp_path / "log")
    message = job.pack()
    assert b"geheim" not in message
    told = Job.unpack(message)
    assert told == replace(job, settings=told.settings)
    assert (told.settings.model, told.settings.engine) == (settings.model, settings.engine)


async def test_the_transport_between_threads_is_refused(tiny_model_files):
    settings = settings_of(str(tiny_model_files.path), transport="local")
    worker = WorkerProcess(settings, Role.DECODE, f"w-{os.getpid()}")
    with pytest.raises(InvalidRequest, match=r"kv\.transport: 'local'.*tensor_parallel_size 2 needs nixl"):
        await worker.start()
