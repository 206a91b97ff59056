"""How long a plan will take, term by term: for every policy's plan; `predicted_time` chooses by it.

TTFT = queue(P) + min(prefill of what P lacks, fetch from the best holder + prefill of the rest)
then the exposed part of the transfer to D, and D's inter-token latency with this sequence in its batch
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.views import MAX_ALTERNATES, ClusterView, Plan, Prediction, RequestView, WorkerView

# A worker that prefills what it decodes does both in one step, of about so many prompt tokens.
CHUNK_TOKENS = 512


def best_holder(cluster: ClusterView) -> WorkerView | None:
    """The worker from which more of the prompt can be fetched than from any other."""
    return max(cluster.holders, key=lambda worker: worker.cached_tokens, default=None)


def first_token(
    request: RequestView, cluster: ClusterView, worker: WorkerView, holder: WorkerView | None
) -> tuple[float, float, int]:
    """Seconds of prefill and of fetch, and how many tokens are fetched, if `worker` prefills."""
    cached = min(worker.cached_tokens, request.num_prompt_tokens - 1)  # the last token is always computed
    cost = worker.costs.prefill
    alone_s = cost.seconds(request.num_prompt_tokens - cached, cached)
    if holder is None or holder.cached_tokens <= worker.cached_tokens:
        return alone_s, 0.0, 0
    reach = min(holder.cached_tokens, request.num_prompt_tokens - 1)
    num_bytes = (reach - cached) * cluster.token_bytes
    fetch_s = cluster.transfer(holder.worker_id, worker.worker_id).seconds(num_bytes)
    rest_s = cost.seconds(request.num_prompt_tokens - reach, reach)
    if num_bytes and fetch_s + rest_s < alone_s:
        return rest_s, fetch_s, reach - cached
    return alone_s, 0.0, 0


def step_s(request: RequestView, decode: WorkerView) -> float:
    """A decode step with this sequence added. A pool that overflows makes sequences wait, and so counts as slower."""
    context = decode.active_tokens + request.num_prompt_tokens
    crowding = max(1.0, context / max(1, decode.capacity_tokens))
    return crowding * decode.costs.decode.seconds(decode.active_sequences + 1, context)


def of_pair(
    request: RequestView,
    cluster: ClusterView,
    prefill: WorkerView,
    decode: WorkerView,
    first: tuple[float, float, int],
) -> Prediction:
    """`prefill` hands over to `decode`; `first` is its `first_token`."""
    prefill_s, fetch_s, fetched = first
    missing = max(0, request.num_prompt_tokens - decode.cached_tokens)
    link = cluster.transfer(prefill.worker_id, decode.worker_id)
    transfer_s = link.latency_s + missing * cluster.token_bytes * link.byte_s
    last_chunk = min(1.0, CHUNK_TOKENS / max(1, missing))  # it can not be read before it is computed
    exposed_s = max(transfer_s - prefill_s, transfer_s * last_chunk)
    return Prediction(
        prefill.queue_s,
        prefill_s,
        fetch_s,
        transfer_s,
        exposed_s,
        step_s(request, decode),
        prefill.cached_tokens,
        fetched,
    )


def of_local(request: RequestView, decode: WorkerView, first: tuple[float, float, int]) -> Prediction:
    """`decode` prefills itself: each chunk shares its step with the sequences that it decodes, which wait for it."""
    prefill_s, fetch_s, fetched = first
    itl_s = step_s(request, decode)
    if decode.active_sequences and prefill_s:
        computed = max(1, request.num_prompt_tokens - decode.cached_tokens - fetched)
        num_chunks = -(-computed // CHUNK_TOKENS)
        own_s = decode.costs.decode.seconds(decode.active_sequences, decode.active_tokens)
        itl_s = max(itl_s, own_s + prefill_s / num_chunks)
        prefill_s += own_s * num_chunks
    return Prediction(decode.queue_s, prefill_s, fetch_s, 0.0, 0.0, itl_s, decode.cached_tokens, fetched)


def predict(
    request: RequestView, cluster: ClusterView, decode: WorkerView, prefill: WorkerView | None
) -> Prediction:
    """Of any pair; `prefill` None: the decode worker prefills itself."""
    first = first_token(request, cluster, prefill or decode, best_holder(cluster))
    if prefill is None:
        return of_local(request, decode, first)
    return of_pair(request, cluster, prefill, decode, first)


def planned(
    request: RequestView,
    cluster: ClusterView,
    decode: WorkerView,
    prefill: Sequence[WorkerView],
    reason: str,
) -> Plan:
    """The plan with its prediction; of `prefill`, best first, the alternates that are too many are left out."""
    prediction = predict(request, cluster, decode, prefill[0] if prefill else None)
    return Plan(decode, tuple(prefill[: 1 + MAX_ALTERNATES]), prediction, reason)
