"""A recorded trace as a plan: its times, its lengths, and what its prompts have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from headrace.bench.serve.content import Piece
from headrace.bench.serve.workload import ONCE, Conversation, Plan, Turn
from headrace.errors import InvalidRequest
from headrace.traces.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Replay:
    """`length_scale` shrinks prompts, their blocks and answers alike, so what they share stays the same; `time_scale` 2
    is twice as fast. Sessions without a common clock start as a Poisson process of `session_rate` a second.
    """

    time_scale: float = 1.0
    length_scale: Fraction = Fraction(1)
    dejitter: bool = True
    start_s: float = 0.0  # of the trace's own time: only what is from here …
    end_s: float = math.inf  # … to here
    session_rate: float = 1.0
    max_requests: int | None = None

    def plan(self, trace: Trace, max_tokens: int | None, seed: int) -> tuple[Plan, int]:
        """And how many requests were left out: longer, prompt and answer together, than `max_tokens` when scaled, and
        what follows them in their session. Raises InvalidRequest.
        """
        self._check(trace)
        first_s = self.start_s or min(request.at_s for request in trace.requests)
        trace = trace.dejittered(seed) if self.dejitter else trace
        trace = trace.with_starts(1 / self.session_rate, seed).in_order()
        kept = [request for request in trace.requests if self.start_s <= request.at_s < self.end_s]
        conversations = self._conversations(kept[: self.max_requests], trace.block_tokens, first_s)
        fitting = [_within(conversation, max_tokens) for conversation in conversations]
        plan = Plan(tuple(conversation for conversation in fitting if conversation.turns))
        left_out = sum(len(conversation.turns) for conversation in conversations) - plan.num_requests
        if not plan.conversations:
            raise InvalidRequest("--trace", trace.name, f"none of {left_out} requests is left to send")
        return plan, left_out

    def _check(self, trace: Trace) -> None:
        if not 0 < self.length_scale <= 1 or (self.length_scale * trace.block_tokens).denominator != 1:
            requirement = f"must be at most 1 and leave blocks of {trace.block_tokens} tokens whole"
            raise InvalidRequest("--length-scale", self.length_scale, requirement)
        if not 0 < self.time_scale < math.inf or not 0 < self.session_rate < math.inf:
            raise InvalidRequest("--time-scale", self.time_scale, "must be a finite number above 0")

    def _conversations(
        self, requests: Sequence[TraceRequest], block_tokens: int, first_s: float
    ) -> list[Conversation]:
        """In the order of their starts. A request that follows an answer belongs to the conversation of its session."""
        places: dict[str, int] = {}  # by session
        found: list[Conversation] = []
        for number, request in enumerate(requests):
            pieces = self._pieces(request, block_tokens, number)
            turn = Turn(pieces, self._scaled(request.num_output), request.think_s or 0.0)
            place = places.get(request.session)
            if request.think_s is not None and place is not None:
                found[place] = replace(found[place], turns=(*found[place].turns, turn))
                continue
            places[request.session] = len(found)
            at_s = (request.at_s - first_s) / self.time_scale
            found.append(Conversation((replace(turn, think_s=0.0),), at_s))
        return found

    def _pieces(self, request: TraceRequest, block_tokens: int, number: int) -> tuple[Piece, ...]:
        """A piece for each block; what lies in none is this request's alone."""
        left, block = self._scaled(request.num_input), int(self.length_scale * block_tokens)
        pieces: list[Piece] = []
        for content in request.blocks:
            num_tokens = min(block, left)
            if num_tokens:
                pieces.append(Piece(content, num_tokens))
            left -= num_tokens
        return (*pieces, Piece(ONCE + number, left)) if left else tuple(pieces)

    def _scaled(self, num_tokens: int) -> int:
        return max(1, math.ceil(num_tokens * self.length_scale))


def _within(conversation: Conversation, max_tokens: int | None) -> Conversation:
    """Up to the first turn that is too long."""
    for number, turn in enumerate(conversation.turns):
        if max_tokens is not None and turn.input_tokens + turn.output_tokens > max_tokens:
            return replace(conversation, turns=conversation.turns[:number])
    return conversation
