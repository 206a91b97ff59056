"""A routing decision as a message: what was predicted of each worker, and why the winner won."""

from __future__ import annotations

from headrace.rpc.v1 import inference_pb2
from router.policy.prediction import predict
from router.policy.views import ClusterView, Plan, Prediction, RequestView

_MAX_CANDIDATES = 256  # of each role


def explained(request: RequestView, cluster: ClusterView, plan: Plan) -> inference_pb2.RoutingPlan:
    """Costs a prediction per worker, so it is made only when somebody asks."""
    chosen = plan.prefill[0] if plan.prefill else None
    return inference_pb2.RoutingPlan(
        decode_worker=plan.decode.worker_id,
        prefill_workers=[worker.worker_id for worker in plan.prefill],
        reason=plan.reason,
        prediction=_message((chosen or plan.decode).worker_id, plan.prediction),
        prefill_candidates=[
            _message(worker.worker_id, predict(request, cluster, plan.decode, worker))
            for worker in cluster.prefill[:_MAX_CANDIDATES]
        ],
        decode_candidates=[
            _message(worker.worker_id, predict(request, cluster, worker, chosen))
            for worker in cluster.decode[:_MAX_CANDIDATES]
        ],
        prompt_tokens=request.num_prompt_tokens,
        ttft_target_s=request.targets.ttft_s,
        itl_target_s=request.targets.itl_s,
    )


def _message(worker_id: str, prediction: Prediction) -> inference_pb2.WorkerPrediction:
    return inference_pb2.WorkerPrediction(
        worker=worker_id,
        queue_s=prediction.queue_s,
        prefill_s=prediction.prefill_s,
        fetch_s=prediction.fetch_s,
        time_to_first_token_s=prediction.ttft_s,
        transfer_s=prediction.transfer_s,
        exposed_transfer_s=prediction.exposed_s,
        inter_token_s=prediction.itl_s,
        cached_tokens=prediction.cached_tokens,
        fetched_tokens=prediction.fetched_tokens,
    )
