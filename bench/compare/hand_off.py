"""What the split costs one request: first token with and without it, and the pause behind the first token.

python bench/compare/hand_off.py --runs 15 --json hand_off.json

One prefill and one decode worker, a core each. A prompt of as many tokens as `kv.min_remote_tokens` goes to the prefill
worker; one of a token less is prefilled by the decode worker itself. The two alternate.

    pause    from the first token to the second one, less a decode step: what the hand-off still had to do, when the
             prefill was over, until the sequence could decode
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from headrace import config
from headrace.bench.report import machine_facts
from headrace.cluster.local_cluster import LocalCluster
from headrace.model_store import resolve
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc

_TIMEOUT_S = 120.0
_ANSWER_TOKENS = 12


@dataclass(slots=True)
class Outcome:
    ttft_s: float = 0.0
    pause_s: float = 0.0
    transfer_s: float = 0.0
    blocks_moved: int = 0
    times: list[float] = field(default_factory=list)


async def ask(stub: inference_pb2_grpc.InferenceStub, token_ids: list[int]) -> Outcome:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=token_ids),
        sampling=inference_pb2.SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True),
    )
    outcome, started = Outcome(), time.monotonic()
    call: Any = stub.Generate(request, timeout=_TIMEOUT_S)
    async for response in call:
        outcome.times += [time.monotonic()] * len(response.token_ids)
        outcome.transfer_s = response.hand_off.transfer_s
        outcome.blocks_moved = response.hand_off.blocks_moved
    first, *gaps = (later - earlier for earlier, later in pairwise(outcome.times))
    outcome.ttft_s = outcome.times[0] - started
    outcome.pause_s = first - statistics.median(gaps)
    return outcome


async def alternate(address: str, prompts: list[list[int]]) -> tuple[list[Outcome], list[Outcome]]:
    """Outcomes with the split, and without it. The first of each is to get warm, and left out."""
    split: list[Outcome] = []
    alone: list[Outcome] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for number, prompt in enumerate(prompts):
            if number % 2:
                alone.append(await ask(stub, prompt[:-1]))
                assert not alone[-1].blocks_moved
            else:
                split.append(await ask(stub, prompt))
                assert split[-1].blocks_moved
    return split[1:], alone[1:]


def milliseconds(values: list[float]) -> dict[str, float]:
    return {name: round(1e3 * float(np.quantile(values, q)), 2) for name, q in (("p50", 0.5), ("p90", 0.9))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunk", type=int, default=64, help="tokens of one prefill chunk")
    parser.add_argument("--chunks", type=int, default=8, help="of the prompt")
    parser.add_argument("--runs", type=int, default=15, help="with the split, and as many without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="a setting, as in `headrace up --set`")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    num_tokens = args.chunk * args.chunks
    fixed = [f"engine.max_step_tokens={args.chunk}", f"kv.min_remote_tokens={num_tokens}"]
    settings = config.load(assignments=[*fixed, *args.set])
    vocab_size = resolve(settings.model.ref, cache_dir=settings.model.cache_dir).config.vocab_size
    prompts = np.random.default_rng(args.seed).integers(0, vocab_size, (2 * args.runs + 2, num_tokens))
    with LocalCluster(settings, num_prefill=1, num_decode=1) as cluster:
        split, alone = asyncio.run(alternate(cluster.router_address, prompts.tolist()))
    chunk_s = statistics.median(outcome.transfer_s for outcome in split) / args.chunks
    differences = [a.ttft_s - b.ttft_s for a, b in zip(split, alone, strict=True)]
    result = {
        "machine": machine_facts(),
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "ttft_split_ms": milliseconds([outcome.ttft_s for outcome in split]),
        "ttft_alone_ms": milliseconds([outcome.ttft_s for outcome in alone]),
        "ttft_difference_ms": milliseconds(differences),
        "pause_split_ms": milliseconds([outcome.pause_s for outcome in split]),
        "pause_alone_ms": milliseconds([outcome.pause_s for outcome in alone]),
        "transfer_of_one_chunk_ms": round(1e3 * chunk_s, 2),
        "pause_target_ms": round(1e3 * chunk_s + 5.0, 2),
    }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
