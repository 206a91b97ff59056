"""Calls to workers by those who run the fleet."""

from __future__ import annotations

from headrace.config import RpcSettings
from headrace.directory.records import WorkerRecord
from headrace.rpc.channel import open_channel
from headrace.rpc.status import errors_of
from headrace.rpc.v1 import worker_pb2, worker_pb2_grpc

_MARGIN_S = 15.0  # for all that is not draining


async def set_role(
    record: WorkerRecord, request: worker_pb2.SetRoleRequest, rpc: RpcSettings
) -> worker_pb2.SetRoleResponse:
    """Of this incarnation. Raises HeadraceError."""
    if not request.HasField("drain_timeout_s"):
        request.drain_timeout_s = rpc.drain_timeout_s
    request.expected_incarnation = record.incarnation
    async with open_channel(record.address, rpc) as channel:
        with errors_of(record.worker_id):
            return await worker_pb2_grpc.WorkerStub(channel).SetRole(
                request, timeout=request.drain_timeout_s + _MARGIN_S
            )
