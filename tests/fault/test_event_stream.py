"""The directory's events late, lost or absent: matches go on, with what is assumed, and the view heals by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from urllib.request import urlopen

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.block_hash import HashRoot, block_hashes
from headrace.clock import SystemClock
from headrace.cluster.redis_server import RedisServer
from headrace.config import DirectorySettings
from headrace.directory.memory_directory import MemoryDirectory
from headrace.directory.publisher import Publisher
from headrace.directory.records import DirectoryEvent, Role
from headrace.directory.view import DirectoryView
from headrace.directory.watcher import Watcher
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc
from headrace.tier import Tier
from router.app import Router
from tests.support.directory_samples import (
    FaultyDirectory,
    digest,
    digests,
    lengths,
    on_device,
    record,
    until,
)
from tests.support.fleet import BLOCK_SIZE, fleet_settings, workers

SETTINGS = DirectorySettings(worker_ttl_s=1.5, publish_interval_s=0.005)


class BadStream(FaultyDirectory):
    """Events come `delay_s` late, are lost by chance, or, while `silent`, do not come."""

    def __init__(self, target, delay_s: float = 0.0, loss: float = 0.0) -> None:
        super().__init__(target)
        self.delay_s = delay_s
        self.loss = loss
        self.silent = False
        self.num_dropped = 0
        self._random = Random(0)

    async def events(self, after: str, timeout_s: float) -> tuple[str, list[DirectoryEvent]]:
        position, events = await super().events(after, timeout_s)
        await asyncio.sleep(self.delay_s)
        arrived = [event for event in events if not self.silent and self._random.random() >= self.loss]
        self.num_dropped += len(events) - len(arrived)
        return position, arrived


class Fleet:
    """Two workers that publish for themselves, and a view that follows over a bad stream."""

    def __init__(self, **faults: float) -> None:
        self.server = MemoryDirectory(SETTINGS, SystemClock())
        self.stream = BadStream(self.server, **faults)
        self.view = DirectoryView(assumed_ttl_s=60.0)
        self.held: dict[str, dict[bytes, Tier]] = {"a": {}, "b": {}}
        self.publishers = {
            name: Publisher(
                self.server, lambda name=name: record(worker_id=name, incarnation=f"{name}1"), SETTINGS
            )
            for name in self.held
        }

    def change(self, name: str, stored=(), removed=()) -> None:
        self.held[name] |= on_device(*stored)
        for number in removed:
            del self.held[name][digest(number)]
        self.publishers[name].add(on_device(*stored), digests(*removed))

    def is_true(self) -> bool:
        return all(self.view.index.blocks(name) == set(held) for name, held in self.held.items())


@asynccontextmanager
async def running(**faults: float) -> AsyncIterator[Fleet]:
    fleet = Fleet(**faults)
    for publisher in fleet.publishers.values():
        await publisher.start()
    watching = asyncio.create_task(Watcher(fleet.stream, fleet.view, SETTINGS).run())
    try:
        await until(lambda: set(fleet.view.workers) == set(fleet.held))
        yield fleet
        assert not watching.done()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        for publisher in fleet.publishers.values():
            await publisher.stop()


@asynccontextmanager
async def router_of(settings, num_workers):
    """A stub of a router that knows so many workers, and the router."""
    router = Router(settings)
    address = await router.start()
    try:
        await until(lambda: len(router.view.workers) == num_workers)
        async with grpc.aio.insecure_channel(address) as channel:
            yield inference_pb2_grpc.InferenceStub(channel), router
    finally:
        await router.stop()


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 1.0])
async def test_late_events(delay_s):
    async with running(delay_s=delay_s) as fleet:
        prompt = digests(1, 2, 3)
        fleet.view.assume("a", "a1", prompt)
        fleet.change("a", stored=[1, 2, 3])
        for number in range(10, 40):
            fleet.change("b", stored=[number], removed=[number - 1] if number > 10 else [])
            assert fleet.view.match(prompt)["a"].num_blocks == 3  # before, while and after the news come
            await asyncio.sleep(SETTINGS.publish_interval_s)
        await until(fleet.is_true)
        assert fleet.view.match(prompt)["a"].num_assumed_blocks == 0
        assert set(fleet.view.workers) == {"a", "b"}


async def test_one_event_in_a_hundred_is_lost():
    async with running(loss=0.01) as fleet:
        for number in range(1000):
            fleet.change("ab"[number % 2], stored=[number], removed=[number - 20] if number >= 20 else [])
            await fleet.publishers["ab"[number % 2]].publish_pending()
            if number % 7 == 0:
                await asyncio.sleep(0)
        await until(lambda: fleet.stream.num_dropped > 0 and fleet.view.num_gaps > 0)
        await until(fleet.is_true)  # the next sign of life shows what is missing


async def test_no_events_at_all_then_events_again():
    async with running() as fleet:
        fleet.stream.silent = True
        fleet.change("a", stored=[1, 2, 3])
        prompt = digests(1, 2, 3)
        assert fleet.view.match(prompt) == {}
        fleet.view.assume("b", "b1", prompt)  # its own history is all that it has
        await until(lambda: fleet.stream.num_dropped > 3)
        assert {name: match.num_blocks for name, match in fleet.view.match(prompt).items()} == {"b": 3}
        assert set(fleet.view.workers) == {"a", "b"}  # records are read at intervals
        fleet.stream.silent = False
        await until(fleet.is_true)
        assert fleet.view.match(prompt)["a"].num_assumed_blocks == 0


async def test_predictions_are_what_workers_report(tiny_model_files):
    """A fleet with router and metrics: predicted equals reported cached tokens, once the events have come."""
    prompt = [3 + (7 * i) % 200 for i in range(6 * BLOCK_SIZE)]
    fingerprints = tiny_model_files.fingerprint, tiny_model_files.tokenizer_fingerprint
    hashes = block_hashes(HashRoot(*fingerprints, BLOCK_SIZE, "float32"), prompt)
    with RedisServer() as redis:
        settings = fleet_settings(tiny_model_files, redis.url)
        async with workers(settings, Role.PREFILL, Role.DECODE), router_of(settings, 2) as (stub, router):
            for length, cached in ((6, 0), (6, 5), (4, 3), (5, 4)):
                message = inference_pb2.GenerateRequest(sampling={"max_tokens": 3, "temperature": 0})
                message.token_ids.ids.extend(prompt[: length * BLOCK_SIZE])
                before = samples(router)
                last = [m async for m in stub.Generate(message, timeout=20)][-1]
                assert last.usage.cached_tokens == cached * BLOCK_SIZE
                grown = {name: value - before.get(name, 0) for name, value in samples(router).items()}
                assert grown["headrace_router_predicted_cached_tokens_total"] == cached * BLOCK_SIZE
                assert grown["headrace_router_reported_cached_tokens_total"] == cached * BLOCK_SIZE
                await until(lambda: lengths(router.view.index.match(hashes)).get("prefill-0") == 6)
            shown = samples(router)
            assert shown['headrace_router_requests_total{outcome="ok"}'] == 4
            assert shown["headrace_router_decision_seconds_count"] == 4
            assert shown["headrace_router_missing_cached_tokens_sum"] == 0
            assert shown["headrace_router_surplus_cached_tokens_sum"] == 0
            assert shown["headrace_router_inflight_requests"] == 0
            assert shown["headrace_router_index_entries"] >= 6
            assert shown["headrace_router_workers"] == 2


def samples(router) -> dict[str, float]:
    """As Prometheus would get them."""
    text = urlopen(f"http://{router.metrics_address}/metrics", timeout=10).read().decode()
    return {
        sample.name
        + "".join(f'{{{key}="{value}"}}' for key, value in sample.labels.items() if key != "le"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
