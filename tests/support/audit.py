"""The block audit that ends a test: everything was given back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import grpc

from headrace.engine.block_pool import PoolAudit
from headrace.rpc.v1 import worker_pb2


def assert_sound(audit: PoolAudit) -> None:
    """Every block is accounted for, whatever is going on."""
    assert audit.problems == []
    parts = audit.free + audit.active + audit.cached + audit.held + audit.filling + audit.quarantined
    assert parts == audit.total, audit
    assert audit.host_free + audit.host_cached + audit.host_held == audit.host_total, audit


def assert_idle_pool(audit: PoolAudit) -> None:
    """Nothing runs, nothing is held: free + cached = total."""
    assert_sound(audit)
    assert (audit.active, audit.held, audit.filling, audit.quarantined) == (0, 0, 0, 0), audit
    assert audit.host_held == 0, audit
    assert audit.free + audit.cached == audit.total


def is_idle(status: worker_pb2.StatusResponse) -> bool:
    """The same of a worker that may not be there yet; fails at once for what its own audit found."""
    blocks = status.blocks
    assert not blocks.problems, status
    is_free = blocks.free + blocks.cached == blocks.total and not blocks.host_held
    return is_free and not (status.running or status.waiting)


async def until_idle(
    name: str, ask: Callable[[], Awaitable[worker_pb2.StatusResponse]], timeout_s: float
) -> None:
    """Ask for the status until it is that of an idle worker; fails after the deadline."""
    status: object = "never answered"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                with suppress(grpc.aio.AioRpcError):
                    status = await ask()
                    if is_idle(status):
                        return
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{name} does not get idle: {status}") from None
