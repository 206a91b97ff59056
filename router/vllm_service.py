"""vLLM's engine API over the same front door, so that a gateway which speaks to vLLM can stand in front of Headrace.

The fleet looks like one engine with one rank. Answers are token ids: gateways have tokenizers of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import grpc

from headrace.directory.records import Role
from headrace.directory.view import DirectoryView
from headrace.errors import AlreadyExists, InvalidRequest
from headrace.rpc.vllm import vllm_engine_pb2, vllm_engine_pb2_grpc
from router.front_door import FrontDoor
from router.request_run import Update
from router.requests import GenerationRequest, ServedModel
from router.service import accepted, begin
from router.vllm_messages import Answers, to_request

_INT32_MAX = 2**31 - 1


class VllmService(vllm_engine_pb2_grpc.VllmEngineServicer):
    def __init__(
        self, door: FrontDoor, model: ServedModel, view: DirectoryView, is_ready: Callable[[], bool]
    ) -> None:
        self._door = door
        self._model = model
        self._view = view
        self._is_ready = is_ready
        self._started_at = time.monotonic()
        self._last_request_at = 0.0  # on the wall clock
        self._running: dict[tuple[str, str], _Running] = {}  # by tenant and request id

    async def Generate(
        self, request: vllm_engine_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[vllm_engine_pb2.GenerateResponse]:
        self._last_request_at = time.time()
        generation = await accepted(self._door, to_request(request, self._model.tokenizer), context)
        answers = Answers(generation.request, streams=request.stream)
        with self._listed(generation.request) as running:
            async with aclosing(generation.updates()) as updates:
                while (update := await running.next(updates)) is not None:
                    for chunk in answers.chunks(update):
                        yield chunk
        for complete in answers.completes():
            yield complete

    async def Abort(
        self, request: vllm_engine_pb2.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> vllm_engine_pb2.AbortResponse:
        caller = await self._door.callers.caller(begin(context).authorization)
        for request_id in request.request_ids:
            running = self._running.get((caller.tenant, request_id))
            if running is not None:
                running.abort()
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> vllm_engine_pb2.HealthCheckResponse:
        healthy = self._is_ready()
        message = "" if healthy else f"no decode worker that serves {self._model.name!r} is alive"
        return vllm_engine_pb2.HealthCheckResponse(healthy=healthy, message=message)

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        await self._door.callers.caller(begin(context).authorization)
        files = self._model.files
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=files.name,
            is_generation=True,
            max_context_length=self._model.max_model_tokens,
            vocab_size=self._model.tokenizer.vocab_size,
            served_model_name=self._model.name,
            model_type=files.config.architecture,
            eos_token_ids=sorted(files.eos_token_ids),
            max_req_input_len=self._model.max_model_tokens - 1,  # an answer has one token at least
        )

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        await self._door.callers.caller(begin(context).authorization)
        admission = self._door.dispatcher.admission
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=admission.num_running + admission.num_queued,
            last_receive_timestamp=self._last_request_at,
            uptime_seconds=time.monotonic() - self._started_at,
            server_type="vllm-grpc",
            data_parallel_size=1,
        )

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> vllm_engine_pb2.GetLoadsResponse:
        await self._door.callers.caller(begin(context).authorization)
        if request.dp_rank:
            raise InvalidRequest("dp_rank", request.dp_rank, "there is rank 0 only")
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=version("headrace"),
            dp_rank_count=1,
            loads=[self._load()],
        )

    def _load(self) -> vllm_engine_pb2.SchedulerLoad:
        """Of the fleet, as the workers' last records have it, and of the router's own queue."""
        records = [
            record
            for record in self._view.workers.values()
            if record.model_fingerprint == self._model.files.fingerprint
        ]
        running = sum(record.load.running for record in records)
        waiting = sum(record.load.waiting for record in records) + self._door.dispatcher.admission.num_queued
        used = total = 0  # tokens
        for record in records:
            if record.role is not Role.PREFILL:
                used += record.used_blocks * record.block_size_tokens
                total += record.num_blocks * record.block_size_tokens
        return vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=min(used, _INT32_MAX),
            max_total_num_tokens=min(total, _INT32_MAX),
            token_usage=used / total if total else 0.0,
        )

    @contextmanager
    def _listed(self, request: GenerationRequest) -> Generator[_Running]:
        """Within the block its tenant can abort it by its id."""
        key = request.tenant, request.label
        if key in self._running:
            raise AlreadyExists(f"request {request.label!r} is running")
        self._running[key] = running = _Running()
        try:
            yield running
        finally:
            del self._running[key]


class _Running:
    """What `abort` ends at once: a wait for the next update, or the next wait."""

    def __init__(self) -> None:
        self._aborted = False
        self._waiting: asyncio.Timeout | None = None

    def abort(self) -> None:
        self._aborted = True
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())

    async def next(self, updates: AsyncGenerator[Update]) -> Update | None:
        """None: all have come, or the request was aborted."""
        if self._aborted:
            return None
        try:
            async with asyncio.timeout(None) as self._waiting:
                return await anext(updates, None)
        except TimeoutError:
            if self._aborted:
                return None
            raise
        finally:
            self._waiting = None
