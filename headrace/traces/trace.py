"""A trace: who arrived when, how long prompt and answer were, and which blocks of the prompt others have in common.

Block ids are chained: two prompts with equal id at a position are equal up to the end of that block. The last block of
a prompt may be a part of one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, replace
from random import Random

THINK_CAP_S = 60.0


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`at_s` counts from the start of the trace. In a session's later turns it is only what was recorded: they arrive
    `think_s` after the previous answer.
    """

    at_s: float
    num_input: int  # tokens of the prompt, at least 1
    num_output: int  # of the answer
    blocks: tuple[int, ...] = ()  # empty: not known
    session: str = ""
    think_s: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    format: str
    sha256: str  # of the file, uncompressed
    block_tokens: int  # 0: the format has no blocks
    requests: tuple[TraceRequest, ...]
    relative: bool = False  # times count from the start of each session: it has to be given one

    @property
    def has_blocks(self) -> bool:
        return any(request.blocks for request in self.requests)

    def up_to(self, max_input: int) -> Trace:
        """Without the requests whose prompts are longer."""
        kept = tuple(request for request in self.requests if request.num_input <= max_input)
        return replace(self, requests=kept)

    def dejittered(self, seed: int) -> Trace:
        """Requests that a coarse clock put at one time, spread evenly at random up to the next time, in their order.

        Only where the clock is coarse: two or more requests at each time, on average.
        """
        ticks = sorted({request.at_s for request in self.requests})
        if self.relative or len(ticks) < 2 or len(self.requests) < 2 * len(ticks):
            return self
        gaps_s = [after - before for before, after in itertools.pairwise(ticks)]
        width_s = dict(zip(ticks, [*gaps_s, gaps_s[-1]], strict=True))
        random = Random(seed)
        spread: list[TraceRequest] = []
        for at_s, group in itertools.groupby(self.in_order().requests, key=lambda request: request.at_s):
            tick = list(group)
            times = sorted(at_s + random.random() * width_s[at_s] for _ in tick)
            spread += [replace(request, at_s=time_s) for request, time_s in zip(tick, times, strict=True)]
        return replace(self, requests=tuple(spread))

    def with_starts(self, mean_gap_s: float, seed: int, think_cap_s: float = THINK_CAP_S) -> Trace:
        """Sessions that start as a Poisson process, in the order of the file, and in which nobody thinks for longer
        than the cap. A trace whose times are not of each session's own stays as it is.
        """
        if not self.relative:
            return self
        random, next_start_s = Random(seed), 0.0
        starts_s: dict[str, float] = {}  # less what was cut from pauses so far
        recorded_s: dict[str, float] = {}  # of the turn before
        moved: list[TraceRequest] = []
        for request in self.requests:
            session = request.session
            if session not in starts_s:
                starts_s[session] = next_start_s
                next_start_s += random.expovariate(1 / mean_gap_s)
            pause_s = request.at_s - recorded_s.get(session, request.at_s)
            starts_s[session] -= max(0.0, min(request.think_s or 0.0, pause_s) - think_cap_s)
            recorded_s[session] = request.at_s
            think_s = None if request.think_s is None else min(request.think_s, think_cap_s)
            moved.append(replace(request, at_s=request.at_s + starts_s[session], think_s=think_s))
        return replace(self, requests=tuple(moved), relative=False).in_order()

    def faster(self, factor: float) -> Trace:
        """Arrivals `factor` times as dense. How long people think does not change."""
        return replace(self, requests=tuple(replace(r, at_s=r.at_s / factor) for r in self.requests))

    def times(self, copies: int) -> Trace:
        """So many of it at once, which share nothing but with themselves."""
        if copies == 1:
            return self
        size = 1 + max((block for request in self.requests for block in request.blocks), default=0)
        parts = (
            _copy(request, number, number * size) for number in range(copies) for request in self.requests
        )
        return replace(self, requests=tuple(parts)).in_order()

    def in_order(self) -> Trace:
        return replace(self, requests=tuple(sorted(self.requests, key=lambda request: request.at_s)))

    def by_session(self) -> dict[str, list[TraceRequest]]:
        """Those that belong to one, in the order of their turns."""
        sessions: defaultdict[str, list[TraceRequest]] = defaultdict(list)
        for request in self.requests:
            if request.session:
                sessions[request.session].append(request)
        return dict(sessions)


def _copy(request: TraceRequest, number: int, offset: int) -> TraceRequest:
    blocks = tuple(block + offset for block in request.blocks)
    session = f"{request.session}/{number}" if request.session else ""
    return replace(request, blocks=blocks, session=session)


def num_matched_tokens(request: TraceRequest, num_blocks: int, block_tokens: int) -> int:
    """Of the prompt, in its first so many blocks, of which the last may be a part of one."""
    return min(num_blocks * block_tokens, request.num_input)
