"""What the process of a rank other than 0 does (`rank_process.py`), over two sockets from rank 0:

steps      what to load, then every step of the engine (`headrace.engine.parallel`), on a thread
control    READs of blocks (`kv_transfer.rank_transfers`), on the event loop
"""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvloop

from headrace.config import Settings
from headrace.engine.kv_memory import KvMemory
from headrace.engine.load import load_shard
from headrace.engine.parallel.follower import Follower
from headrace.engine.parallel.group import Group, GroupBroken, find_store
from headrace.engine.parallel.link import Failure, Link, LinkClosed, pack_reply
from headrace.engine.shard import Shard
from headrace.errors import HeadraceError
from headrace.model_store import resolve
from headrace.telemetry import configure_logging
from kv_transfer import rank_transfers
from kv_transfer.kv_regions import kv_regions
from kv_transfer.nixl_transport import ucx_environment
from kv_transfer.registry import create_transport
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transport import BlockRegion

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank is told first."""

    rank: int
    size: int
    worker_id: str
    incarnation: str
    settings: Settings
    log_file: Path | None

    def pack(self) -> bytes:
        """Settings that a rank has no use for stay out of it: secrets are among them."""
        settings = self.settings.model_dump(mode="json", include={"model", "engine", "kv", "log_level"})
        log_file = None if self.log_file is None else str(self.log_file)
        return json.dumps(
            [self.rank, self.size, self.worker_id, self.incarnation, settings, log_file]
        ).encode()

    @classmethod
    def unpack(cls, message: bytes) -> Job:
        rank, size, worker_id, incarnation, settings, log_file = json.loads(message)
        path = None if log_file is None else Path(log_file)
        return cls(rank, size, worker_id, incarnation, Settings.model_validate(settings), path)


def run_rank(steps_socket: socket.socket, control: socket.socket) -> None:
    """Returns when rank 0 has gone. Raises what this rank fails by, after telling rank 0."""
    steps = Link(steps_socket)
    try:
        job = Job.unpack(steps.receive())
        configure_logging(job.settings.log_level, f"{job.worker_id}/{job.rank}", job.log_file)
        for name, value in ucx_environment().items():
            os.environ.setdefault(name, value)
        follower, memory, regions = _load(job, steps)
    except LinkClosed:
        return
    threading.Thread(target=_follow, args=(follower,), name="steps", daemon=True).start()
    uvloop.run(_serve(job, control, memory, regions))


def _load(job: Job, steps: Link) -> tuple[Follower, KvMemory, list[BlockRegion]]:
    """The shard, then the other ranks. Rank 0 is told of each, or of what failed."""
    settings, shard = job.settings, Shard(job.rank, job.size)
    try:
        files = resolve(settings.model.ref, cache_dir=settings.model.cache_dir)
        loaded = load_shard(files, settings.model, settings.engine, shard)
        memory = KvMemory(loaded.cache, settings.engine.host_memory_bytes // shard.size)
        memory.populate()
        steps.send(pack_reply())
        port = int.from_bytes(steps.receive(), "little")
        timeout_s = settings.engine.rank_timeout_s
        group = Group(find_store(port, timeout_s), shard, files.config.vocab_size, timeout_s)
        follower = Follower(steps, loaded.forward(group), memory, group)
        steps.send(pack_reply())
    except LinkClosed:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, HeadraceError) else repr(error)
        steps.send(pack_reply(Failure(text, is_own=not isinstance(error, GroupBroken))))
        raise
    return follower, memory, kv_regions(loaded.cache, memory)


def _follow(follower: Follower) -> None:
    """When rank 0 has gone, `_serve` ends as well. When this rank has failed, nothing is left to be done."""
    try:
        follower.run()
    except Exception:  # rank 0 was told
        log.exception("rank failed")
        os._exit(1)


async def _serve(job: Job, control: socket.socket, memory: KvMemory, regions: list[BlockRegion]) -> None:
    name = f"{job.incarnation}/{job.rank}"
    transfers = TransferThread(lambda: create_transport(job.settings.kv.transport, name, regions))
    await transfers.start()
    try:
        await rank_transfers.serve(control, transfers, memory.checksums)
    finally:
        await transfers.close()
