"""A prefill and a decode worker of a local cluster under Poisson arrivals: latencies, and what idle workers cost.

python bench/compare/split.py --rate 0.6 --requests 24 --prompt 512 --answer 64 --json split.json

Latencies count from the scheduled time of a request, so a late client makes them worse, never better.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

from headrace import config
from headrace.bench.report import machine_facts
from headrace.cluster.local_cluster import LocalCluster
from headrace.model_store import resolve
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc

_IDLE_S = 10.0
_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Outcome:
    scheduled_at: float
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.scheduled_at

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.token_times)]


async def ask(
    stub: inference_pb2_grpc.InferenceStub, token_ids: list[int], num_tokens: int, at: float
) -> Outcome:
    await asyncio.sleep(max(0.0, at - time.monotonic()))
    outcome = Outcome(at)
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=token_ids),
        sampling=inference_pb2.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True),
    )
    call: Any = stub.Generate(request, timeout=_TIMEOUT_S)
    async for response in call:
        outcome.token_times += [time.monotonic()] * len(response.token_ids)
    assert len(outcome.token_times) == num_tokens
    return outcome


async def load(address: str, args: argparse.Namespace, vocab_size: int) -> list[Outcome]:
    """Prompts of random tokens, no two alike; two to get warm first."""
    random = np.random.default_rng(args.seed)
    prompts = random.integers(0, vocab_size, (args.requests + 2, args.prompt)).tolist()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for prompt in prompts[args.requests :]:
            await ask(stub, prompt, args.answer, time.monotonic())
        arrivals = time.monotonic() + np.cumsum(random.exponential(1 / args.rate, args.requests))
        pairs = zip(prompts, arrivals.tolist(), strict=False)
        return await asyncio.gather(*(ask(stub, prompt, args.answer, at) for prompt, at in pairs))


def process_at(address: str) -> psutil.Process:
    port = int(address.rpartition(":")[2])
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    [pid] = {c.pid for c in listening if c.laddr and c.laddr.port == port}
    return psutil.Process(pid)


def idle_shares(processes: dict[str, psutil.Process]) -> dict[str, float]:
    """Of one core, while nothing is asked of them."""
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    time.sleep(_IDLE_S)
    return {name: (sum(p.cpu_times()[:2]) - before[name]) / _IDLE_S for name, p in processes.items()}


def peak_bytes(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{p}_ms": round(1e3 * float(np.percentile(values, p)), 1) for p in (50, 90, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=0.6, help="requests per second")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--answer", type=int, default=64, help="tokens")
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers")
    parser.add_argument("--decode", type=int, default=1, help="decode workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="a setting, as in `headrace up --set`")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = config.load(assignments=args.set)
    vocab_size = resolve(settings.model.ref, cache_dir=settings.model.cache_dir).config.vocab_size
    with LocalCluster(settings, num_prefill=args.prefill, num_decode=args.decode) as cluster:
        processes = {name: process_at(address) for name, address in cluster.worker_addresses.items()}
        idle = idle_shares(processes)
        outcomes = asyncio.run(load(cluster.router_address, args, vocab_size))
        peaks = {name: peak_bytes(process) for name, process in processes.items()}
    seconds = max(o.token_times[-1] for o in outcomes) - min(o.scheduled_at for o in outcomes)
    result = {
        "machine": machine_facts(),
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "ttft": percentiles([outcome.ttft_s for outcome in outcomes]),
        "itl": percentiles([gap for outcome in outcomes for gap in outcome.gaps_s]),
        "output_tokens_per_s": round(len(outcomes) * args.answer / seconds, 1),
        "idle_share_of_a_core": {name: round(share, 4) for name, share in idle.items()},
        "peak_rss_mb": {name: round(peak / 1e6) for name, peak in peaks.items()},
    }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
