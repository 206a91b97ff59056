"""`headrace up --planner`: workers are added on Ray and taken away again, while requests go on."""

from __future__ import annotations

import asyncio

import pytest

from headrace.cli.planner import planner_of
from headrace.cluster.local_cluster import LocalCluster
from headrace.cluster.planner.ray_actuator import RayActuator
from headrace.config import Settings
from headrace.directory.records import Role, WorkerRecord
from headrace.directory.redis_directory import RedisDirectory
from tests.support.processes import ask, eventually, tokens
from tests.support.tiny_llama import write_tiny_llama

PROMPT = [3 + (7 * i) % 200 for i in range(200)]


@pytest.fixture
def settings(tmp_path) -> Settings:
    """A fleet that is below its minimum by one prefill worker, with a planner that is in a hurry."""
    return Settings.model_validate(
        {
            "model": {"ref": str(write_tiny_llama(tmp_path))},
            "engine": {"num_blocks": 64},
            "directory": {"worker_ttl_s": 2.0},
            "rpc": {"drain_timeout_s": 5.0},
            "planner": {
                "interval_s": 0.3,
                "short_intervals": 1,
                "hold_s": 0.3,
                "min_prefill": 2,
                "max_decode": 1,
            },
        }
    )


def records(url: str, settings: Settings) -> dict[str, WorkerRecord]:
    async def read():
        directory = RedisDirectory(settings.directory.model_copy(update={"url": url}))
        try:
            return {record.worker_id: record for record in await directory.workers()}
        finally:
            await directory.close()

    return asyncio.run(read())


@pytest.mark.timeout(240)
def test_workers_are_added_on_ray_and_removed(settings, monkeypatch):
    logged = []
    monkeypatch.setattr("headrace.cli.planner.configure_logging", lambda *args: logged.append(args))
    with LocalCluster(settings, num_prefill=1, num_decode=1) as cluster:
        expected = tokens(ask(cluster.router_address, PROMPT, max_tokens=10))
        directory = settings.directory.model_copy(update={"url": cluster.directory_url})
        running = settings.model_copy(update={"directory": directory})
        with planner_of(running, cluster, None):
            eventually(
                lambda: (
                    set(records(cluster.directory_url, settings)) == {"prefill-0", "prefill-1", "decode-0"}
                ),
                "the planner has added a prefill worker",
            )
            assert tokens(ask(cluster.router_address, PROMPT, max_tokens=10)) == expected
        assert cluster.worker_names() == {"prefill-0", "prefill-1", "decode-0"}
        actuator = RayActuator(cluster)
        assert asyncio.run(actuator.removable()) == cluster.worker_names()
        asyncio.run(actuator.remove("prefill-0"))
        eventually(
            lambda: set(records(cluster.directory_url, settings)) == {"prefill-1", "decode-0"}, "it has left"
        )
        assert tokens(ask(cluster.router_address, PROMPT, max_tokens=10)) == expected
        assert asyncio.run(actuator.add(Role.DECODE)) is None
        eventually(lambda: "decode-1" in records(cluster.directory_url, settings), "a decode worker is there")
    assert logged
