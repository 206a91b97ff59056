"""A fleet inside one event loop: real gRPC, real Redis, real engines on threads of their own, in-process transport.

Workers are `WorkerProcess` objects, so everything but the process boundary is what runs in production. Faults are
switched at each worker's own transport.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.request import urlopen

import grpc
from prometheus_client.parser import text_string_to_metric_families

from headrace.cluster.worker_process import WorkerProcess
from headrace.config import Settings
from headrace.directory.records import Role
from headrace.model_config import ModelFiles
from headrace.rpc.convert import sampling_to_proto
from headrace.rpc.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from headrace.sampling_params import SamplingParams
from kv_transfer.faulty_transport import Faults, FaultyTransport
from kv_transfer.registry import create_transport
from kv_transfer.transport import BlockRegion, Transport
from tests.support.audit import until_idle

BLOCK_SIZE = 4
NUM_BLOCKS = 64
STEP_TOKENS = 16


def fleet_settings(files: ModelFiles, directory_url: str, **changes: dict[str, object]) -> Settings:
    """Small blocks and steps, short leases; `changes` by section."""
    sections: dict[str, dict[str, object]] = {
        "model": {"ref": str(files.path), "dtype": "float32"},
        "engine": {
            "block_size_tokens": BLOCK_SIZE,
            "num_blocks": NUM_BLOCKS,
            "max_step_tokens": STEP_TOKENS,
            "num_threads": 1,
        },
        "kv": {"transport": "local", "lease_ttl_s": 2.0, "min_remote_tokens": 1, "checksum": 1.0},
        "directory": {"url": directory_url},
        "rpc": {"drain_timeout_s": 5.0},
    }
    for section, fields in changes.items():
        sections[section] = {**sections.get(section, {}), **fields}
    return Settings.model_validate(sections)


class ServingWorker:
    """A worker that can be asked; `incarnation` is of its life now."""

    idle_timeout_s = 15.0  # a few leases

    def __init__(self, worker_id: str, address: str = "") -> None:
        self.worker_id = worker_id
        self.address = address
        self.incarnation = ""

    @property
    def ref(self) -> worker_pb2.PeerRef:
        return worker_pb2.PeerRef(
            worker_id=self.worker_id, address=self.address, incarnation=self.incarnation
        )

    async def status(self) -> worker_pb2.StatusResponse:
        async with grpc.aio.insecure_channel(self.address) as channel:
            return await worker_pb2_grpc.WorkerStub(channel).Status(worker_pb2.StatusRequest(), timeout=5)

    async def assert_idle(self) -> None:
        await until_idle(self.worker_id, self.status, self.idle_timeout_s)


class Worker(ServingWorker):
    """One worker in this event loop, with its faults."""

    def __init__(self, settings: Settings, role: Role, worker_id: str) -> None:
        super().__init__(worker_id)
        self.faults = Faults()
        self.process = WorkerProcess(settings, role, worker_id, make_transport=self._transport)

    async def start(self) -> None:
        self.address = await self.process.start()
        self.incarnation = (await self.status()).incarnation

    async def metrics(self) -> dict[str, float]:
        """Samples by name with labels, as Prometheus would get them: `name_total{reason="timeout"}`."""
        address = (await self.status()).metrics_address
        text = await asyncio.to_thread(
            lambda: urlopen(f"http://{address}/metrics", timeout=10).read().decode()
        )
        return {
            sample.name + _shown(sample.labels): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def _transport(self, name: str, incarnation: str, regions: Sequence[BlockRegion]) -> Transport:
        return FaultyTransport(create_transport(name, incarnation, regions), self.faults)


class Gate:
    """A worker's model, run one step at a time."""

    def __init__(self, worker: Worker) -> None:
        self._engine = worker.process._core
        self.num_begun = 0
        self._inner = self._engine._runner
        self._permits = threading.Semaphore(0)
        self._engine._runner = self

    def run(self, plan):
        self.num_begun += 1
        assert self._permits.acquire(timeout=30)
        return self._inner.run(plan)

    def copy_blocks(self, pairs):
        self._inner.copy_blocks(pairs)

    def allow(self, num_steps=1):
        self._permits.release(num_steps)

    def open(self):
        """For good."""
        self._engine._runner = self._inner
        self.allow()

    async def begun(self, num_steps):
        async with asyncio.timeout(20):
            while self.num_begun < num_steps:
                await asyncio.sleep(0.005)


def _shown(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else ""


class Answer:
    def __init__(self) -> None:
        self.choices: defaultdict[int, list[int]] = defaultdict(list)  # token ids
        self.logprobs: defaultdict[int, list[float]] = defaultdict(list)
        self.prompt_logprobs: list[inference_pb2.TokenLogprobs] = []
        self.finish_reasons: dict[int, str] = {}
        self.end = worker_pb2.SequenceEnd()
        self.started = asyncio.Event()  # the first token is here
        self.ended = asyncio.Event()

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0]


class RouterSession:
    """The router's side of a session, by hand."""

    def __init__(self, call) -> None:
        self._call = call
        self._answers: dict[str, Answer] = {}
        self._writing = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())

    async def start(
        self,
        token_ids,
        *,
        prefill=(),
        sources=(),
        request_id="r",
        salt="",
        timeout_s=20.0,
        priority=0,
        **sampling,
    ) -> Answer:
        """`sources`: pairs of a worker and how many of the prompt's blocks it is said to have."""
        params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
        answer = self._answers[request_id] = Answer()
        start = worker_pb2.StartRequest(
            request_id=request_id,
            token_ids=token_ids,
            sampling=sampling_to_proto(params),
            timeout_s=timeout_s,
            cache_salt=salt,
            priority=priority,
            prefill_workers=[worker.ref for worker in prefill],
            sources=[worker_pb2.Source(worker=worker.ref, num_blocks=num) for worker, num in sources],
        )
        await self._write(worker_pb2.SessionRequest(start=start))
        return answer

    async def answer(self, token_ids, **options) -> Answer:
        answer = await self.start(token_ids, **options)
        async with asyncio.timeout(30):
            await answer.ended.wait()
        return answer

    async def abort(self, request_id="r", choice=None) -> None:
        abort = worker_pb2.AbortRequest(request_id=request_id, choice=choice)
        await self._write(worker_pb2.SessionRequest(abort=abort))

    async def close(self) -> None:
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _write(self, message: worker_pb2.SessionRequest) -> None:
        async with self._writing:  # gRPC takes one write at a time
            await self._call.write(message)

    async def _read(self) -> None:
        while (frame := await self._call.read()) is not grpc.aio.EOF:
            for delta in frame.deltas:
                answer = self._answers[delta.request_id]
                answer.choices[delta.choice].extend(delta.token_ids)
                answer.logprobs[delta.choice].extend(entry.logprob for entry in delta.logprobs)
                if delta.HasField("prompt_logprobs"):
                    assert delta.prompt_logprobs.first_index == 1 + len(answer.prompt_logprobs)
                    answer.prompt_logprobs.extend(delta.prompt_logprobs.entries)
                if delta.token_ids:
                    answer.started.set()
                if delta.finish_reason:
                    assert delta.choice not in answer.finish_reasons
                    answer.finish_reasons[delta.choice] = delta.finish_reason
                if delta.HasField("end"):
                    answer.end = delta.end
                    answer.ended.set()


@asynccontextmanager
async def session_with(worker: Worker) -> AsyncIterator[RouterSession]:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        session = RouterSession(worker_pb2_grpc.WorkerStub(channel).Session())
        try:
            yield session
        finally:
            await session.close()


@asynccontextmanager
async def workers(settings: Settings, *roles: Role) -> AsyncIterator[list[Worker]]:
    """Started workers, one per role, named prefill-0, decode-1, … They are idle at the end, or the test fails."""
    started = [Worker(settings, role, f"{role}-{number}") for number, role in enumerate(roles)]
    try:
        await asyncio.gather(*(worker.start() for worker in started))
        yield started
        for worker in started:
            await worker.assert_idle()
    finally:
        await asyncio.gather(*(worker.process.stop() for worker in started))
