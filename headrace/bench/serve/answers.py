"""One request and what its client saw of the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headrace.clock import Clock

# What Headrace says of a request's way, under its own names.
TIMINGS = ("queue_s", "worker_queue_s", "worker_prefill_s", "prefill_s", "transfer_s", "decode_s")
HAND_OFF = ("decode_worker", "prefill_worker", "blocks_moved", "bytes_moved", "failed_attempts")

Status = Literal["ok", "rejected", "timeout", "failed"]


@dataclass(frozen=True, slots=True)
class Question:
    """Token ids, or messages of a chat as (role, content)."""

    request_id: str
    conversation: str
    prompt: list[int] | list[tuple[str, str]]
    max_tokens: int
    needs_token_ids: bool = False  # of the answer: a later turn repeats it


@dataclass(slots=True)
class Answer:
    """Fills up while the answer comes. Times are the clock's."""

    clock: Clock
    sent_s: float = 0.0
    end_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])  # time, tokens
    token_ids: list[int] = field(default_factory=list[int])  # where the endpoint tells them
    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    server: dict[str, float | str] = field(default_factory=dict[str, float | str])  # what it says of the way
    status: Status = "ok"
    error: str = ""

    def receive(self, num_tokens: int) -> None:
        """A message that brings tokens is here."""
        self.arrivals.append((self.clock.now(), num_tokens))

    def fail(self, status: Status, error: str) -> None:
        self.status, self.error = status, error[:500]
