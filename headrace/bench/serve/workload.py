"""What is asked and when: a plan that is whole before the first request is sent, the same for the same seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace

import numpy as np

from headrace.bench.serve.content import Piece, SharedPrefixes
from headrace.bench.serve.lengths import Lengths
from headrace.errors import InvalidRequest

ONCE = 1 << 40  # contents from here on occur once


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `think_s`: from the end of the answer before, or, of a first turn, from the conversation's start."""

    pieces: tuple[Piece, ...]
    output_tokens: int
    think_s: float = 0.0

    @property
    def input_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Conversation:
    turns: tuple[Turn, ...]
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`concurrency`: so many conversations at any time, the next as soon as one ends; None: each at its own time."""

    conversations: tuple[Conversation, ...]
    concurrency: int | None = None

    @property
    def num_requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)

    @property
    def duration_s(self) -> float:
        """Until the last conversation begins."""
        return self.conversations[-1].at_s if self.conversations else 0.0

    def digest(self) -> str:
        """sha256 of all that the plan fixes."""
        return hashlib.sha256(json.dumps(astuple(self)).encode()).hexdigest()

    def bounds(self) -> Bounds:
        """Turns count in the order of their conversations' starts, as if there were no time between them."""
        shared = SharedPrefixes()
        cached: list[int] = []
        for conversation in self.conversations:
            for position, turn in enumerate(conversation.turns):
                cached.append(shared.cached_tokens(turn.pieces))
                shared.add(_with_answer(conversation.turns[position : position + 2], position))
        total = sum(turn.input_tokens for conversation in self.conversations for turn in conversation.turns)
        return Bounds(total, sum(cached), tuple(cached))


def _with_answer(turns: Sequence[Turn], position: int) -> tuple[Piece, ...]:
    """The prompt of the first of two turns and its answer, as the second one repeats them; none where it does not."""
    pieces = turns[-1].pieces
    ends = [place for place, piece in enumerate(pieces, 1) if piece.answer_to == position]
    return pieces[: ends[0]] if ends else ()


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a cache that never evicts would find."""

    input_tokens: int
    cached_tokens: int
    by_request: tuple[int, ...]  # in the order of the plan

    @property
    def working_set_tokens(self) -> int:
        return self.input_tokens - self.cached_tokens

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.input_tokens if self.input_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Shape:
    """How prompts are made. Each begins with one of `num_prefixes` system prompts of `prefix_tokens` (0: none), then
    `retrieved` of `num_documents` documents (0: none), then its own question.
    """

    input_tokens: Lengths
    output_tokens: Lengths
    prefix_tokens: int = 0
    num_prefixes: int = 1
    num_documents: int = 0
    document_tokens: int = 512
    retrieved: int = 4
    shuffle_documents: bool = False  # else in the order of their numbers: more prefixes are equal
    turns: Lengths = field(default_factory=lambda: Lengths(1, 1, 1))
    think_s: float = 0.0  # mean of an exponential distribution
    zipf: float = 1.0  # popularity of the k-th prefix or document: k ** -zipf

    def __post_init__(self) -> None:
        if self.num_documents and self.retrieved > self.num_documents:
            raise InvalidRequest("--retrieved", self.retrieved, f"there are {self.num_documents} documents")

    def facts(self) -> dict[str, int | float | str]:
        """What of it has an effect."""
        unused = {
            *(() if self.prefix_tokens else ("prefix_tokens", "num_prefixes")),
            *(() if self.num_documents else ("document_tokens", "retrieved", "shuffle_documents")),
            *(() if self.prefix_tokens or self.num_documents else ("zipf",)),
        }
        values = {name: getattr(self, name) for name in self.__slots__ if name not in unused}
        return {name: str(value) if isinstance(value, Lengths) else value for name, value in values.items()}

    def conversations(self, count: int, seed: int) -> list[Conversation]:
        """The first ones are the same however many follow."""
        return [
            self._conversation(number, np.random.default_rng([seed, 3, number])) for number in range(count)
        ]

    def _conversation(self, number: int, rng: np.random.Generator) -> Conversation:
        turns: list[Turn] = []
        history = [*self._prefix(rng)]
        [num_turns] = self.turns.draw(rng, 1)
        contents = self._contents(number)
        for position in range(num_turns):
            [asked], [answered] = self.input_tokens.draw(rng, 1), self.output_tokens.draw(rng, 1)
            think_s = float(rng.exponential(self.think_s)) if position and self.think_s else 0.0
            history += [*self._documents(rng), Piece(next(contents), asked)]
            turns.append(Turn(tuple(history), answered, think_s))
            history.append(Piece(next(contents), answered, answer_to=position))
        return Conversation(tuple(turns))

    def _prefix(self, rng: np.random.Generator) -> Iterator[Piece]:
        if self.prefix_tokens:
            chosen = rng.choice(self.num_prefixes, p=_popularity(self.num_prefixes, self.zipf))
            yield Piece(int(chosen), self.prefix_tokens)

    def _documents(self, rng: np.random.Generator) -> Iterator[Piece]:
        if not self.num_documents:
            return
        popularity = _popularity(self.num_documents, self.zipf)
        chosen = rng.choice(self.num_documents, self.retrieved, replace=False, p=popularity).tolist()
        for document in chosen if self.shuffle_documents else sorted(chosen):
            yield Piece(self.num_prefixes + document, self.document_tokens)

    def _contents(self, number: int) -> Iterator[int]:
        """For what only this conversation says."""
        yield from range(ONCE + (number << 16), ONCE + (number + 1 << 16))


def at_times(conversations: Sequence[Conversation], times_s: Sequence[float]) -> Plan:
    """An open loop."""
    pairs = zip(conversations, times_s, strict=True)
    return Plan(tuple(replace(conversation, at_s=float(at_s)) for conversation, at_s in pairs))


def _popularity(count: int, zipf: float) -> list[float]:
    weights = np.arange(1, count + 1, dtype=float) ** -zipf
    return (weights / weights.sum()).tolist()
