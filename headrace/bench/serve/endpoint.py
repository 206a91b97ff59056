"""The seam to what is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.bench.serve.answers import Answer, Question


@dataclass(frozen=True, slots=True)
class Served:
    """What an endpoint says of itself; None: it does not say."""

    model: str
    max_tokens: int | None  # prompt and answer
    vocab_size: int | None


class Endpoint(Protocol):
    """Used from one event loop."""

    takes_tokens: bool  # else messages of a chat

    async def served(self) -> Served:
        """Raises Unavailable."""
        ...

    async def ask(self, question: Question, answer: Answer) -> None:
        """Fills `answer`, errors included: raises nothing but the cancellation of its task."""
        ...

    async def close(self) -> None: ...
