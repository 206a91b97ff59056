"""`headrace bench router`: what a router costs, with workers that compute nothing.

    decision   a view of so many workers and blocks; prompts of which all workers have the first 1,024 tokens and one
               worker the most of the rest, drawn anew each time: match alone, then snapshot, match and policy
    path       what a router adds to a request, and the tokens that it relays: `relay.py`

No model is loaded and no directory runs: the view is filled by hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np
import psutil

from headrace.bench.relay import PROMPT_TOKENS, added_latency_s, relay, router_and_worker
from headrace.bench.router_parts import BLOCK_SIZE_TOKENS, bench_model, bench_record, make_dispatcher
from headrace.block_hash import DIGEST_BYTES, HashRoot, block_hashes
from headrace.config import RpcSettings
from headrace.directory.records import Role
from headrace.directory.view import DirectoryView
from headrace.sampling_params import SamplingParams
from headrace.tier import Tier
from router.requests import GenerationRequest

_SHARED_BLOCKS = 32  # of every prompt, on every worker
_EVENT_BLOCKS = 20  # stored and removed by one event
_STORE_BLOCKS = 2048
_BYTES_PER_BLOCK = 200  # while the view is filled, the digests included
_STREAMS = (1, 16, 64, 256)  # answers at once
_MAX_ANSWER_TOKENS = 20_000


@dataclass(frozen=True, slots=True)
class Effort:
    """How often each is done."""

    decisions: int = 500
    requests: int = 500
    relayed_tokens: int = 400_000  # in all answers together


QUICK = Effort(decisions=20, requests=5, relayed_tokens=2000)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the report. None: this row does not measure it."""

    workers: int
    indexed_blocks: int | None = None
    prompt_tokens: int | None = None
    match_us_p50: float | None = None
    match_us_p99: float | None = None
    decision_us_p50: float | None = None  # match included, hashing not
    decision_us_p99: float | None = None
    decisions_per_s: float | None = None
    hash_ms_p50: float | None = None  # of the prompt
    event_us_p50: float | None = None  # 20 blocks stored and 20 removed by one worker
    bytes_per_entry: float | None = None  # of a pair of block and worker in the index
    added_latency_ms_p50: float | None = None  # to the whole answer of one token
    added_latency_ms_p99: float | None = None
    streams: int | None = None  # answers at once
    relayed_tokens_per_s: float | None = None
    relayed_messages_per_s: float | None = None
    router_cpu_us_per_token: float | None = None
    router_cpu_load: float | None = None  # of one core


def why_not(num_blocks: int) -> str | None:
    """Why so many blocks can not be indexed here and now; None if they can."""
    needed, free = num_blocks * _BYTES_PER_BLOCK, psutil.virtual_memory().available
    if needed <= free // 2:
        return None
    return f"it takes {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB of memory are free"


def measure_decisions(
    num_workers: int, num_blocks: int, prompts: Sequence[int], effort: Effort = Effort()
) -> Generator[Row]:
    """A row per length of prompt, as they come."""
    fleet = _Fleet(num_workers, num_blocks)
    index = fleet.view.index
    event_us = _quantiles(fleet.event_s, effort.decisions)[0] * 1e6
    for num_tokens in prompts:
        token_ids = np.random.default_rng(0).integers(0, 1 << 15, num_tokens).tolist()
        hashing = _quantiles(lambda ids=token_ids: _hash_s(ids), effort.decisions)
        matching = _quantiles(lambda n=num_tokens: fleet.match_s(n), effort.decisions)
        deciding = _quantiles(lambda ids=token_ids: fleet.decision_s(ids), effort.decisions)
        yield Row(
            workers=num_workers,
            indexed_blocks=len(index),
            prompt_tokens=num_tokens,
            match_us_p50=matching[0] * 1e6,
            match_us_p99=matching[1] * 1e6,
            decision_us_p50=deciding[0] * 1e6,
            decision_us_p99=deciding[1] * 1e6,
            decisions_per_s=1 / deciding[2],
            hash_ms_p50=hashing[0] * 1e3,
            event_us_p50=event_us,
            bytes_per_entry=index.num_bytes / index.num_entries,
        )


def _hash_s(token_ids: list[int]) -> float:
    root = HashRoot("bench", "bench", BLOCK_SIZE_TOKENS, "bfloat16")
    return _seconds(lambda: block_hashes(root, token_ids))


def measure_path(effort: Effort = Effort()) -> Generator[Row]:
    """The way of a request and of its tokens through the router: a row per number of answers at once."""
    with router_and_worker() as doors:
        low, high = added_latency_s(doors, effort.requests)
        for streams in _STREAMS:
            relayed = relay(doors, streams, min(_MAX_ANSWER_TOKENS, max(2, effort.relayed_tokens // streams)))
            yield Row(
                workers=1,
                prompt_tokens=PROMPT_TOKENS,
                added_latency_ms_p50=low * 1e3,
                added_latency_ms_p99=high * 1e3,
                streams=streams,
                relayed_tokens_per_s=relayed.tokens_per_s,
                relayed_messages_per_s=relayed.messages_per_s,
                router_cpu_us_per_token=relayed.cpu_us_per_token,
                router_cpu_load=relayed.cpu_load,
            )


class _Fleet:
    """A dispatcher whose view has workers, half of them to prefill, and blocks at random, each held by one of them."""

    def __init__(self, num_workers: int, num_blocks: int) -> None:
        self._random = np.random.default_rng(0)
        self.view = DirectoryView(max_index_blocks=num_blocks + _SHARED_BLOCKS)
        self._shared = self._digests(_SHARED_BLOCKS)
        self._samples: list[list[bytes]] = []  # of each worker's own blocks
        self._names: list[str] = []
        for number in range(num_workers):
            role = Role.PREFILL if number % 2 else Role.DECODE
            self._add_worker(f"{role}-{number}", role, num_blocks // num_workers)
        self._dispatcher = make_dispatcher(self.view, RpcSettings(), bench_model())[1]

    def match_s(self, num_tokens: int) -> float:
        hashes = self._prompt(num_tokens // BLOCK_SIZE_TOKENS)
        return _seconds(lambda: self.view.match(hashes))

    def decision_s(self, token_ids: list[int]) -> float:
        hashes = self._prompt(len(token_ids) // BLOCK_SIZE_TOKENS)
        request = GenerationRequest(
            id="bench",
            label="bench",
            token_ids=token_ids,
            sampling=SamplingParams(max_tokens=1),
            open_ended=False,
            cache_salt="",
            timeout_s=1.0,
        )
        return _seconds(lambda: self._dispatcher.decide(request, hashes))

    def event_s(self) -> float:
        """Of one that exchanges some of a worker's blocks; another one takes that back."""
        worker = int(self._random.integers(len(self._names)))
        name, held = self._names[worker], self._samples[worker][-_EVENT_BLOCKS:]
        stored = dict.fromkeys(self._digests(_EVENT_BLOCKS), Tier.DEVICE)

        def apply() -> None:
            self.view.index.remove(name, held)
            self.view.index.store(name, stored)

        seconds = _seconds(apply)
        self.view.index.remove(name, stored)
        self.view.index.store(name, dict.fromkeys(held, Tier.DEVICE))
        return seconds

    def _prompt(self, num_blocks: int) -> list[bytes]:
        """The shared beginning, what one worker has, and a tail that nobody has."""
        own = self._samples[int(self._random.integers(len(self._samples)))]
        known = [*self._shared, *own][: max(1, num_blocks - 2)]
        return [*known, *self._digests(num_blocks - len(known))]

    def _add_worker(self, name: str, role: Role, num_blocks: int) -> None:
        self.view.admit(bench_record(name, role, "127.0.0.1:1"))
        self._names.append(name)
        self.view.index.store(name, dict.fromkeys(self._shared, Tier.DEVICE))
        sample: list[bytes] = []
        for start in range(0, num_blocks, _STORE_BLOCKS):
            sample = self._digests(min(num_blocks - start, _STORE_BLOCKS))
            self.view.index.store(name, dict.fromkeys(sample, Tier.DEVICE))
        self._samples.append(sample)

    def _digests(self, count: int) -> list[bytes]:
        data = self._random.bytes(count * DIGEST_BYTES)
        return [data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES)]


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _quantiles(run: Callable[[], float], num_runs: int) -> tuple[float, float, float]:
    """p50, p99 and mean of what `run` returns. The first run is for warming up."""
    run()
    times = [run() for _ in range(num_runs)]
    low, high = np.quantile(times, (0.5, 0.99)).tolist()
    return low, high, sum(times) / len(times)
