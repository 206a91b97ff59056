"""`headrace bench router`: what a router costs, with workers that compute nothing.

    decision   a view of so many workers and blocks; prompts of which all workers have the first 1,024 tokens and one
               worker the most of the rest, drawn anew each time: match alone, then snapshot, match and policy
    path       client ─gRPC─▶ router ─gRPC─▶ worker that answers at once, all three in this process, beside the same
               client at the worker's own door. Latency one by one; throughput with 64 answers, a token each a step

No model is loaded and no directory runs: the view is filled by hand.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import tokenizers
from tokenizers import models

from headrace.block_hash import DIGEST_BYTES, HashRoot, block_hashes
from headrace.config import RouterSettings, RpcSettings
from headrace.directory.records import Role, WorkerLoad, WorkerRecord
from headrace.directory.view import DirectoryView
from headrace.model_config import ModelConfig, ModelFiles
from headrace.rpc.channel import open_channel
from headrace.rpc.server import RpcServer
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from headrace.sampling_params import SamplingParams
from headrace.tier import Tier
from headrace.tokenizer import Tokenizer
from headrace.tokenizer.vocabulary import Vocabulary
from router.breakers import Breakers, HealthProbe
from router.dispatch import Dispatcher
from router.front_door import FrontDoor
from router.policy import load_policy
from router.requests import GenerationRequest, RequestParser, ServedModel
from router.service import InferenceService
from router.sessions import Sessions

_BLOCK_SIZE_TOKENS = 32
_SHARED_BLOCKS = 32  # of every prompt, on every worker
_EVENT_BLOCKS = 20  # stored and removed by one event
_STORE_BLOCKS = 2048
_BYTES_PER_BLOCK = 200  # while the view is filled, the digests included
_NUM_STREAMS = 64
_LATENCY_TOKENS = 200


@dataclass(frozen=True, slots=True)
class Effort:
    """How often each is done."""

    decisions: int = 500
    requests: int = 500
    steps: int = 1000  # of the relayed answers


QUICK = Effort(decisions=20, requests=5, steps=20)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the report. None: this row does not measure it."""

    workers: int
    indexed_blocks: int | None = None
    prompt_tokens: int | None = None
    match_us_p50: float | None = None
    match_us_p99: float | None = None
    decision_us_p50: float | None = None  # match included, hashing not
    decision_us_p99: float | None = None
    decisions_per_s: float | None = None
    hash_ms_p50: float | None = None  # of the prompt
    event_us_p50: float | None = None  # 20 blocks stored and 20 removed by one worker
    bytes_per_entry: float | None = None  # of a pair of block and worker in the index
    added_latency_ms_p50: float | None = None  # to the whole answer of one token
    added_latency_ms_p99: float | None = None
    relayed_tokens_per_s: float | None = None


def why_not(num_blocks: int) -> str | None:
    """Why so many blocks can not be indexed here and now; None if they can."""
    needed, free = num_blocks * _BYTES_PER_BLOCK, psutil.virtual_memory().available
    if needed <= free // 2:
        return None
    return f"it takes {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB of memory are free"


def measure_decisions(
    num_workers: int, num_blocks: int, prompts: Sequence[int], effort: Effort = Effort()
) -> Generator[Row]:
    """A row per length of prompt, as they come."""
    fleet = _Fleet(num_workers, num_blocks)
    index = fleet.view.index
    event_us = _quantiles(fleet.event_s, effort.decisions)[0] * 1e6
    for num_tokens in prompts:
        token_ids = np.random.default_rng(0).integers(0, 1 << 15, num_tokens).tolist()
        hashing = _quantiles(lambda ids=token_ids: _hash_s(ids), effort.decisions)
        matching = _quantiles(lambda n=num_tokens: fleet.match_s(n), effort.decisions)
        deciding = _quantiles(lambda ids=token_ids: fleet.decision_s(ids), effort.decisions)
        yield Row(
            workers=num_workers,
            indexed_blocks=len(index),
            prompt_tokens=num_tokens,
            match_us_p50=matching[0] * 1e6,
            match_us_p99=matching[1] * 1e6,
            decision_us_p50=deciding[0] * 1e6,
            decision_us_p99=deciding[1] * 1e6,
            decisions_per_s=1 / deciding[2],
            hash_ms_p50=hashing[0] * 1e3,
            event_us_p50=event_us,
            bytes_per_entry=index.num_bytes / index.num_entries,
        )


def _hash_s(token_ids: list[int]) -> float:
    root = HashRoot("bench", "bench", _BLOCK_SIZE_TOKENS, "bfloat16")
    return _seconds(lambda: block_hashes(root, token_ids))


def measure_path(effort: Effort = Effort()) -> Row:
    """The way of a request and of its tokens through the router."""
    return asyncio.run(_measure_path(effort))


class _Fleet:
    """A dispatcher whose view has workers, half of them to prefill, and blocks at random, each held by one of them."""

    def __init__(self, num_workers: int, num_blocks: int) -> None:
        self._random = np.random.default_rng(0)
        self.view = DirectoryView(max_index_blocks=num_blocks + _SHARED_BLOCKS)
        self._shared = self._digests(_SHARED_BLOCKS)
        self._samples: list[list[bytes]] = []  # of each worker's own blocks
        self._names: list[str] = []
        for number in range(num_workers):
            role = Role.PREFILL if number % 2 else Role.DECODE
            self._add_worker(f"{role}-{number}", role, num_blocks // num_workers)
        self._dispatcher = make_dispatcher(self.view, RpcSettings(), bench_model())[1]

    def match_s(self, num_tokens: int) -> float:
        hashes = self._prompt(num_tokens // _BLOCK_SIZE_TOKENS)
        return _seconds(lambda: self.view.match(hashes))

    def decision_s(self, token_ids: list[int]) -> float:
        hashes = self._prompt(len(token_ids) // _BLOCK_SIZE_TOKENS)
        request = GenerationRequest(
            id="bench",
            label="bench",
            token_ids=token_ids,
            sampling=SamplingParams(max_tokens=1),
            open_ended=False,
            cache_salt="",
            timeout_s=1.0,
        )
        return _seconds(lambda: self._dispatcher.decide(request, hashes))

    def event_s(self) -> float:
        """Of one that exchanges some of a worker's blocks; another one takes that back."""
        worker = int(self._random.integers(len(self._names)))
        name, held = self._names[worker], self._samples[worker][-_EVENT_BLOCKS:]
        stored = dict.fromkeys(self._digests(_EVENT_BLOCKS), Tier.DEVICE)

        def apply() -> None:
            self.view.index.remove(name, held)
            self.view.index.store(name, stored)

        seconds = _seconds(apply)
        self.view.index.remove(name, stored)
        self.view.index.store(name, dict.fromkeys(held, Tier.DEVICE))
        return seconds

    def _prompt(self, num_blocks: int) -> list[bytes]:
        """The shared beginning, what one worker has, and a tail that nobody has."""
        own = self._samples[int(self._random.integers(len(self._samples)))]
        known = [*self._shared, *own][: max(1, num_blocks - 2)]
        return [*known, *self._digests(num_blocks - len(known))]

    def _add_worker(self, name: str, role: Role, num_blocks: int) -> None:
        self.view.admit(bench_record(name, role, "127.0.0.1:1"))
        self._names.append(name)
        self.view.index.store(name, dict.fromkeys(self._shared, Tier.DEVICE))
        sample: list[bytes] = []
        for start in range(0, num_blocks, _STORE_BLOCKS):
            sample = self._digests(min(num_blocks - start, _STORE_BLOCKS))
            self.view.index.store(name, dict.fromkeys(sample, Tier.DEVICE))
        self._samples.append(sample)

    def _digests(self, count: int) -> list[bytes]:
        data = self._random.bytes(count * DIGEST_BYTES)
        return [data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES)]


class _InstantWorker(worker_pb2_grpc.WorkerServicer):
    """A step as soon as the one before is written: a token for every answer that is not over."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[worker_pb2.StepFrame]:
        running: dict[str, int] = {}  # tokens to come, by request
        news = asyncio.Event()

        async def read() -> None:
            async for message in request_iterator:
                if message.HasField("start"):
                    running[message.start.request_id] = message.start.sampling.max_tokens
                    news.set()

        reader = asyncio.create_task(read())
        try:
            yield worker_pb2.StepFrame(incarnation=self._incarnation)
            while await news.wait():
                yield self._step(running)
                if not running:
                    news.clear()
        finally:
            reader.cancel()

    async def Status(self, request: worker_pb2.StatusRequest, context: Any) -> worker_pb2.StatusResponse:
        return worker_pb2.StatusResponse()

    def _step(self, running: dict[str, int]) -> worker_pb2.StepFrame:
        frame = worker_pb2.StepFrame(incarnation=self._incarnation)
        for request_id in list(running):
            delta = frame.deltas.add(request_id=request_id, token_ids=[65])
            running[request_id] -= 1
            if not running[request_id]:
                del running[request_id]
                delta.finish_reason = "length"
                delta.end.SetInParent()
        return frame


@dataclass(frozen=True, slots=True)
class _Doors:
    router: inference_pb2_grpc.InferenceStub
    worker: worker_pb2_grpc.WorkerStub


@asynccontextmanager
async def _router_and_worker() -> AsyncGenerator[_Doors]:
    rpc, model = RpcSettings(), bench_model()
    async with AsyncExitStack() as stack:
        worker_server = RpcServer(rpc, [])
        worker_pb2_grpc.add_WorkerServicer_to_server(_InstantWorker("of decode-0"), worker_server.grpc_server)
        worker_address = await worker_server.start()
        stack.push_async_callback(worker_server.stop, 0)
        view = DirectoryView()
        view.admit(bench_record("decode-0", Role.DECODE, worker_address))
        sessions, dispatcher = make_dispatcher(view, rpc, model)
        stack.push_async_callback(sessions.close)
        server = RpcServer(rpc, [])
        door = FrontDoor(RequestParser(model, 1 << 20), dispatcher, 60.0)
        service = InferenceService(door, model)
        inference_pb2_grpc.add_InferenceServicer_to_server(service, server.grpc_server)
        address = await server.start()
        stack.push_async_callback(server.stop, 0)
        to_router, to_worker = open_channel(address, rpc), open_channel(worker_address, rpc)
        stack.push_async_callback(to_router.close)
        stack.push_async_callback(to_worker.close)
        yield _Doors(inference_pb2_grpc.InferenceStub(to_router), worker_pb2_grpc.WorkerStub(to_worker))


async def _measure_path(effort: Effort) -> Row:
    async with _router_and_worker() as doors:
        call = doors.worker.Session()
        await call.read()
        through: list[float] = []
        direct: list[float] = []
        for number in range(effort.requests + 1):
            through.append(await _through_router(doors.router))
            direct.append(await _at_the_worker(call, str(number)))
        call.cancel()
        added = np.array(through[1:]) - np.median(direct[1:])  # the first connects
        started = time.perf_counter()
        counts = await asyncio.gather(
            *(_num_received(doors.router, effort.steps) for _ in range(_NUM_STREAMS))
        )
        seconds = time.perf_counter() - started
    low, high = np.quantile(added, (0.5, 0.99)).tolist()
    return Row(
        workers=1,
        prompt_tokens=_LATENCY_TOKENS,
        added_latency_ms_p50=low * 1e3,
        added_latency_ms_p99=high * 1e3,
        relayed_tokens_per_s=sum(counts) / seconds,
    )


async def _through_router(stub: inference_pb2_grpc.InferenceStub) -> float:
    started = time.perf_counter()
    await _num_received(stub, 1)
    return time.perf_counter() - started


async def _num_received(stub: inference_pb2_grpc.InferenceStub, max_tokens: int) -> int:
    """Tokens of an answer to a prompt of its own."""
    message = inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingParams(max_tokens=max_tokens))
    message.token_ids.ids.extend(np.random.randint(0, 256, _LATENCY_TOKENS).tolist())
    count = 0
    async for response in stub.Generate(message, timeout=60):
        count += len(response.token_ids)
    return count


async def _at_the_worker(call: Any, request_id: str) -> float:
    started = time.perf_counter()
    start = worker_pb2.StartRequest(request_id=request_id, token_ids=[65] * _LATENCY_TOKENS)
    start.sampling.max_tokens = 1
    await call.write(worker_pb2.SessionRequest(start=start))
    frame = await call.read()
    assert frame is not grpc.aio.EOF
    return time.perf_counter() - started


def bench_model() -> ServedModel:
    """A model by name, and a tokenizer whose tokens are bytes."""
    config = ModelConfig(
        architecture="llama",
        num_layers=1,
        hidden_size=1,
        intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=1 << 15,
        max_model_tokens=1 << 17,
        rope_theta=1.0,
        rms_norm_eps=1.0,
        tie_word_embeddings=True,
    )
    files = ModelFiles("bench", Path(), "safetensors", config, "bench", "bench", frozenset())
    vocabulary = Vocabulary(
        backend=tokenizers.Tokenizer(models.BPE()),
        token_bytes=[bytes([byte]) for byte in range(256)],
        bos_id=None,
        eos_id=None,
        adds_bos=False,
        strips_leading_space=False,
        chat_template=None,
    )
    return ServedModel("bench", files, Tokenizer(vocabulary), config.max_model_tokens)


def bench_record(worker_id: str, role: Role, address: str) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        role=role,
        address=address,
        incarnation=f"of {worker_id}",
        model_name="bench",
        model_fingerprint="bench",
        tokenizer_fingerprint="bench",
        kv_dtype="bfloat16",
        block_size_tokens=_BLOCK_SIZE_TOKENS,
        num_blocks=1 << 20,
        max_model_tokens=1 << 17,
        vocab_size=1 << 15,
        transport="local",
        draining=False,
        load=WorkerLoad(running=0, waiting=0, waiting_tokens=0, free_blocks=1 << 20, cached_blocks=0),
    )


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _quantiles(run: Callable[[], float], num_runs: int) -> tuple[float, float, float]:
    """p50, p99 and mean of what `run` returns. The first run is for warming up."""
    run()
    times = [run() for _ in range(num_runs)]
    low, high = np.quantile(times, (0.5, 0.99)).tolist()
    return low, high, sum(times) / len(times)


def make_dispatcher(view: DirectoryView, rpc: RpcSettings, model: ServedModel) -> tuple[Sessions, Dispatcher]:
    """As a router makes them, with default settings."""
    settings = RouterSettings()
    sessions = Sessions(rpc, view.mark_gone, settings.max_unread_tokens)
    breakers = Breakers(HealthProbe(view, rpc))
    return sessions, Dispatcher(view, sessions, breakers, load_policy(settings.policy), model, settings)
