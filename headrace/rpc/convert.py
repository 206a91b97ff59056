"""Plain data to protobuf messages and back, for messages between our own processes."""

from __future__ import annotations

from headrace.rpc.v1 import worker_pb2
from headrace.sampling_params import SamplingParams


def sampling_to_proto(sampling: SamplingParams) -> worker_pb2.EngineSampling:
    """Stop strings stay behind: they are the router's."""
    return worker_pb2.EngineSampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )


def sampling_from_proto(message: worker_pb2.EngineSampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )
