"""`headrace restart`: tells the `headrace up` of this machine to do it, and watches in the directory how it goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from headrace.cli.progress import console
from headrace.cluster.running import RunningCluster, find_running
from headrace.config import DirectorySettings, Settings
from headrace.directory.redis_directory import RedisDirectory
from headrace.errors import DeadlineExceeded, InvalidRequest, Unavailable

_POLL_S = 0.2


def restart_workers(settings: Settings) -> None:
    """Returns when every worker has a new life and serves. Raises HeadraceError."""
    name, cache_dir = settings.directory.cluster, settings.model.cache_dir
    running = find_running(cache_dir, name)
    if running is None:
        raise InvalidRequest("directory.cluster", name, "no `headrace up` of this name runs on this machine")
    directory = settings.directory.model_copy(update={"url": running.directory_url})
    # For each: to drain, to start; and for a stand-in the same.
    one_s = 2 * (settings.rpc.drain_timeout_s + settings.ray.place_timeout_s + settings.ray.start_timeout_s)
    asyncio.run(_restart(running, directory, one_s))


async def _restart(running: RunningCluster, settings: DirectorySettings, one_s: float) -> None:
    directory = RedisDirectory(settings)
    try:
        old = await _incarnations(directory)
        os.kill(running.pid, signal.SIGUSR1)
        started_at = last_at = time.monotonic()
        pending = set(old)
        while pending:
            now = await _incarnations(directory)
            for worker_id in sorted(w for w in pending if now.get(w, old[w]) != old[w]):
                pending.discard(worker_id)
                last_at = time.monotonic()
                console.print(
                    f"{worker_id}: serves anew after {last_at - started_at:.1f} s, {len(pending)} to go",
                    highlight=False,
                )
            _check(running, pending, time.monotonic() - last_at, one_s)
            await asyncio.sleep(_POLL_S)
    finally:
        await directory.close()


def _check(running: RunningCluster, pending: set[str], waited_s: float, one_s: float) -> None:
    try:
        os.kill(running.pid, 0)
    except ProcessLookupError:
        raise Unavailable(f"`headrace up` (process {running.pid}) has ended meanwhile") from None
    if waited_s > one_s:
        raise DeadlineExceeded(
            f"no worker came back within {one_s:g} s, still to come: {', '.join(sorted(pending))};"
            " `headrace up` says why"
        )


async def _incarnations(directory: RedisDirectory) -> dict[str, str]:
    """By worker id. Raises Unavailable."""
    return {record.worker_id: record.incarnation for record in await directory.workers()}
