"""Composition root of the router process."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from headrace.config import Settings
from headrace.directory.redis_directory import RedisDirectory
from headrace.directory.view import DirectoryView
from headrace.directory.watcher import Watcher
from headrace.model_store import resolve
from headrace.rpc.server import RpcServer
from headrace.rpc.tls import front_door_context
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc
from headrace.rpc.vllm import vllm_engine_pb2, vllm_engine_pb2_grpc
from headrace.telemetry import serve_metrics
from headrace.tokenizer import load_tokenizer
from headrace.tracing import start_tracing
from router.breakers import Breakers, HealthProbe
from router.callers import make_callers
from router.collectors import Sources, register
from router.console import Observer
from router.console import routes as console_routes
from router.dispatch import Dispatcher
from router.front_door import FrontDoor
from router.http.generate import Generator
from router.http.routes import Pages, application
from router.http.server import HttpServer
from router.metrics import RouterMetrics
from router.policy import load_policy
from router.readiness import Readiness
from router.requests import RequestParser, ServedModel
from router.service import InferenceService
from router.sessions import Sessions
from router.vllm_service import VllmService

log = structlog.get_logger()

SERVICES = [
    inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
    vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name,
]


def served_model(settings: Settings) -> ServedModel:
    """Obtain the model's files and load its tokenizer. Raises ModelError."""
    files = resolve(settings.model.ref, cache_dir=settings.model.cache_dir).with_limit(
        settings.model.max_model_tokens
    )
    return ServedModel(
        name=settings.model.served_name or files.name,
        files=files,
        tokenizer=load_tokenizer(files),
        max_model_tokens=files.config.max_model_tokens,
    )


class Router:
    """`start`, then `stop`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.view = DirectoryView(
            max_index_blocks=settings.router.max_index_entries,
            assumed_ttl_s=settings.router.assumed_ttl_s,
            router_id=secrets.token_hex(8),
        )
        self.metrics = RouterMetrics()
        self.address = ""
        self.metrics_address = ""
        self.http_address = ""  # a URL; "": HTTP is off
        self._http: HttpServer | None = None

    @property
    def ready(self) -> bool:
        return self._readiness.ready

    async def failed(self) -> None:
        await asyncio.get_running_loop().create_future()  # nothing does that to a router

    async def start(self) -> str:
        """Serve. Returns the public address."""
        settings = self._settings
        model = served_model(settings)
        self._directory = RedisDirectory(settings.directory)
        self._watcher = Watcher(self._directory, self.view, settings.directory)
        self._watching = _supervised(self._watcher.run(), "directory watcher")
        self._breakers = Breakers(HealthProbe(self.view, settings.rpc))
        self._sessions = Sessions(settings.rpc, self._on_lost, settings.router.max_unread_tokens)
        self.dispatcher = Dispatcher(
            self.view,
            self._sessions,
            self._breakers,
            load_policy(settings.router.policy),
            model,
            settings.router,
            self.metrics,
        )
        parser = RequestParser(model, settings.router.max_prompt_bytes, settings.router.classes)
        self._tracing = start_tracing(settings.telemetry, "headrace-router", self.view.router_id)
        door = FrontDoor(
            parser,
            self.dispatcher,
            settings.router.default_timeout_s,
            make_callers(settings.security),
            tracing=self._tracing,
        )
        self.tally = door.tally
        self._readiness = Readiness(
            self.dispatcher,
            model,
            self.tally,
            settings.router.self_test_interval_s,
            settings.kv.min_remote_tokens + 1,
        )
        self._server = RpcServer(settings.rpc, SERVICES, front=settings.security)
        add_services(self._server, door, model, self.view, lambda: self.ready)
        self._observer = Observer(self.view, self._watcher, door, self._breakers, model.name)
        self._observing = _supervised(self._observer.run(), "console")
        register(self.metrics.registry, self._metric_sources(model))
        port, self._stop_metrics = serve_metrics(
            self.metrics.registry,
            settings.rpc.host,
            settings.telemetry.metrics_port,
            lambda: self.ready,
        )
        self.metrics_address = f"{settings.rpc.advertise_host or settings.rpc.host}:{port}"
        self.address = await self._server.start()
        await self._start_http(door, model)
        self._watching_readiness = _supervised(self._readiness.run(self._on_readiness), "readiness")
        log.info(
            "router serves",
            address=self.address,
            http=self.http_address,
            metrics=self.metrics_address,
            model=model.name,
        )
        return self.address

    async def stop(self) -> None:
        """Refuse new requests, let running ones end within the drain time, leave nothing behind."""
        self._observing.cancel()  # those who follow the console would stay for ever
        await asyncio.gather(
            self._server.stop(self._settings.rpc.drain_timeout_s),
            *([self._http.stop()] if self._http else []),
        )
        tasks = (self._watching_readiness, self._watching)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, self._observing, return_exceptions=True)
        await self._sessions.close()
        await self._breakers.close()
        await self._directory.close()
        await asyncio.to_thread(self._stop_metrics)
        await asyncio.to_thread(self._tracing.close)

    async def _start_http(self, door: FrontDoor, model: ServedModel) -> None:
        settings, rpc = self._settings.http, self._settings.rpc
        if not settings.enabled:
            return
        pages = Pages(door, model, self.metrics.registry, lambda: self.ready)
        generator = Generator(door, model, settings.max_prompts)
        app = application(pages, generator, door, settings, console_routes(self._observer, door))
        tls = front_door_context(rpc, self._settings.security)
        self._http = HttpServer(app, settings, rpc.drain_timeout_s, tls)
        self.http_address = await self._http.start(
            settings.host or rpc.host, settings.port, rpc.advertise_host
        )

    def _on_lost(self, worker_id: str, incarnation: str) -> None:
        self.view.mark_gone(worker_id, incarnation)
        self._breakers.failed(incarnation)

    async def _on_readiness(self, ready: bool) -> None:  # noqa: FBT001 - a callback
        await self._server.set_ready(ready=ready)

    def _metric_sources(self, model: ServedModel) -> Sources:
        return Sources(
            model_name=model.name,
            view=self.view,
            watcher=self._watcher,
            tally=self.tally,
            admission=self.dispatcher.admission,
            ledger=self.dispatcher.ledger,
            breakers=self._breakers,
            sessions=self._sessions,
            readiness=self._readiness,
        )


def add_services(
    server: RpcServer,
    door: FrontDoor,
    model: ServedModel,
    view: DirectoryView,
    is_ready: Callable[[], bool],
) -> None:
    """The public gRPC services, before the server starts."""
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(door, model), server.grpc_server)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(
        VllmService(door, model, view, is_ready), server.grpc_server
    )


def _supervised(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """A task that runs as long as the router; its end by an error is logged, not lost."""

    def on_end(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("background task failed", task=name, exc_info=task.exception())

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(on_end)
    return task
