"""How long the parts of a request took, for the report from which routers learn.

    asked ── queue ──▶ started ── prefill ──▶ first token ── transfer ──▶ second token ── decode ──▶ last token

Decoding counts from the second token: the gap before it may hold what is left of a transfer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from headrace.clock import Clock, SystemClock


class DecodeBatch:
    """What the worker decodes together, summed over time. One for all requests; used on the event loop only."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self._at_s = self.clock.now()
        self._sequences = 0
        self._context_tokens = 0
        self._sequence_s = 0.0
        self._context_token_s = 0.0

    def change(self, sequences: int, context_tokens: int) -> None:
        """So many more (or fewer) from now on."""
        self._advance()
        self._sequences += sequences
        self._context_tokens += context_tokens

    def sums(self) -> tuple[float, float, float]:
        """Now, and up to now the integrals over time of sequences and of their context tokens."""
        self._advance()
        return self._at_s, self._sequence_s, self._context_token_s

    def _advance(self) -> None:
        now_s = self.clock.now()
        self._sequence_s += self._sequences * (now_s - self._at_s)
        self._context_token_s += self._context_tokens * (now_s - self._at_s)
        self._at_s = now_s


@dataclass(slots=True)
class Times:
    """As in SequenceEnd."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    context_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0
    mean_batch: float = 0.0
    mean_batch_context_tokens: float = 0.0


class Pace:
    """Of one request. Told of each event as it comes; `close` in a `finally`."""

    def __init__(self, batch: DecodeBatch, num_prompt_tokens: int) -> None:
        self._batch = batch
        self._num_prompt_tokens = num_prompt_tokens
        # On the clock; 0: not yet.
        self.asked_at_s = self.started_at_s = self.first_token_at_s = 0.0
        self._tokens: Counter[int] = Counter()  # by choice
        self._decoding: dict[int, int] = {}  # context tokens by choice, as counted in the batch
        self._first_sums: tuple[float, float, float] | None = None
        self.times = Times()

    def asked(self) -> None:
        """Somebody is to compute the prompt; what an earlier attempt took is forgotten."""
        self.asked_at_s = self._batch.clock.now()
        self.started_at_s = 0.0

    def started(self, num_cached_tokens: int) -> None:
        """It is being computed. Later starts, after a preemption, are passed over."""
        if self.started_at_s or self._tokens:
            return
        self.started_at_s = self._batch.clock.now()
        self.times.queue_s = self.started_at_s - self.asked_at_s
        self.times.context_tokens = num_cached_tokens
        self.times.prefill_tokens = max(0, self._num_prompt_tokens - num_cached_tokens)

    def token(self, choice: int) -> None:
        if not self._tokens:
            self.first_token_at_s = self._batch.clock.now()
            if self.started_at_s:
                self.times.prefill_s = self.first_token_at_s - self.started_at_s
        self._tokens[choice] += 1
        if choice in self._decoding:
            self._decoding[choice] += 1
            self._batch.change(0, 1)
            self._note_decode(choice)
        elif self._tokens[choice] > 1:
            self._decoding[choice] = self._num_prompt_tokens + self._tokens[choice]
            self._batch.change(1, self._decoding[choice])
            self._first_sums = self._first_sums or self._batch.sums()

    def choice_over(self, choice: int) -> None:
        context_tokens = self._decoding.pop(choice, None)
        if context_tokens is not None:
            self._batch.change(-1, -context_tokens)

    def close(self) -> None:
        for choice in list(self._decoding):
            self.choice_over(choice)

    def _note_decode(self, choice: int) -> None:
        assert self._first_sums is not None
        seconds, sequence_s, context_token_s = (
            now - first for now, first in zip(self._batch.sums(), self._first_sums, strict=True)
        )
        times = self.times
        times.decode_s = seconds
        times.decode_tokens = max(times.decode_tokens, self._tokens[choice] - 2)
        if seconds > 0:
            times.mean_batch = sequence_s / seconds
            times.mean_batch_context_tokens = context_token_s / seconds
