"""Circuit breakers: a worker that failed several times in a row gets nothing until a health check says it is well.

closed ──5 failures in a row──▶ open ──some time──▶ probed ──SERVING──▶ half-open ──success──▶ closed
                                 ▲                    │ else: twice as long   │ failure
                                 └────────────────────┴───────────────────────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.config import RpcSettings
from headrace.directory.view import DirectoryView
from headrace.rpc.channel import open_channel

log = structlog.get_logger()

MAX_FAILURES = 5
FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_MAX_PROBES = (
    20  # about nine minutes; one that is still not well is forgotten, and starts anew if it comes back
)
_PROBE_TIMEOUT_S = 2.0
_MAX_UNPROBED = 256

Probe = Callable[[str], Awaitable[bool]]
Sleep = Callable[[float], Awaitable[None]]


class _State(Enum):
    CLOSED = auto()
    OPEN = auto()
    HALF_OPEN = auto()


@dataclass(slots=True)
class _Breaker:
    state: _State = _State.CLOSED
    num_failures: int = 0  # in a row
    pause_s: float = FIRST_PAUSE_S


class Breakers:
    """By incarnation. Those that never failed have none. Used on the event loop only; `close` at the end."""

    def __init__(self, probe: Probe, sleep: Sleep = asyncio.sleep) -> None:
        """`probe(incarnation)`: whether the worker is there and says that it serves."""
        self._probe = probe
        self._sleep = sleep
        self._breakers: dict[str, _Breaker] = {}
        self._probing: dict[str, asyncio.Task[None]] = {}

    @property
    def set_aside(self) -> set[str]:
        """Those that get nothing now."""
        return {name for name, breaker in self._breakers.items() if breaker.state is _State.OPEN}

    def state(self, incarnation: str) -> str:
        """One of "closed", "open" and "half-open"."""
        breaker = self._breakers.get(incarnation)
        return "closed" if breaker is None else breaker.state.name.lower().replace("_", "-")

    def succeeded(self, incarnation: str) -> None:
        breaker = self._breakers.get(incarnation)
        if breaker is not None and breaker.state is not _State.OPEN:
            del self._breakers[incarnation]

    def failed(self, incarnation: str) -> None:
        breaker = self._breakers.setdefault(incarnation, _Breaker())
        self._forget_oldest()
        breaker.num_failures += 1
        if breaker.state is _State.OPEN or (
            breaker.state is _State.CLOSED and breaker.num_failures < MAX_FAILURES
        ):
            return
        breaker.state = _State.OPEN
        log.warning("worker set aside", incarnation=incarnation, failures=breaker.num_failures)
        task = asyncio.create_task(self._recover(incarnation, breaker), name=f"probe {incarnation}")
        self._probing[incarnation] = task
        task.add_done_callback(lambda _: self._probing.pop(incarnation, None))

    def _forget_oldest(self) -> None:
        """Of those that no probe will end: workers that die before they fail or succeed again must not pile up."""
        unprobed = [name for name, breaker in self._breakers.items() if breaker.state is not _State.OPEN]
        if len(unprobed) > _MAX_UNPROBED:
            del self._breakers[unprobed[0]]

    async def close(self) -> None:
        tasks = list(self._probing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _recover(self, incarnation: str, breaker: _Breaker) -> None:
        """Probe, less and less often, until the worker is well."""
        for _ in range(_MAX_PROBES):
            await self._sleep(breaker.pause_s)
            breaker.pause_s = min(2 * breaker.pause_s, _LONGEST_PAUSE_S)
            if await self._probe(incarnation):
                breaker.state = _State.HALF_OPEN
                log.info("worker is tried again", incarnation=incarnation)
                return
        del self._breakers[incarnation]


class HealthProbe:
    """The standard gRPC health check of a worker that is in the view."""

    def __init__(self, view: DirectoryView, rpc: RpcSettings) -> None:
        self._view = view
        self._rpc = rpc

    async def __call__(self, incarnation: str) -> bool:
        record = next(
            (record for record in self._view.workers.values() if record.incarnation == incarnation), None
        )
        if record is None:
            return False
        channel = open_channel(record.address, self._rpc)
        try:
            check: Any = health_pb2_grpc.HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
            answer = await check(health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        finally:
            await channel.close()
        return answer.status == health_pb2.HealthCheckResponse.SERVING
