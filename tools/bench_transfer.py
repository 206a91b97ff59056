"""Measures READs of KV blocks over NIXL between two processes. Figures for docs/performance.md.

python tools/bench_transfer.py                    what UCX chooses
UCX_TLS=tcp,self python tools/bench_transfer.py   TCP only
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import cast

import numpy as np

from kv_transfer.nixl_transport import ucx_environment
from kv_transfer.registry import create_transport
from kv_transfer.slices import Slice
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transport import BlockRegion, Part

BLOCK_BYTES = 737_280  # 32 tokens of SmolLM2-135M in bfloat16
NUM_BLOCKS = 64
REPEATS = 30
IDLE_S = 0.2
TIMEOUT_S = 30.0


def region() -> tuple[np.ndarray, BlockRegion]:
    memory = np.ones(NUM_BLOCKS * BLOCK_BYTES, dtype=np.uint8)
    return memory, BlockRegion(memory.ctypes.data, NUM_BLOCKS, BLOCK_BYTES)


async def serve(pipe: Connection) -> None:
    """The owner: be read from until the reader is done."""
    memory, blocks = region()
    thread = TransferThread(lambda: create_transport("nixl", "owner", [blocks]))
    await thread.start()
    await thread.connect("reader", [Part(pipe.recv(), Slice.whole(BLOCK_BYTES))], TIMEOUT_S)
    pipe.send(await thread.metadata())
    await asyncio.to_thread(pipe.recv)
    await thread.close()
    del memory


def owner(pipe: Connection) -> None:
    asyncio.run(serve(pipe))


async def read(pipe: Connection) -> None:
    memory, blocks = region()
    thread = TransferThread(lambda: create_transport("nixl", "reader", [blocks]))
    await thread.start()
    pipe.send(await thread.metadata())
    theirs = Part(await asyncio.to_thread(pipe.recv), Slice.whole(BLOCK_BYTES))
    await thread.connect("owner", [theirs], TIMEOUT_S)

    async def measured(num_blocks: int) -> float:
        ids = list(range(num_blocks))
        async with asyncio.timeout(TIMEOUT_S):
            return (await thread.read("owner", ids, ids).done).seconds

    report("first READ, 1 block", [await measured(1)], 1)
    for num_blocks in (1, 8, 64):
        report(f"{num_blocks} blocks", [await measured(num_blocks) for _ in range(REPEATS)], num_blocks)
    idle: list[float] = []
    for _ in range(REPEATS):
        await asyncio.sleep(IDLE_S)
        idle.append(await measured(1))
    report("1 block, both idle before", idle, 1)
    copy = np.empty_like(memory)
    times: list[float] = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        ctypes.memmove(copy.ctypes.data, memory.ctypes.data, memory.nbytes)
        times.append(time.perf_counter() - started)
    report("64 blocks, plain copy in one process", times, 64)
    pipe.send(None)
    await thread.close()


def report(what: str, seconds: list[float], num_blocks: int) -> None:
    median = statistics.median(seconds)
    p90 = sorted(seconds)[int(0.9 * (len(seconds) - 1))]
    rate = num_blocks * BLOCK_BYTES / median / 1e9
    print(f"{what:40} {1e3 * median:8.2f} ms median {1e3 * p90:8.2f} ms p90 {rate:8.2f} GB/s")


def main() -> None:
    for name, value in ucx_environment().items():
        os.environ.setdefault(name, value)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=owner, args=(theirs,), daemon=True)
    process.start()
    asyncio.run(read(cast("Connection", ours)))
    process.join(TIMEOUT_S)


if __name__ == "__main__":
    main()
