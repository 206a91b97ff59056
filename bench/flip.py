"""A worker changes its role under load: throughput before, while and after, failed requests, and how long it took.

    python bench/flip.py --prefill 2 --decode 2 --streams 4 --seconds 10

A cluster on this machine, some clients that ask one request after another, and every worker that can be spared flipped
and flipped back. Rows are written as they come.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import grpc

from headrace import config
from headrace.cluster.local_cluster import LocalCluster
from headrace.cluster.workers import set_role
from headrace.config import Settings
from headrace.directory.records import Role, WorkerRecord
from headrace.directory.redis_directory import RedisDirectory
from headrace.model_store import resolve
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc, worker_pb2

_SEED = 7
_VOCABULARY = range(10, 30_000)


@dataclass(slots=True)
class Load:
    """Clients that ask one request after another, no two prompts alike. `ended`: times of answers, with TTFT."""

    stub: Any  # of the router
    num_prompt: int
    num_output: int
    ended: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    num_failed: int = 0
    is_over: bool = False

    async def run(self, number: int) -> None:
        draw = random.Random(_SEED + number)
        while not self.is_over:
            request = inference_pb2.GenerateRequest(
                sampling=inference_pb2.SamplingParams(
                    max_tokens=self.num_output, ignore_eos=True, temperature=0.0
                )
            )
            request.token_ids.ids.extend(draw.choices(_VOCABULARY, k=self.num_prompt))
            started, first = time.perf_counter(), 0.0
            try:
                async for _ in self.stub.Generate(request, timeout=120):
                    first = first or time.perf_counter()
            except grpc.aio.AioRpcError as error:
                self.num_failed += 1
                print("failed:", error.code().name, error.details())
            else:
                self.ended.append((time.perf_counter(), first - started))

    def since(self, start: float) -> str:
        """What has ended since, in words."""
        ended = [(at, ttft_s) for at, ttft_s in self.ended if at >= start]
        seconds = time.perf_counter() - start
        ttft_ms = 1e3 * statistics.median(ttft_s for _, ttft_s in ended) if ended else float("nan")
        tokens = len(ended) * self.num_output / seconds
        return f"{len(ended) / seconds:6.2f} requests/s {tokens:8.1f} tokens/s   TTFT p50 {ttft_ms:7.1f} ms"


async def measure(options: argparse.Namespace, settings: Settings, router: str) -> None:
    directory = RedisDirectory(settings.directory)
    async with grpc.aio.insecure_channel(router) as channel:
        load = Load(inference_pb2_grpc.InferenceStub(channel), options.prompt, options.output)
        clients = [asyncio.create_task(load.run(number)) for number in range(options.streams)]
        await asyncio.sleep(options.seconds)  # to warm up
        await phase(load, options.seconds, "before")
        for worker_id, there, back in (
            ("decode-0", Role.PREFILL, Role.DECODE),
            ("prefill-0", Role.DECODE, Role.PREFILL),
        ):
            for role in (there, back):
                start = time.perf_counter()
                records = {record.worker_id: record for record in await directory.workers()}
                answer = await flip(records[worker_id], role, settings)
                print(
                    f"{worker_id} to {role}: drain {answer.drain_s:.3f} s, beside {answer.switch_s:.3f} s,"
                    f" handed back {answer.handed_back};  meanwhile {load.since(start)}"
                )
                await phase(load, options.seconds, f"{worker_id} is {role}")
        load.is_over = True
        await asyncio.gather(*clients)
        print(f"{len(load.ended)} requests answered, {load.num_failed} failed")
    await directory.close()


async def phase(load: Load, seconds: float, name: str) -> None:
    start = time.perf_counter()
    await asyncio.sleep(seconds)
    print(f"{name:24} {load.since(start)}")


async def flip(record: WorkerRecord, role: Role, settings: Settings) -> worker_pb2.SetRoleResponse:
    return await set_role(record, worker_pb2.SetRoleRequest(role=role), settings.rpc)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("prefill", 2), ("decode", 2), ("streams", 4), ("prompt", 200), ("output", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--model", default=config.DEFAULT_MODEL)
    options = parser.parse_args()
    settings = config.load(assignments=[f"model.ref={options.model}"])
    resolve(settings.model.ref, cache_dir=settings.model.cache_dir)
    with LocalCluster(settings, num_prefill=options.prefill, num_decode=options.decode) as cluster:
        directory = settings.directory.model_copy(update={"url": cluster.directory_url})
        settings = settings.model_copy(update={"directory": directory})
        asyncio.run(measure(options, settings, cluster.router_address))


if __name__ == "__main__":
    main()
