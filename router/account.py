"""Where the time of an answer went, and how its KV cache came: what clients are told of it."""

from __future__ import annotations

from headrace.rpc.v1 import inference_pb2, worker_pb2
from router.request_run import Progress


def timings(end: worker_pb2.SequenceEnd, progress: Progress) -> inference_pb2.Timings:
    """Of an answer that has ended."""
    return inference_pb2.Timings(
        queue_s=progress.planned_at - progress.arrived_at,
        prefill_s=progress.first_token_at - progress.planned_at,
        time_to_first_token_s=progress.first_token_at - progress.arrived_at,
        total_s=progress.ended_at - progress.arrived_at,
        worker_queue_s=end.queue_s,
        worker_prefill_s=end.prefill_s,
        transfer_s=end.transfer_s,
        decode_s=progress.ended_at - progress.first_token_at,
        inter_token_s=end.decode_s / end.decode_tokens if end.decode_tokens else 0.0,
    )


def hand_off(end: worker_pb2.SequenceEnd, progress: Progress) -> inference_pb2.HandOff:
    return inference_pb2.HandOff(
        decode_worker=progress.plan.decode.worker_id if progress.plan else "",
        prefill_worker=end.prefill_worker,
        blocks_moved=end.blocks_moved,
        bytes_moved=end.bytes_moved,
        transfer_s=end.transfer_s,
        transport=end.transport,
        failed_attempts=end.failed_attempts,
    )
