"""Composition root of a worker process, whatever its role, which can change (`worker_role.py`).

    settings ─▶ model ─▶ KV cache ─▶ engine thread ─┬─▶ role services ─▶ gRPC server ─▶ directory
                             └─▶ transfer thread ───┘

Three threads do the work: the engine's, the transfer's, and the event loop for everything else.
"""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import cached_property, partial, reduce
from operator import xor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import structlog
from prometheus_client import CollectorRegistry, ProcessCollector

from decode_worker.hand_off import DecodeContext
from decode_worker.service import DecodeWorker
from headrace.block_hash import HashRoot
from headrace.clock import Deadline, SystemClock
from headrace.cluster.hosted import Report
from headrace.cluster.neighbours import Neighbours
from headrace.cluster.rank_processes import RankProcess, RankProcesses
from headrace.cluster.worker_metrics import WorkerCollector, WorkerFigures
from headrace.cluster.worker_role import WorkerRole
from headrace.config import Settings
from headrace.directory.publisher import Publisher
from headrace.directory.records import Role, RouterShare, WorkerLoad, WorkerRecord
from headrace.directory.redis_directory import RedisDirectory
from headrace.engine.block_pool import BlockPool, NamedBlock
from headrace.engine.disk_tier import BlockLayout, DiskTier
from headrace.engine.engine import Engine
from headrace.engine.kv_memory import KvMemory
from headrace.engine.load import check_parallel, load_runner, load_shard
from headrace.engine.parallel.ranks import ParallelMemory, Ranks
from headrace.engine.scheduler import Share
from headrace.engine.sequence import Constraint
from headrace.engine.shard import Shard
from headrace.engine.structured import GrammarCompiler
from headrace.engine.tiers import BlockMemory
from headrace.engine_client import EngineClient
from headrace.errors import InvalidRequest, RankLost, WorkerGone
from headrace.grammar import Grammar
from headrace.model_store import resolve
from headrace.rpc.server import RpcServer
from headrace.rpc.v1 import kv_pb2, kv_pb2_grpc, worker_pb2, worker_pb2_grpc
from headrace.telemetry import WorkerTelemetry, serve_metrics
from headrace.tier import Tier
from headrace.tokenizer import load_tokenizer
from headrace.tracing import start_tracing
from kv_transfer.carrier import Host
from kv_transfer.kv_regions import kv_regions
from kv_transfer.layout import KvLayout
from kv_transfer.leased_reads import ReadContext
from kv_transfer.metrics import KvMetrics
from kv_transfer.peers import Peers
from kv_transfer.prefix_fetch import PrefixFetcher
from kv_transfer.rank_transfers import RemoteRank
from kv_transfer.registry import create_transport
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transfers import Transfers
from kv_transfer.transport import BlockRegion, Transport
from prefill_worker.service import KvExchangeService

log = structlog.get_logger()

_WORKER_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
_KV_SERVICE = kv_pb2.DESCRIPTOR.services_by_name["KvExchange"].full_name
_ENGINE_STOP_TIMEOUT_S = 10.0
_SERVER_GRACE_S = 1.0
_DISK_CLOSE_TIMEOUT_S = 10.0
_DRAIN_POLL_S = 0.05
_LAST_WORDS_S = 2.0  # for telling requests why the worker ends
_ENGINE_POLL_S = 0.1
_MAX_HOLDS_SHOWN = 100
_MAX_SHARES = 64  # routers that are told apart in the published load
_ACCOUNT = tuple(field.name for field in worker_pb2.BlockAccount.DESCRIPTOR.fields)  # as in PoolAudit

MakeTransport = Callable[[str, str, Sequence[BlockRegion]], Transport]  # name, incarnation, regions


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Sessions too are for every role: in the wrong one the worker refuses requests, not routers."""

    def __init__(
        self,
        status: Callable[[], Any],
        decode: DecodeWorker,
        set_role: Callable[[worker_pb2.SetRoleRequest], Any],
    ) -> None:
        self._status = status
        self._decode = decode
        self._set_role = set_role

    async def Status(
        self, request: worker_pb2.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.StatusResponse:
        return await self._status()

    async def Session(
        self,
        request_iterator: AsyncIterator[worker_pb2.SessionRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[worker_pb2.StepFrame]:
        async for frame in self._decode.session(request_iterator):
            yield frame

    async def SetRole(
        self, request: worker_pb2.SetRoleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.SetRoleResponse:
        return await self._set_role(request)


class WorkerProcess:
    """`start`, then `stop`. `report` is told each stage of the start, for progress displays."""

    http_address = ""  # workers serve none

    def __init__(
        self,
        settings: Settings,
        role: Role,
        worker_id: str,
        report: Report = lambda stage: None,
        make_transport: MakeTransport = create_transport,
        log_file: Path | None = None,
    ) -> None:
        """`log_file`: of the processes of other ranks, as this one's; None: standard error."""
        self._settings = settings
        self._first_role = role
        self._worker_id = worker_id
        self._report = report
        self._make_transport = make_transport
        self._log_file = log_file
        self._num_ranks = settings.engine.tensor_parallel_size
        self._rank_processes: RankProcesses | None = None  # the other ranks, …
        self._ranks: Ranks | None = None  # … once they can be told what to do
        self._failure: RankLost | None = None
        self._has_failed = asyncio.Event()
        self._incarnation = secrets.token_hex(8)
        self._serves = False  # once the directory has it
        self._draining = False
        self._hangs = False  # the engine, in a step
        self._exchange_ready = True
        self._background: set[asyncio.Task[None]] = set()
        self._cleanup = AsyncExitStack()

    async def start(self) -> str:
        """Load the model, serve, join the directory. Returns the address. Raises HeadraceError, and leaves nothing."""
        try:
            return await self._start()
        except BaseException:
            await self._cleanup.aclose()
            raise

    async def failed(self) -> None:
        await self._has_failed.wait()
        assert self._failure is not None
        raise self._failure

    async def _start(self) -> str:
        settings = self._settings
        self._loop = asyncio.get_running_loop()
        self._host = Host.find(os.environ)
        if settings.kv.require_rdma:
            self._host.require_rdma()
        self._report("obtaining the model")
        files = await asyncio.to_thread(resolve, settings.model.ref, cache_dir=settings.model.cache_dir)
        self._files = files.with_limit(settings.model.max_model_tokens)
        self._report("loading the model")
        await asyncio.to_thread(self._load)
        self._report("starting the transport")
        await self._start_transfers()
        self._report("joining the cluster")
        await self._serve()
        record = self._record()
        log.info(
            "worker serves", role=self._role.current, address=record.address, incarnation=self._incarnation
        )
        return record.address

    async def stop(self) -> None:
        """Drain: leave the directory's candidates, admit nothing, finish, let held KV be read; then end.

        After a failure there is nothing to finish.
        """
        self._draining = True
        await self._role.close()
        self._exchange.drain()
        self._decode.drain()
        if self._failure is None:
            await self._drain()
        else:
            await self._fail_requests(self._failure)
        await self._cleanup.aclose()

    async def _drain(self) -> None:
        deadline = Deadline.after(self._settings.rpc.drain_timeout_s, SystemClock())
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await self._idle()
                await self._neighbours.evacuate(self._hottest, deadline)
                await self._idle()
        except TimeoutError:
            log.warning("drain ran out of time", seconds=self._settings.rpc.drain_timeout_s)

    async def _fail_requests(self, error: RankLost) -> None:
        """Let each be told why."""
        self._engine.post(lambda engine: engine.fail_all(error))
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._streams_ended()

    async def _streams_ended(self) -> None:
        while True:
            if not self._num_streams:
                return
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _hottest(self, max_blocks: int) -> list[NamedBlock]:
        return await self._engine.call(lambda engine: engine.hottest(max_blocks))

    def _load(self) -> None:
        engine = self._settings.engine
        if self._num_ranks > 1:
            blocks = self._load_ranks()
        else:
            self._runner, self._cache = load_runner(self._files, self._settings.model, engine)
            blocks = self._memory = KvMemory(self._cache, engine.host_memory_bytes)
        self._runner.warm_up(engine.max_step_tokens)
        self._memory.populate()
        files = self._open_disk_tier() if engine.disk_cache_dir else None
        pool = BlockPool(self._cache.num_blocks, engine.block_size_tokens, blocks, files)
        self._core = Engine(self._runner, pool, engine, self._files.eos_token_ids, SystemClock())

    def _load_ranks(self) -> BlockMemory:
        """This one's shard, and processes for the others. Returns the memory of all."""
        settings, config = self._settings, self._files.config
        check_parallel(config, settings.engine)
        if settings.kv.transport == "local":
            raise InvalidRequest(
                "kv.transport",
                "local",
                f"engine.tensor_parallel_size {self._num_ranks} needs nixl: ranks are processes",
            )
        processes = RankProcesses(settings, self._worker_id, self._incarnation, self._log_file)
        self._cleanup.push_async_callback(processes.close)
        self._rank_processes = processes
        shard = load_shard(self._files, settings.model, settings.engine, Shard(0, self._num_ranks))
        self._ranks = ranks = processes.meet(config.vocab_size, self._on_lost)
        self._runner, self._cache = shard.runner(self._files, ranks), shard.cache
        self._memory = KvMemory(self._cache, settings.engine.host_memory_bytes // self._num_ranks)
        return ParallelMemory(ranks, self._memory)

    def _on_lost(self, error: RankLost) -> None:
        """On the engine's thread."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: RankLost) -> None:
        if self._failure is None:
            self._failure = error
            log.critical("worker ends", error=str(error))
            if self._rank_processes is not None:
                self._rank_processes.kill()
            self._has_failed.set()

    def _on_rank_gone(self, process: RankProcess) -> None:
        if self._failure is None:
            self._own(asyncio.create_task(self._fail_by(process), name=f"end of rank {process.number}"))

    async def _fail_by(self, process: RankProcess) -> None:
        """The step under way may know better why."""
        await self._engine.call(lambda engine: None)
        how = await asyncio.to_thread(process.ended, _LAST_WORDS_S)
        self._fail(RankLost(f"rank {process.number} {how or 'is gone'}"))

    def _open_disk_tier(self) -> DiskTier:
        """In a directory of this worker's own; its id is the same after a restart."""
        engine = self._settings.engine
        layout = BlockLayout(
            self._files.fingerprint,
            self._cache.dtype_name,
            engine.block_size_tokens,
            self._block_bytes,
            self._num_ranks,
        )
        own = Path(engine.disk_cache_dir) / f"worker-{quote(self._worker_id, safe='')}"
        tier = DiskTier(own, layout, engine.disk_cache_bytes)
        self._cleanup.push_async_callback(asyncio.to_thread, tier.close, _DISK_CLOSE_TIMEOUT_S)
        return tier

    @property
    def _block_bytes(self) -> int:
        """Of all ranks together."""
        return self._cache.block_bytes * self._num_ranks

    async def _start_transfers(self) -> None:
        self._engine = EngineClient(
            self._core, self._files.config, self._compile_grammar, self._publish_blocks, self._hurry
        )
        transport, regions = self._settings.kv.transport, kv_regions(self._cache, self._memory)
        name = f"{self._incarnation}/0" if self._num_ranks > 1 else self._incarnation
        self._transfers = TransferThread(lambda: self._make_transport(transport, name, regions))
        self._cleanup.push_async_callback(self._transfers.close)
        await self._transfers.start()
        self._remote_ranks: list[RemoteRank] = []
        for process in self._rank_processes.each if self._rank_processes is not None else ():
            rank = await RemoteRank.open(process.control, partial(self._on_rank_gone, process))
            self._cleanup.push_async_callback(rank.close)
            self._remote_ranks.append(rank)

    async def _serve(self) -> None:
        """Everything that others see of this worker, the directory last."""
        settings = self._settings
        own = worker_pb2.PeerRef(worker_id=self._worker_id, incarnation=self._incarnation)
        transfers = Transfers(self._transfers, self._remote_ranks)
        self._peers = Peers(own, self._layout(), transfers, settings.kv, settings.rpc, self._host)
        tracing = start_tracing(settings.telemetry, f"headrace-{self._first_role}", self._worker_id)
        self._cleanup.push_async_callback(asyncio.to_thread, tracing.close)
        telemetry = WorkerTelemetry(tracing)
        metrics = self._serve_metrics(telemetry)
        self._make_services(metrics, telemetry)
        directory = RedisDirectory(settings.directory)
        self._cleanup.push_async_callback(directory.close)
        # Before the engine runs: its first step tells what is on disk from before.
        self._publisher = Publisher(directory, self._record, settings.directory)
        self._engine.thread.start()
        self._cleanup.push_async_callback(asyncio.to_thread, self._engine.thread.stop, _ENGINE_STOP_TIMEOUT_S)
        self._cleanup.push_async_callback(self._end_background)
        self._cleanup.push_async_callback(self._peers.close)

        self._server = RpcServer(settings.rpc, [_WORKER_SERVICE, _KV_SERVICE])
        kv_pb2_grpc.add_KvExchangeServicer_to_server(self._exchange, self._server.grpc_server)
        worker = WorkerService(self._status, self._decode, self._set_role)
        worker_pb2_grpc.add_WorkerServicer_to_server(worker, self._server.grpc_server)
        own.address = await self._server.start()
        self._cleanup.push_async_callback(self._server.stop, _SERVER_GRACE_S)

        await self._publisher.start()
        self._cleanup.push_async_callback(self._publisher.stop)
        await self._server.set_ready(ready=True)
        self._serves = True
        self._neighbours = Neighbours(
            directory, self._peers, metrics, lambda: self._role.current, self._set_exchange_ready
        )
        watching = asyncio.create_task(self._neighbours.run(settings.directory.worker_ttl_s / 2))
        self._cleanup.push_async_callback(_ended, watching)
        self._cleanup.push_async_callback(_ended, asyncio.create_task(self._watch_engine()))

    def _make_services(self, metrics: KvMetrics, telemetry: WorkerTelemetry) -> None:
        """What this worker does for peers and for routers."""
        settings = self._settings
        reads = ReadContext(self._peers, settings.kv, SystemClock(), self._checksums, metrics, self._own)
        block_size_tokens = settings.engine.block_size_tokens
        fetcher = PrefixFetcher(reads, self._engine, self._block_bytes, block_size_tokens)
        context = DecodeContext(
            self._engine,
            reads,
            fetcher,
            self._root_digest,
            self._files.eos_token_ids,
            block_size_tokens,
            telemetry,
        )
        self._exchange = KvExchangeService(
            self._engine, reads, fetcher, self._root_digest, block_size_tokens, telemetry
        )
        self._decode = DecodeWorker(context)
        self._peers.on_measured = self._decode.tell
        self._role = WorkerRole(self._first_role, self._worker_id, self._exchange, self._decode, self)

    def _checksums(self, block_ids: list[int]) -> list[int]:
        """Of whole blocks. On any thread but the event loop's."""
        others = [
            asyncio.run_coroutine_threadsafe(rank.checksums(block_ids), self._loop)
            for rank in self._remote_ranks
        ]
        each = [self._memory.checksums(block_ids), *(other.result() for other in others)]
        return [reduce(xor, of_ranks) for of_ranks in zip(*each, strict=True)]

    def _serve_metrics(self, telemetry: WorkerTelemetry) -> KvMetrics:
        """For Prometheus. What else the process does is not stopped by a scrape: it has its own thread."""
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        figures = WorkerFigures(
            model_name=self._model_name,
            block_size_tokens=self._settings.engine.block_size_tokens,
            num_blocks=self._cache.num_blocks,
            load=self._core.load,
            audit=lambda: self._engine.thread.last_audit,
            progress_age_s=lambda: self._engine.thread.progress_age_s(),
            ready=lambda: self._is_ready,
            peers=self._peers,
            telemetry=telemetry,
            ranks=self._ranks,
        )
        registry.register(WorkerCollector(figures))
        rpc = self._settings.rpc
        port, stop = serve_metrics(
            registry, rpc.host, self._settings.telemetry.metrics_port, lambda: self._serves and self._is_ready
        )
        self._metrics_address = f"{rpc.advertise_host or rpc.host}:{port}"
        self._cleanup.push_async_callback(asyncio.to_thread, stop)
        return KvMetrics(registry)

    async def _set_exchange_ready(self, ready: bool) -> None:  # noqa: FBT001 - a callback
        self._exchange_ready = ready
        await self._tell_readiness()

    async def _tell_readiness(self) -> None:
        for service in ("", _WORKER_SERVICE):
            await self._server.set_ready(ready=not (self._hangs or self._role.is_leaving), service=service)
        await self._server.set_ready(ready=self._exchange_ready and not self._hangs, service=_KV_SERVICE)

    async def _watch_engine(self) -> None:
        """While it hangs in a step, routers send nothing new here: the directory and the health check say so. An idle
        engine goes round all the time.
        """
        while True:
            age_s = self._engine.thread.progress_age_s()
            hangs = age_s > self._settings.engine.stall_warning_s
            if hangs != self._hangs:
                self._hangs = hangs
                log.warning("engine hangs" if hangs else "engine goes on", seconds=round(age_s, 3))
                await self._tell_readiness()
            await asyncio.sleep(_ENGINE_POLL_S)

    @property
    def _is_ready(self) -> bool:
        return not (self._hangs or self._draining or self._role.is_leaving)

    @property
    def _model_name(self) -> str:
        return self._settings.model.served_name or self._files.name

    async def others(self) -> list[WorkerRecord]:
        own = self._record()
        return [
            record
            for record in await self._neighbours.others()
            if record.layout == own.layout and record.worker_id not in self._peers.refusals
        ]

    async def tell(self, timeout_s: float) -> None:
        await self._tell_readiness()
        await self._publisher.told(timeout_s)

    async def _set_role(self, request: worker_pb2.SetRoleRequest) -> worker_pb2.SetRoleResponse:
        if request.expected_incarnation not in ("", self._incarnation):
            raise WorkerGone(
                f"{self._worker_id} is incarnation {self._incarnation}, not {request.expected_incarnation}"
            )
        try:
            role = Role(request.role)
        except ValueError:
            raise InvalidRequest("role", request.role, f"one of {', '.join(Role)}") from None
        drain_timeout_s = self._settings.rpc.drain_timeout_s
        if request.HasField("drain_timeout_s"):
            drain_timeout_s = request.drain_timeout_s
        change = await self._role.change(role, drain_timeout_s, force=request.force)
        return worker_pb2.SetRoleResponse(
            previous_role=change.before,
            drain_s=change.drain_s,
            switch_s=change.switch_s,
            handed_back=change.num_handed_back,
        )

    def _compile_grammar(self, grammar: Grammar) -> Constraint:
        """On any thread."""
        return self._grammars.compile_within(grammar, self._settings.engine.grammar_timeout_s)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        """Made for the first grammar: the tokenizer takes memory that most workers do not need."""
        config = self._files.config
        return GrammarCompiler(
            load_tokenizer(self._files), vocab_size=config.vocab_size, eos_token_ids=self._files.eos_token_ids
        )

    async def _end_background(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _idle(self) -> None:
        """Returns when no request, no prompt and no hold is left."""
        while True:
            audit = await self._engine.call(lambda engine: engine.audit())
            if not (self._num_streams or audit.held or audit.host_held or self._background):
                return
            await asyncio.sleep(_DRAIN_POLL_S)

    @property
    def _num_streams(self) -> int:
        return self._exchange.num_streams + (self._decode.num_requests if self._decode else 0)

    def _layout(self) -> KvLayout:
        config = self._files.config
        return KvLayout(
            model_fingerprint=self._files.fingerprint,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._cache.dtype_name,
            row_bytes=self._cache.row_bytes,
            block_size_tokens=self._settings.engine.block_size_tokens,
            tp_size=self._num_ranks,
            transport=self._settings.kv.transport,
        )

    def _root_digest(self, salt: str) -> bytes:
        return HashRoot(
            self._files.fingerprint,
            self._files.tokenizer_fingerprint,
            self._settings.engine.block_size_tokens,
            self._cache.dtype_name,
            salt=salt,
        ).digest()

    def _own(self, task: asyncio.Task[None]) -> None:
        """Keep a task that outlives its request; its failure is logged, never lost."""
        self._background.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("background task failed", task=task.get_name(), exc_info=task.exception())

    def _publish_blocks(self, stored: dict[bytes, Tier], removed: list[bytes]) -> None:
        self._publisher.add(stored, removed)

    def _hurry(self) -> None:
        self._publisher.hurry()

    def _kind(self) -> str:
        """Of workers that are equally fast."""
        engine = self._settings.engine
        num_threads = engine.num_threads or len(os.sched_getaffinity(0))
        ranks = f"{self._num_ranks} ranks " if self._num_ranks > 1 else ""
        return f"{platform.machine()} x{num_threads} {ranks}{engine.backend} {self._cache.dtype_name}"

    def _record(self) -> WorkerRecord:
        load = self._core.load()  # plain counters: a torn read is only a stale figure
        return WorkerRecord(
            worker_id=self._worker_id,
            role=self._role.current,
            address=self._peers.own.address,
            incarnation=self._incarnation,
            model_name=self._model_name,
            model_fingerprint=self._files.fingerprint,
            tokenizer_fingerprint=self._files.tokenizer_fingerprint,
            kv_dtype=self._cache.dtype_name,
            block_size_tokens=self._settings.engine.block_size_tokens,
            num_blocks=self._cache.num_blocks,
            max_model_tokens=self._files.config.max_model_tokens,
            vocab_size=self._files.config.vocab_size,
            transport=self._settings.kv.transport,
            draining=self._draining or self._hangs or self._role.is_leaving,
            load=WorkerLoad(
                running=load.running,
                waiting=load.waiting,
                waiting_tokens=load.waiting_tokens,
                free_blocks=load.free_blocks,
                cached_blocks=load.cached_blocks,
                prefill_tokens_per_s=load.prefill_tokens_per_s,
                decode_step_s=load.decode_step_s,
                busy_s=load.busy_s,
                at_s=load.at_s,
                shares=by_router(self._engine.shares()),
            ),
            block_bytes=self._block_bytes,
            kind=self._kind(),
        )

    async def _status(self) -> worker_pb2.StatusResponse:
        audit, load = await self._engine.call(lambda engine: (engine.audit(), engine.load()))
        return worker_pb2.StatusResponse(
            worker_id=self._worker_id,
            role=self._role.current,
            incarnation=self._incarnation,
            model=self._model_name,
            running=load.running,
            waiting=load.waiting,
            steps=load.steps,
            prefill_tokens=load.prefill_tokens,
            output_tokens=load.output_tokens,
            cached_tokens=load.cached_tokens,
            draining=self._draining or self._role.is_leaving,
            metrics_address=self._metrics_address,
            peers=self._peers.statuses(),
            holds=[
                worker_pb2.Hold(
                    owner=hold.owner,
                    reason=hold.reason,
                    reader=hold.reader,
                    num_blocks=len(hold.block_ids),
                    remaining_s=hold.expires_at_s - self._core.clock.now(),
                )
                for hold in audit.holds[:_MAX_HOLDS_SHOWN]
            ],
            blocks=worker_pb2.BlockAccount(**{name: getattr(audit, name) for name in _ACCOUNT}),
        )


def by_router(shares: Mapping[str, Share]) -> tuple[RouterShare, ...]:
    """The largest; of the others the sum."""
    each = sorted(
        (
            RouterShare(origin, share.num_sequences, share.num_tokens, share.num_tokens_to_compute)
            for origin, share in shares.items()
        ),
        key=lambda share: (share.num_pending_tokens, share.num_tokens, share.router_id),
        reverse=True,
    )
    told, others = each[:_MAX_SHARES], each[_MAX_SHARES:]
    if not others:
        return tuple(told)
    rest = RouterShare(
        "",
        sum(share.num_sequences for share in others),
        sum(share.num_tokens for share in others),
        sum(share.num_pending_tokens for share in others),
    )
    return (*told, rest)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
