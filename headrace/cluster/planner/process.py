"""The planner as a process: looks, decides, acts, one change at a time.

    claim in Redis ─▶ look ─▶ decide ─▶ change of role: Worker.SetRole; worker added or removed: the actuator
         └ somebody else has it: stand by

Nothing depends on it: if it ends, the fleet stays as it is. Without Redis it does nothing.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from headrace.cluster.planner.actuators import Actuator
from headrace.cluster.planner.decide import POOLS, Action, Decisions, History, Kind, Targets, decide
from headrace.cluster.planner.view import Observer
from headrace.cluster.workers import set_role
from headrace.config import Settings
from headrace.directory.records import WorkerRecord
from headrace.directory.redis_directory import RedisDirectory
from headrace.errors import HeadraceError, NotFound, Unavailable
from headrace.rpc.v1 import worker_pb2
from headrace.telemetry import serve_metrics

log = structlog.get_logger()

_CLAIM = "planner"
_CLAIM_INTERVALS = 3  # it lives so long without being renewed …
_LEAST_CLAIM_S = 10.0  # … or so long: a planner on a busy machine is not dead


class PlannerMetrics:
    """For Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.active = Gauge(
            "headrace_planner_active", "1: decides; 0: stands by for another one", registry=self.registry
        )
        self.pressure = Gauge(
            "headrace_planner_pressure",
            "Load of a pool by what keeps the targets; above 1 they are missed. NaN: not known",
            ["pool"],
            registry=self.registry,
        )
        self.workers = Gauge(
            "headrace_planner_workers", "Workers of a pool", ["pool"], registry=self.registry
        )
        self.decisions = Counter(
            "headrace_planner_decisions",
            "Changes decided, by what became of them",
            ["kind", "role", "outcome"],
            registry=self.registry,
        )
        self.looks = Counter(
            "headrace_planner_looks", "Looks at the fleet", ["outcome"], registry=self.registry
        )


class Planner:
    """`start`, then `stop`."""

    http_address = ""  # it serves metrics alone

    def __init__(
        self,
        settings: Settings,
        actuator: Actuator,
        on_decision: Callable[[dict[str, Any]], None] = lambda decision: None,
    ) -> None:
        """`on_decision` gets each decision as plain data, those to do nothing as well."""
        self._settings = settings
        self._actuator = actuator
        self._on_decision = on_decision
        self.metrics = PlannerMetrics()
        self.metrics_address = ""
        self._id = secrets.token_hex(8)
        self._targets = Targets(settings.router.ttft_target_s, settings.router.itl_target_s)
        self._observer = Observer()
        # One that comes anew knows nothing of what was done before it.
        self._history = History(changed_at_s=time.monotonic())
        self._acting: asyncio.Task[None] | None = None
        self._why = ""
        self._is_lost = False

    async def start(self) -> str:
        """Returns the address of its metrics."""
        settings = self._settings
        self._directory = RedisDirectory(settings.directory)
        rpc = settings.rpc
        port, self._stop_metrics = serve_metrics(
            self.metrics.registry, rpc.host, settings.telemetry.metrics_port, lambda: not self._is_lost
        )
        self.metrics_address = f"{rpc.advertise_host or rpc.host}:{port}"
        self._running = asyncio.create_task(self._run(), name="planner")
        log.info("planner runs", metrics=self.metrics_address, dry_run=settings.planner.dry_run)
        return self.metrics_address

    async def failed(self) -> None:
        await asyncio.Event().wait()  # a look that fails is followed by the next one

    async def stop(self) -> None:
        """A change of role that is under way goes on at its worker."""
        tasks = [task for task in (self._running, self._acting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(Unavailable):
            await self._directory.claim(_CLAIM, self._id, 0)
        await self._directory.close()
        await self._actuator.close()
        await asyncio.to_thread(self._stop_metrics)

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
                if self._is_lost:
                    log.info("planner sees the fleet again")
                self._is_lost = False
            except HeadraceError as error:
                self.metrics.looks.labels("failed").inc()
                if not self._is_lost:
                    log.warning("planner does not see the fleet, nothing is changed", error=str(error))
                self._is_lost = True
            except Exception:  # one look; the next one may succeed
                self.metrics.looks.labels("failed").inc()
                log.exception("look at the fleet failed")
            await asyncio.sleep(self._settings.planner.interval_s)

    async def _look(self) -> None:
        settings = self._settings.planner
        ttl_s = max(_LEAST_CLAIM_S, _CLAIM_INTERVALS * settings.interval_s)
        if not await self._directory.claim(_CLAIM, self._id, ttl_s):
            self.metrics.active.set(0)
            self._note("another planner decides")
            self._history = History(changed_at_s=time.monotonic())
            return
        self.metrics.active.set(1)
        records = {record.worker_id: record for record in await self._directory.workers()}
        can_add, removable = await self._reach()
        view = self._observer.view(records.values(), time.monotonic(), removable)
        self.metrics.looks.labels("ok").inc()
        if self._acting is not None and not self._acting.done():
            self._note("a change is under way")
            return
        decisions = decide(view, self._history, settings, self._targets, can_add=can_add)
        self._history = decisions.history
        self._tell(decisions)
        for action in decisions.actions:
            self._acting = asyncio.create_task(self._act(action, records), name="planned change")

    async def _reach(self) -> tuple[bool, set[str]]:
        """Whether workers can be added now, and which can be removed. Roles can be changed in any case."""
        if not self._actuator.can_add:
            return False, set()
        try:
            return True, await self._actuator.removable()
        except HeadraceError as error:
            log.warning("workers can not be added or removed now", error=str(error))
            return False, set()

    async def _act(self, action: Action, records: dict[str, WorkerRecord]) -> None:
        """What fails is tried anew when it is decided anew."""
        if self._settings.planner.dry_run:
            self._count(action, "dry_run")
            return
        try:
            await self._carry_out(action, records)
        except HeadraceError as error:
            self._count(action, "failed")
            log.warning(
                "planned change failed", action=action.kind, worker=action.worker_id, error=str(error)
            )
        except Exception:  # one change; the fleet stays as it is
            self._count(action, "failed")
            log.exception("planned change failed", action=action.kind, worker=action.worker_id)
        else:
            self._count(action, "done")

    async def _carry_out(self, action: Action, records: dict[str, WorkerRecord]) -> None:
        match action.kind:
            case Kind.ADD:
                await self._actuator.add(action.role)
            case Kind.REMOVE:
                await self._actuator.remove(action.worker_id)
            case Kind.FLIP:
                record = records.get(action.worker_id)
                if record is None:
                    raise NotFound(f"{action.worker_id} is gone")
                request = worker_pb2.SetRoleRequest(role=action.role)
                answer = await set_role(record, request, self._settings.rpc)
                log.info("role changed", worker=action.worker_id, role=action.role, drain_s=answer.drain_s)

    def _count(self, action: Action, outcome: str) -> None:
        self.metrics.decisions.labels(action.kind, action.role, outcome).inc()

    def _tell(self, decisions: Decisions) -> None:
        pressures: dict[str, float | None] = {}
        for role, pressure in zip(POOLS, decisions.pressures, strict=True):
            now = pressure.now
            pressures[role] = now if now is not None and math.isfinite(now) else None
            self.metrics.workers.labels(role).set(pressure.size)
            self.metrics.pressure.labels(role).set(float("nan") if pressure.now is None else pressure.now)
        for action in decisions.actions:
            log.info(
                "planned change",
                action=action.kind,
                role=action.role,
                worker=action.worker_id,
                reason=action.reason,
                dry_run=self._settings.planner.dry_run,
            )
        if not decisions.actions:
            self._note(decisions.why)
        self._on_decision(
            {
                "pressure": pressures,
                "workers": {
                    role: pressure.size for role, pressure in zip(POOLS, decisions.pressures, strict=True)
                },
                "actions": [asdict(action) for action in decisions.actions],
                "why": decisions.why,
                "dry_run": self._settings.planner.dry_run,
            }
        )

    def _note(self, why: str) -> None:
        """Why nothing is done, when that changes."""
        if why != self._why:
            self._why = why
            log.debug("nothing to change", why=why)
