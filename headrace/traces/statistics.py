"""A trace in figures: lengths, arrivals, and how much of its prompts caches can spare.

A *hit* is a leading block of a prompt that is cached, up to the first that is not; the last block counts, though it may
be a part of one. *Infinite*: one cache for all that never evicts. Order is that of the trace.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.traces.reuse_distance import previous_accesses, reuse_distances
from headrace.traces.trace import Trace, TraceRequest, num_matched_tokens

CAPACITIES = (500, 1_000, 2_000, 5_000, 10_000, 15_000, 20_000, 30_000, 50_000, 100_000, 200_000)
_WINDOWS_S = (1, 10, 60)
_TOPS = (1, 100, 1_000, 10_000)
_TOP_SHARES = (0.001, 0.01, 0.1)

_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    mean: float
    p10: float
    p25: float
    p50: float
    p75: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        array = np.asarray(values, np.float64)
        p10, p25, p50, p75, p90, p95, p99 = np.percentile(array, (10, 25, 50, 75, 90, 95, 99)).tolist()
        return cls(float(array.mean()), p10, p25, p50, p75, p90, p95, p99, float(array.max()))


@dataclass(frozen=True, slots=True)
class Window:
    """Counts of arrivals in windows of one length."""

    seconds: int
    cv: float
    peak_over_mean: float
    empty: float  # share of the windows


@dataclass(frozen=True, slots=True)
class Arrivals:
    duration_s: float
    rate: float  # per second
    gap_cv: float  # standard deviation over mean of the gaps
    distinct_times: int
    windows: tuple[Window, ...]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Of prompt blocks. Shares lie between 0 and 1; distances are counted in different blocks, times in seconds."""

    accesses: int
    distinct: int
    repeats: int
    used_once: float  # share of the distinct ones
    hit_blocks: float  # infinite
    hit_tokens: float
    hit_full_blocks: float  # the same, where the last part of a block is never cached
    hit_full_tokens: float
    half_reused: float  # share of the requests
    mostly_reused: float  # at least 90 %
    hits_on_top: dict[int, float]  # share of the hits, by number of most-hit blocks
    accesses_to_top: dict[float, float]  # share of the accesses, by share of the blocks
    reuse_distance: Spread | None  # None: nothing is used twice
    reuse_s: Spread | None


@dataclass(frozen=True, slots=True)
class Statistics:
    name: str
    format: str
    sha256: str
    block_tokens: int
    requests: int
    sessions: int
    input_tokens: Spread
    output_tokens: Spread
    input_per_output: float
    arrivals: Arrivals | None  # None: times are of each session's own
    sharing: Sharing | None  # None: no blocks
    lru_hit_tokens: dict[int, float]  # by capacity in blocks, of one cache


OnStage = Callable[[str], None]


def statistics_of(
    trace: Trace, capacities: Iterable[int] = CAPACITIES, on_stage: OnStage | None = None
) -> Statistics:
    """`on_stage` is called with the name of each part before it is computed."""
    tell = on_stage or (lambda _: None)
    inputs = [request.num_input for request in trace.requests]
    outputs = [request.num_output for request in trace.requests]
    tell("sharing")
    sharing = sharing_of(trace) if trace.has_blocks else None
    lru: dict[int, float] = {}
    for capacity in capacities if trace.has_blocks else ():
        tell(f"a cache of {capacity:,} blocks")
        lru[capacity] = lru_hit_tokens(trace, capacity)
    return Statistics(
        name=trace.name,
        format=trace.format,
        sha256=trace.sha256,
        block_tokens=trace.block_tokens,
        requests=len(trace.requests),
        sessions=len(trace.by_session()),
        input_tokens=Spread.of(inputs),
        output_tokens=Spread.of(outputs),
        input_per_output=sum(inputs) / max(1, sum(outputs)),
        arrivals=None if trace.relative else arrivals_of(trace),
        sharing=sharing,
        lru_hit_tokens=lru,
    )


def arrivals_of(trace: Trace) -> Arrivals:
    times = np.sort(np.array([request.at_s for request in trace.requests]))
    gaps = np.diff(times)
    duration_s = float(times[-1] - times[0])
    return Arrivals(
        duration_s=duration_s,
        rate=len(times) / duration_s if duration_s else 0.0,
        gap_cv=float(gaps.std() / gaps.mean()) if duration_s else 0.0,
        distinct_times=len(np.unique(times)),
        windows=tuple(_window(times - times[0], seconds) for seconds in _WINDOWS_S if duration_s >= seconds),
    )


def _window(times: _Array, seconds: int) -> Window:
    """Of whole windows from the first arrival on; what is left at the end is not counted."""
    whole = int(times[-1] // seconds)
    counts = np.bincount((times // seconds).astype(np.int64), minlength=whole)[:whole]
    mean = counts.mean()
    return Window(
        seconds, float(counts.std() / mean), float(counts.max() / mean), float((counts == 0).mean())
    )


def sharing_of(trace: Trace) -> Sharing:
    accesses = Counter(block for request in trace.requests for block in request.blocks)
    num_accesses = accesses.total()
    hits, shares = _infinite_hits(trace)
    num_hits = hits.total()
    full_blocks, full_tokens, num_full = _full_hits(trace)
    distances, ages_s = _reuse(trace)
    prompts = sum(request.num_input for request in trace.requests)
    matched = sum(share * request.num_input for share, request in zip(shares, trace.requests, strict=True))
    most_hit = [count for _, count in hits.most_common()]
    most_used = [count for _, count in accesses.most_common()]
    return Sharing(
        accesses=num_accesses,
        distinct=len(accesses),
        repeats=num_accesses - len(accesses),
        used_once=sum(count == 1 for count in accesses.values()) / len(accesses),
        hit_blocks=num_hits / num_accesses,
        hit_tokens=matched / prompts,
        hit_full_blocks=full_blocks / max(1, num_full),
        hit_full_tokens=full_tokens / prompts,
        half_reused=sum(share >= 0.5 for share in shares) / len(shares),
        mostly_reused=sum(share >= 0.9 for share in shares) / len(shares),
        hits_on_top={top: sum(most_hit[:top]) / max(1, num_hits) for top in _TOPS},
        accesses_to_top={
            share: sum(most_used[: max(1, round(share * len(most_used)))]) / num_accesses
            for share in _TOP_SHARES
        },
        reuse_distance=Spread.of(distances) if distances else None,
        reuse_s=Spread.of(ages_s) if ages_s and not trace.relative else None,
    )


def _infinite_hits(trace: Trace) -> tuple[Counter[int], list[float]]:
    """How often each block is hit, and of each prompt the share of tokens that is."""
    seen: set[int] = set()
    hits: Counter[int] = Counter()
    shares: list[float] = []
    for request in trace.requests:
        found = list(itertools.takewhile(seen.__contains__, request.blocks))
        hits.update(found)
        shares.append(num_matched_tokens(request, len(found), trace.block_tokens) / request.num_input)
        seen.update(request.blocks)
    return hits, shares


def _full_hits(trace: Trace) -> tuple[int, int, int]:
    """Hit blocks, hit tokens, and accesses, of full blocks."""
    seen: set[int] = set()
    num_hits = num_accesses = 0
    for request in trace.requests:
        blocks = request.blocks[: request.num_input // trace.block_tokens]
        num_hits += sum(1 for _ in itertools.takewhile(seen.__contains__, blocks))
        num_accesses += len(blocks)
        seen.update(blocks)
    return num_hits, num_hits * trace.block_tokens, num_accesses


def _reuse(trace: Trace) -> tuple[list[int], list[float]]:
    """For each access to a block that was used before: different blocks used since, and seconds."""
    ids = np.array([block for request in trace.requests for block in request.blocks], np.int64)
    lengths = [len(request.blocks) for request in trace.requests]
    times = np.repeat([request.at_s for request in trace.requests], lengths)
    previous = previous_accesses(ids)
    again = previous >= 0
    return reuse_distances(previous).tolist(), (times[again] - times[previous[again]]).tolist()


def lru_hit_tokens(trace: Trace, capacity: int) -> float:
    """Share of the prompts' tokens that one cache of so many blocks spares. A prompt's last block is touched first, so
    that of equally old ones the beginnings stay.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    num_hit = 0
    for request in trace.requests:
        num_hit += _use(cache, request, capacity, trace.block_tokens)
    return num_hit / sum(request.num_input for request in trace.requests)


def _use(cache: OrderedDict[int, None], request: TraceRequest, capacity: int, block_tokens: int) -> int:
    found = sum(1 for _ in itertools.takewhile(cache.__contains__, request.blocks))
    for block in reversed(request.blocks):
        cache[block] = None
        cache.move_to_end(block)
    while len(cache) > capacity:
        cache.popitem(last=False)
    return num_matched_tokens(request, found, block_tokens)
