"""The plain data that flows through the engine: a sequence on its way in, a step plan inside, a step output out.

    submit ─▶ waiting ─▶ running (chunks, then one token a step) ─▶ finished
    reserve ─▶ waiting ─▶ reserved (its blocks are being filled from outside) ─▶ adopt ─▶ running ─▶ finished

A sequence that runs out of blocks goes back to waiting with its output so far and is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError
from headrace.sampling_params import FinishReason, SamplingParams, TokenLogprobs
from headrace.tier import Tier

MAX_RETENTION = 3


class State(Enum):
    WAITING = auto()
    RESERVED = auto()  # blocks allocated, contents arrive from outside
    RUNNING = auto()
    FINISHED = auto()


class Constraint(Protocol):
    """What may follow, token after token. One per sequence, used on the engine's thread. Errors are HeadraceErrors and
    end that sequence alone.
    """

    def fresh(self) -> Constraint:
        """The same, before the first token."""
        ...

    def fill_mask(self, row: NDArray[np.uint32]) -> None:
        """Set the bits of allowed tokens, clear the others: uint32 [vocabulary / 32, rounded up], lowest bit first."""
        ...

    def accept(self, token_id: int) -> None: ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One request inside the engine. Made by the caller, then owned by the engine until its last event.

    `token_ids` is prompt then output; a sequence that goes on after an earlier attempt starts with output in it.
    One of several `choices` computes the prompt for all of them. With the first tokens it splits into one sequence for
    each, which then have the id in common.
    Only the scheduler changes `state`, `block_ids`, `num_computed`, `hashes` and `rank`.
    """

    id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    root: bytes  # digest of the hash root: model, tokenizer, block size, dtype, adapter, salt
    hold_ttl_s: float | None = None  # set: end after one token and keep the blocks held this long …
    reader: str = ""  # … for this incarnation
    origin: str = ""  # who sent it, for telling loads apart
    priority: int = 0  # MIN_PRIORITY..MAX_PRIORITY; lower is more urgent
    retention: int = 0  # 0..MAX_RETENTION: the prompt's cached blocks are evicted after those of lower levels
    constraint: Constraint | None = None  # before its first token
    choices: range = range(
        0
    )  # numbers of the answers that this sequence stands for; empty: as sampling.n says

    state: State = State.WAITING
    from_outside: bool = False  # reserved, not submitted: its prompt KV comes from outside
    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of the full blocks in token_ids, as far as known
    num_computed: int = 0  # tokens whose KV is in block_ids
    num_cached_tokens: int = 0  # prompt tokens found in the prefix tree when first scheduled
    num_announced_blocks: int = 0  # held sequences: blocks already reported ready
    num_prompt_logprobs: int = (
        0  # prompt tokens whose logprobs were reported; the first has none and is not counted
    )
    num_preemptions: int = 0
    was_admitted: bool = False
    rank: tuple[float, int] = (0.0, 0)  # less goes first, in every choice between sequences

    def __post_init__(self) -> None:
        self.choices = self.choices or range(self.sampling.n)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether logprobs of prompt tokens are still to be reported. For these the model has to be run."""
        wanted = self.sampling.prompt_logprobs is not None and not self.from_outside
        return wanted and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    def split(self) -> list[Sequence]:
        """Sequences for all choices but the first, which alone is left to this one."""
        others = [self._for_choice(choice) for choice in self.choices[1:]]
        self.choices = self.choices[:1]
        return others

    def _for_choice(self, choice: int) -> Sequence:
        return replace(
            self,
            token_ids=list(self.token_ids),
            hashes=list(self.hashes),
            choices=range(choice, choice + 1),
            state=State.WAITING,
            from_outside=False,  # what it lacks from here on is computed here
            block_ids=[],
            num_computed=0,
        )

    def finish_reason(self, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the sequence ends with `token_id`, which is already in `token_ids`; None if it goes on."""
        return finish_reason(self.sampling, token_id, self.num_output_tokens, eos_token_ids)


def finish_reason(
    sampling: SamplingParams, token_id: int, num_output_tokens: int, eos_token_ids: frozenset[int]
) -> FinishReason | None:
    """The one rule for the end of an answer, used by every role. Stop strings are the router's: it has the text."""
    if token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos):
        return FinishReason.STOP
    if num_output_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start .. start + num_tokens - 1` of a sequence go through the model in this step."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last known token, so that the next one is drawn from its logits."""
        return self.start + self.num_tokens == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. Decodes are chunks of one token. Every chunk's blocks are allocated."""

    chunks: list[Chunk]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Drawn:
    token_id: int
    logprobs: TokenLogprobs | None = None  # where asked for


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What a chunk gave: a token for each of the sequence's choices if it samples, or why the sequence failed."""

    drawn: Items[Drawn] = ()
    prompt_logprobs: Items[TokenLogprobs] = ()  # of the tokens after those reported before
    error: HeadraceError | None = None


@dataclass(frozen=True, slots=True)
class NewToken:
    sequence_id: str
    token_id: int
    finish_reason: FinishReason | None  # set: the choice is over
    choice: int = 0
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the prompt's tokens from the second on, in order, as they become known; all before the first new token."""

    sequence_id: str
    first_index: int  # in the prompt, of the token of `entries[0]`; 1 or more
    entries: Items[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class Started:
    """The sequence's first chunk is in this step's plan. Reported before the step runs."""

    sequence_id: str
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class BlocksReady:
    """Blocks `first_index ..` of a held sequence are computed, including a partial last one at the end."""

    sequence_id: str
    first_index: int
    block_ids: list[int]
    generations: list[int]


@dataclass(frozen=True, slots=True)
class Reserved:
    """A reserved sequence has its blocks: the first `num_cached_blocks` hold content, the others wait to be filled."""

    sequence_id: str
    block_ids: list[int]
    num_cached_blocks: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence is over with an error, all its choices are; other sequences go on."""

    sequence_id: str
    error: HeadraceError


Event = NewToken | PromptLogprobs | Started | BlocksReady | Reserved | Failed


@dataclass(slots=True)
class StepOutput:
    """What happened since the last one, in order. For the directory: hashes of blocks that are in another tier than
    before, with the tier they are in now, and of blocks that are in none any more.
    """

    events: list[Event] = field(default_factory=list)
    stored: dict[bytes, Tier] = field(default_factory=dict)
    removed: list[bytes] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.events or self.stored or self.removed)
