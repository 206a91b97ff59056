"""`headrace flip`: give a worker the other role while it runs."""

from __future__ import annotations

import asyncio

from headrace.cluster.workers import set_role
from headrace.config import Settings
from headrace.directory.records import Role, WorkerRecord
from headrace.directory.redis_directory import RedisDirectory
from headrace.errors import NotFound
from headrace.rpc.v1 import worker_pb2


def flip(
    settings: Settings, worker_id: str, role: Role, drain_timeout_s: float | None, *, force: bool
) -> str:
    """Returns what was done, in a line. Raises HeadraceError."""
    request = worker_pb2.SetRoleRequest(role=role, drain_timeout_s=drain_timeout_s, force=force)
    record, answer = asyncio.run(_flip(settings, worker_id, request))
    if answer.previous_role == role:
        return f"{record.worker_id} is a {role} worker already"
    late = f", {answer.handed_back} requests went on elsewhere" if answer.handed_back else ""
    return (
        f"{record.worker_id} was {answer.previous_role} and is {role}: drained for {answer.drain_s:.3f} s{late},"
        f" and {answer.switch_s:.3f} s beside"
    )


async def _flip(
    settings: Settings, worker_id: str, request: worker_pb2.SetRoleRequest
) -> tuple[WorkerRecord, worker_pb2.SetRoleResponse]:
    directory = RedisDirectory(settings.directory)
    try:
        records = {record.worker_id: record for record in await directory.workers()}
    finally:
        await directory.close()
    record = records.get(worker_id)
    if record is None:
        raise NotFound(f"no worker {worker_id!r}; there are {', '.join(sorted(records)) or 'none'}")
    return record, await set_role(record, request, settings.rpc)
