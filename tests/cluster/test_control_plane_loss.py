"""Redis and Ray are killed piece by piece under load. They carry no request: no answer may be lost, or wrong.

Real machines of Ray (`ray start`, three on this one), `headrace up --address`, real clients.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager

import pytest

from headrace.cluster.redis_server import RedisServer
from tests.support.load import load_on
from tests.support.processes import eventually
from tests.support.ray_machines import Launcher, RayMachines
from tests.support.tiny_llama import write_tiny_llama

ENOUGH = 60  # answers after each blow


@contextmanager
def fleet_on_three_machines(folder, redis):
    """A head that has no room, a machine with router and workers, one with a decode worker."""
    settings = [
        f"model.ref={write_tiny_llama(folder / 'model')}",
        "model.dtype=float32",
        f"model.cache_dir={folder}",
        f"directory.url={redis.url}",
        "directory.worker_ttl_s=2",
        "engine.num_blocks=256",
        "engine.block_size_tokens=16",
        "security.allow_insecure=true",
        "rpc.drain_timeout_s=5",
        "rpc.keepalive_s=1",
        "rpc.keepalive_timeout_s=2",
        "ray.router.front=1",
    ]
    options = [part for setting in settings for part in ("--set", setting)]
    with RayMachines() as machines:
        machines.add(0)
        machines.add(4, '{"front": 1}')
        machines.add(1)
        sizes = ("--prefill", "1", "--decode", "2")
        with Launcher(folder, "--address", machines.address, *sizes, *options) as up:
            yield machines, up


def go_on_for(seconds):
    """How long a thing is away is what is tested."""
    began_at = time.monotonic()
    eventually(lambda: time.monotonic() - began_at > seconds, "time goes by")


class Blows:
    """One after the other, with the answers since."""

    def __init__(self, load, up):
        self.load = load
        self.up = up
        self.figures = []

    @contextmanager
    def blow(self, name):
        before, errors, began_at = self.load.num_right, len(self.load.errors), time.monotonic()
        yield
        goal = self.load.num_right + ENOUGH
        eventually(lambda: self.load.num_right >= goal, f"answers after: {name}; {self.load.figures()}")
        right, failed = self.load.num_right - before, len(self.load.errors) - errors
        self.figures.append(
            f"{name}: {right} right answers in {time.monotonic() - began_at:.0f} s, {failed} errors,"
            f" {len(self.load.wrong)} wrong"
        )


@pytest.mark.nightly
@pytest.mark.timeout(500)
def test_the_control_plane_dies_piece_by_piece_and_no_answer_is_lost(tmp_path):
    with RedisServer() as redis, fleet_on_three_machines(tmp_path, redis) as (machines, up):
        head, _, small = machines.machines
        with load_on(up.wait_until_serving()) as load:
            blows = Blows(load, up)
            with blows.blow("Redis killed"):
                os.kill(redis.pid, signal.SIGKILL)
            with blows.blow("Redis back, empty"):
                redis.stop()
                redis.start()
            with blows.blow("Redis paused for two lives of a record"):
                os.kill(redis.pid, signal.SIGSTOP)
                go_on_for(4.0)
                os.kill(redis.pid, signal.SIGCONT)
            with blows.blow("an actor killed"):
                served = up.text.count(": serving")
                (actor,) = small.processes("ray::ProcessActor")
                actor.kill()
                eventually(lambda: up.text.count(": serving") > served, f"it serves anew: {up.text}")
            with blows.blow("a machine's raylet killed"):
                served = up.text.count(": serving")
                (raylet,) = small.processes("raylet/raylet")
                raylet.kill()
                eventually(lambda: up.text.count(": serving") > served, f"it serves elsewhere: {up.text}")
            with blows.blow("the head killed"):
                head.kill()
                go_on_for(20.0)
        print("", *blows.figures, load.figures(), sep="\n")
        load.assert_nothing_lost(6 * ENOUGH)
