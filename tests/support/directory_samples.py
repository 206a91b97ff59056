"""Records, digests, and a directory that can be cut off, for tests of the directory and of what stands on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headrace.directory.base import BlockSnapshot, Directory
from headrace.directory.prefix_index import Match
from headrace.directory.records import DirectoryEvent, Role, WorkerLoad, WorkerRecord
from headrace.errors import Unavailable
from headrace.tier import Tier

_DEADLINE_S = 20.0  # of what happens at once on an idle machine

RECORD = WorkerRecord(
    worker_id="decode-0",
    role=Role.DECODE,
    address="127.0.0.1:7000",
    incarnation="first",
    model_name="a-model",
    model_fingerprint="model-fingerprint",
    tokenizer_fingerprint="tokenizer-fingerprint",
    kv_dtype="float32",
    block_size_tokens=32,
    num_blocks=1000,
    max_model_tokens=2048,
    vocab_size=49152,
    transport="local",
    draining=False,
    load=WorkerLoad(running=1, waiting=2, waiting_tokens=300, free_blocks=400, cached_blocks=500),
)


def record(**changes: Any) -> WorkerRecord:
    return replace(RECORD, **changes)


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def digests(*numbers: int) -> list[bytes]:
    return [digest(number) for number in numbers]


def in_tier(tier: Tier, *numbers: int) -> dict[bytes, Tier]:
    return dict.fromkeys(digests(*numbers), tier)


def on_device(*numbers: int) -> dict[bytes, Tier]:
    return in_tier(Tier.DEVICE, *numbers)


def lengths(matched: Mapping[str, Match]) -> dict[str, int]:
    """In blocks, of all tiers together."""
    return {worker_id: match.num_blocks for worker_id, match in matched.items()}


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other tasks bring about. Fails after a generous time."""
    async with asyncio.timeout(_DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


class FaultyDirectory:
    """Passes calls on to `target`.

    `cut`: every call fails. `cut_answers`: writes are done, and their answers lost. `num_lost`: so many of the
    next events never arrive.
    """

    def __init__(self, target: Directory) -> None:
        self.target = target
        self.cut = False
        self.cut_answers = False
        self.num_lost = 0
        self.num_writes = 0

    async def register(
        self, record: WorkerRecord, sequence: int, blocks: Mapping[bytes, Tier], *, take_over: bool
    ) -> bool:
        self._check()
        done = await self.target.register(record, sequence, blocks, take_over=take_over)
        return self._written(done)

    async def publish(self, record: WorkerRecord, event: DirectoryEvent) -> bool:
        self._check()
        return self._written(await self.target.publish(record, event))

    async def remove(self, worker_id: str, incarnation: str) -> None:
        self._check()
        await self.target.remove(worker_id, incarnation)

    async def workers(self) -> dict[WorkerRecord, float]:
        self._check()
        return await self.target.workers()

    async def blocks(self, worker_id: str, incarnation: str) -> BlockSnapshot | None:
        self._check()
        return await self.target.blocks(worker_id, incarnation)

    async def events(self, after: str, timeout_s: float) -> tuple[str, list[DirectoryEvent]]:
        self._check()
        position, events = await self.target.events(after, timeout_s)
        lost = min(self.num_lost, len(events))
        self.num_lost -= lost
        return position, events[lost:]

    def _check(self) -> None:
        if self.cut:
            raise Unavailable("directory at test: cut off")

    def _written(self, done: bool) -> bool:
        self.num_writes += 1
        if self.cut_answers:
            raise Unavailable("directory at test: no answer")
        return done
