"""What each step computes: which sequences run, which wait, and who gets blocks. Called by the engine only.

    waiting ──admit──▶ running ──decode: one token a step──▶ ended
       ▲                  │ └─ prefill: chunks, as far as the step's budget goes
       └────preempt───────┘

**Rank.** One order decides everything: who is admitted, computed and spared first. A sequence's rank is the time of its
arrival, moved by some seconds per level of priority, and never changes. So a less urgent sequence waits for urgent ones
that come after it, but only for those that come within the seconds between their levels: nothing starves.

**Budget.** A step's budget goes to decodes first, then to prefill chunks, running sequences before newly admitted ones
unless those come before them in rank.

**Admission.** A sequence is admitted only when blocks for all its known tokens are there, so a prefill never stops
half-way for lack of memory. One that does not fit now is passed over by a few behind it, for so long; then nobody
overtakes it any more, and what the running ones give back gathers for it.

**Preemption.** A decode that needs a block and finds none preempts the last in rank: its blocks go, it waits with its
output so far, and is computed again. Only those behind give way to those before, so the first in rank gets on with each
admission, and ends. With each preemption the sequence is admitted with twice the room to grow, for itself and for all
that run, until there is room for all of them to their ends.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field

from headrace.block_hash import extend
from headrace.config import EngineSettings
from headrace.engine.block_pool import BlockPool, BlockState, Hold
from headrace.engine.sequence import (
    MAX_RETENTION,
    Chunk,
    Event,
    Failed,
    Reserved,
    Sequence,
    Started,
    State,
    StepPlan,
)
from headrace.errors import AlreadyExists, InvalidRequest, Overloaded
from headrace.priority import MAX_PRIORITY, MIN_PRIORITY, rank_s

# Waiting sequences that are looked at in a step, so that its cost does not grow with the queue.
LOOK_AHEAD = 8
# How many admissions a sequence that does not fit sees go past.
MAX_OVERTAKEN = 16

_HOLD_REASON = "hand-off"

# A sequence that runs alone and finds no block waits for those held for somebody outside. Not without end: once it
# was preempted this often, it fails.
_MAX_PREEMPTIONS_ALONE = 8


@dataclass(frozen=True, slots=True)
class Share:
    """What somebody has here."""

    num_sequences: int
    num_tokens: int  # in their contexts
    num_tokens_to_compute: int  # without the one of each that decodes


@dataclass(slots=True)
class _Waiting:
    """A place in the queue, and why the sequence was not admitted when it was last looked at."""

    sequence: Sequence
    num_overtaken: int = 0
    looked_at: int = -1  # `_num_gains` at that time
    missed: bytes | None = None  # the first block of its prompt that was not in the tree


@dataclass(slots=True)
class _Step:
    """A step while it is planned."""

    budget: int  # tokens that are left of it
    events: list[Event]
    now_s: float
    chunks: list[Chunk] = field(default_factory=list)

    def plan(self, sequence: Sequence) -> None:
        """As much of the sequence as the budget allows."""
        num_tokens = min(_tokens_to_compute(sequence), self.budget)
        self.chunks.append(Chunk(sequence, sequence.num_computed, num_tokens))
        self.budget -= num_tokens


class Scheduler:
    def __init__(self, pool: BlockPool, settings: EngineSettings) -> None:
        self._pool = pool
        self._max_step_tokens = settings.max_step_tokens
        self._max_sequences = settings.max_sequences
        self._max_waiting = settings.max_waiting
        self._sequences: dict[str, list[Sequence]] = {}  # by id: one, or one for each choice
        self._waiting: list[_Waiting] = []  # by rank
        self._running: list[Sequence] = []  # by rank; reserved ones among them
        self._queued_tokens = 0
        self._num_arrived = 0
        self._num_left = 0  # times that a sequence stopped running
        self.num_preemptions = 0
        self.num_queried_tokens = 0  # looked up in the prefix tree, once per sequence
        self.num_cached_tokens = 0  # found there

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Known tokens still to be computed here. May be read from another thread."""
        running = [s for s in list(self._running) if s.state is State.RUNNING]
        return self._queued_tokens + sum(len(s.token_ids) - s.num_computed for s in running)

    def shares(self, arriving: list[Sequence]) -> dict[str, Share]:
        """Of the load, by who sent it. Of `arriving` those count that are not here. May be read from another thread."""
        sums: dict[str, list[int]] = {}
        known = {sequence.id: [sequence] for sequence in arriving} | self._sequences
        for choices in known.values():
            for sequence in list(choices):
                share = sums.setdefault(sequence.origin, [0, 0, 0])
                num_to_compute = _tokens_to_compute(sequence)
                share[0] += 1
                share[1] += len(sequence.token_ids)
                share[2] += num_to_compute if num_to_compute > 1 else 0
        return {origin: Share(*share) for origin, share in sums.items()}

    @property
    def has_work(self) -> bool:
        """Whether the next `schedule` would plan or admit something."""
        return any(s.state is State.RUNNING for s in self._running) or self._next_admission(1) is not None

    def find(self, sequence_id: str) -> list[Sequence]:
        """Those of its choices that go on; none for an id that is unknown or over."""
        return list(self._sequences.get(sequence_id, ()))

    def alive(self) -> list[Sequence]:
        return [sequence for choices in self._sequences.values() for sequence in choices]

    def add(self, sequence: Sequence, now_s: float) -> None:
        """Queue a new sequence. Raises InvalidRequest (the pool can never hold it, a level out of range),
        AlreadyExists or Overloaded.
        """
        assert sequence.token_ids
        _check_level("priority", sequence.priority, MIN_PRIORITY, MAX_PRIORITY)
        _check_level("retention", sequence.retention, 0, MAX_RETENTION)
        self._check_capacity(sequence)
        if sequence.id in self._sequences or self._pool.owns(sequence.id):
            raise AlreadyExists(f"sequence {sequence.id} is running, waiting, or still has blocks")
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(f"{len(self._waiting)} sequences are waiting, which is the limit")
        self._sequences[sequence.id] = [sequence]
        self._num_arrived += 1
        sequence.rank = (rank_s(now_s, sequence.priority), self._num_arrived)
        self._enqueue(sequence)

    def join(self, sequence: Sequence, first: Sequence) -> list[tuple[int, int]]:
        """A choice that was split off `first`, with its first token: it shares the blocks of the prompt. Returns what
        is to be copied at once, as (from, to): a block that is not full, since each writes its own next token there.

        Without room now it waits, and goes on from what is cached of the prompt then.
        """
        self._num_arrived += 1
        sequence.rank = (first.rank[0], self._num_arrived)
        self._sequences[sequence.id].append(sequence)
        num_full = first.num_computed // self._pool.block_size_tokens
        num_new = self._pool.blocks_for(first.num_computed) - num_full
        if len(self._running) >= self._max_sequences or self._pool.num_available < num_new:
            self._enqueue(sequence)
            return []
        shared = first.block_ids[:num_full]
        self._pool.share_in_use(shared)
        new = self._pool.allocate(num_new)
        sequence.block_ids = [*shared, *new]
        sequence.num_computed = first.num_computed
        sequence.state = State.RUNNING
        insort(self._running, sequence, key=_rank)
        return list(zip(first.block_ids[num_full:], new, strict=False))

    def schedule(self, events: list[Event], now_s: float) -> StepPlan:
        """Plan a step and allocate its blocks. Appends Started, Reserved and Failed to `events` as they happen."""
        step = _Step(self._max_step_tokens, events, now_s)
        self._plan_decodes(step)
        prefilling = [s for s in self._running if s.state is State.RUNNING and _tokens_to_compute(s) > 1]
        if prefilling:
            self._admit(step, before=prefilling[0])
        for sequence in prefilling:
            if step.budget:
                step.plan(sequence)
        self._admit(step)
        return StepPlan(step.chunks)

    def computed(self, chunk: Chunk) -> None:
        """The chunk's KV is in its blocks: name the ones that became full."""
        sequence = chunk.sequence
        num_named = sequence.num_computed // self._pool.block_size_tokens
        sequence.num_computed = chunk.start + chunk.num_tokens
        self._name_blocks(sequence, num_named)

    def adopt(self, sequence: Sequence) -> None:
        """A reserved sequence's blocks are filled: it runs, once its next token is appended."""
        assert sequence.state is State.RESERVED
        num_cached = sequence.num_computed // self._pool.block_size_tokens
        self._pool.arrived(sequence.block_ids[num_cached:])
        sequence.num_computed = len(sequence.token_ids)
        self._name_blocks(sequence, num_cached)
        sequence.state = State.RUNNING

    def end(self, sequence: Sequence) -> None:
        """Finished, failed or aborted: give its blocks back. What a hold has announced stays held."""
        if sequence.state is State.WAITING:
            self._dequeue(bisect_left(self._waiting, sequence.rank, key=_rank_waiting))
        else:
            self._stop(sequence)
            self._pool.trim_hold(sequence.id, sequence.num_announced_blocks)
        sequence.state = State.FINISHED
        choices = self._sequences[sequence.id]
        choices.remove(sequence)
        if not choices:
            del self._sequences[sequence.id]

    def block_users(self) -> Counter[int]:
        """How many block tables have each block, for the audit. Blocks that are being filled have no user yet."""
        return Counter(
            block_id
            for sequence in self._running
            for block_id in sequence.block_ids
            if self._pool.state(block_id) is not BlockState.FILLING
        )

    def blocks_being_filled(self) -> set[int]:
        """Of reserved sequences, for the audit."""
        return {
            block_id
            for sequence in self._running
            if sequence.state is State.RESERVED
            for block_id in sequence.block_ids
            if self._pool.state(block_id) is BlockState.FILLING
        }

    def num_to_spare(self) -> int:
        """Blocks that nobody who waits or runs is about to need."""
        waiting = sum(self._pool.blocks_for(len(w.sequence.token_ids)) for w in self._waiting[:LOOK_AHEAD])
        return self._pool.num_available - waiting - len(self._running)

    def why_blocked(self) -> str:
        """What the first waiting sequence waits for, as a text for the log."""
        if len(self._running) >= self._max_sequences:
            return f"all {self._max_sequences} places for running sequences are taken"
        first = self._waiting[0]
        needed = self._pool.blocks_for(len(first.sequence.token_ids))
        return (
            f"it needs {needed} blocks, {self._pool.num_available} of {self._pool.num_blocks} are available;"
            f" it was overtaken {first.num_overtaken} times"
        )

    # --- admission --------------------------------------------------------------------------------------------------

    def _check_capacity(self, sequence: Sequence) -> None:
        """Refuse what does not fit the empty pool: it would wait for ever, and everybody behind it."""
        capacity = self._pool.num_blocks * self._pool.block_size_tokens
        pool_holds = f"the KV pool holds {capacity} tokens"
        ends_after_prompt = sequence.hold_ttl_s is not None
        if len(sequence.token_ids) + (not ends_after_prompt) > capacity:
            room = "" if ends_after_prompt else ", and the answer needs at least 1"
            raise InvalidRequest("prompt", f"{len(sequence.token_ids)} tokens", f"{pool_holds}{room}")
        max_tokens = sequence.sampling.max_tokens
        if not ends_after_prompt and sequence.num_prompt_tokens + max_tokens > capacity:
            left = capacity - sequence.num_prompt_tokens
            raise InvalidRequest(
                "max_tokens",
                max_tokens,
                f"{pool_holds} and the prompt has {sequence.num_prompt_tokens}, so at most {left} remain",
            )

    def _admit(self, step: _Step, before: Sequence | None = None) -> None:
        """Admit what fits; where `before` is given, only sequences that come before it in rank."""
        while self._waiting:
            index = self._next_admission(step.budget, before)
            if index is None:
                return
            for passed in self._waiting[:index]:
                passed.num_overtaken += 1
            sequence = self._dequeue(index)
            is_first = not sequence.was_admitted
            self._take_blocks(sequence)
            if sequence.from_outside:
                num_cached = sequence.num_computed // self._pool.block_size_tokens
                step.events.append(Reserved(sequence.id, list(sequence.block_ids), num_cached))
                continue
            if is_first:
                step.events.append(Started(sequence.id, sequence.num_cached_tokens))
            self._hold_blocks(sequence, step.now_s)
            step.plan(sequence)

    def _next_admission(self, budget: int, before: Sequence | None = None) -> int | None:
        """Index in the queue of the next to be admitted. Changes nothing."""
        if len(self._running) >= self._max_sequences:
            return None
        for index, waiting in enumerate(self._waiting[:LOOK_AHEAD]):
            sequence = waiting.sequence
            # A reservation computes nothing, so it needs no budget.
            if not (budget or sequence.from_outside) or (before and before.rank < sequence.rank):
                return None
            if self._fits(waiting):
                return index
            if waiting.num_overtaken >= MAX_OVERTAKEN:
                return None
        return None

    def _fits(self, waiting: _Waiting) -> bool:
        """Whether there is room now for what the sequence needs beyond its blocks in the tree. Blocks that come back
        from lower tiers take as much room as those that are computed.
        """
        num_gains = self._pool.num_returned + self._num_left
        # Walking through its blocks in each step would take long. It can fit only once somebody has given up blocks or
        # the room kept for his growth, or once more of its prompt is in the tree.
        if waiting.looked_at == num_gains and not (waiting.missed and self._pool.knows(waiting.missed)):
            return False
        sequence = waiting.sequence
        hashes = self._reusable_hashes(sequence)
        matched = self._pool.match(hashes)
        num_new = self._pool.blocks_for(len(sequence.token_ids)) - len(matched)
        if num_new + self._headroom(sequence) <= self._pool.num_available_beside(matched):
            return True
        waiting.looked_at = num_gains
        waiting.missed = hashes[len(matched)] if len(matched) < len(hashes) else None
        return False

    def _reusable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Names of the blocks that need not be computed, if they are found."""
        self._extend_hashes(sequence)
        # At least one token goes through the model, for its logits; a reserved sequence brings its next token along.
        num_known = len(sequence.token_ids) - (not sequence.from_outside)
        if sequence.lacks_prompt_logprobs:
            num_known = min(num_known, sequence.num_prompt_logprobs)
        return sequence.hashes[: num_known // self._pool.block_size_tokens]

    def _headroom(self, sequence: Sequence) -> int:
        """Blocks to be left over when the sequence is admitted.

        Each running sequence that goes on to decode may soon need one: to admit into these only to preempt again would
        compute the same tokens over and over. Where that happened all the same, twice as many for each preemption.
        """
        num_each = 1 << min(sequence.num_preemptions, 30)
        num_own = self._num_to_grow(sequence, self._pool.blocks_for(len(sequence.token_ids)))
        return min(num_own, num_each - 1) + sum(
            min(self._num_to_grow(s, len(s.block_ids)), num_each)
            for s in self._running
            if s.hold_ttl_s is None
        )

    def _num_to_grow(self, sequence: Sequence, num_blocks: int) -> int:
        """Blocks that the sequence needs beyond these, if its answer gets as long as it may."""
        # The last token of an answer has no KV.
        num_tokens = sequence.num_prompt_tokens + sequence.sampling.max_tokens - 1
        return max(0, self._pool.blocks_for(num_tokens) - num_blocks)

    def _take_blocks(self, sequence: Sequence) -> None:
        hashes = self._reusable_hashes(sequence)
        cached = self._pool.take_cached(hashes, sequence.root, sequence.retention)
        num_new = self._pool.blocks_for(len(sequence.token_ids)) - len(cached)
        new = self._pool.fill(num_new) if sequence.from_outside else self._pool.allocate(num_new)
        sequence.block_ids = [*cached, *new]
        sequence.num_computed = len(cached) * self._pool.block_size_tokens
        sequence.state = State.RESERVED if sequence.from_outside else State.RUNNING
        insort(self._running, sequence, key=_rank)
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.num_cached_tokens = sequence.num_computed
            self.num_queried_tokens += len(sequence.token_ids)
            self.num_cached_tokens += sequence.num_cached_tokens

    def _hold_blocks(self, sequence: Sequence, now_s: float) -> None:
        ttl_s = sequence.hold_ttl_s
        if ttl_s is not None:
            block_ids = list(sequence.block_ids)
            self._pool.hold(
                Hold(sequence.id, _HOLD_REASON, block_ids, ttl_s, now_s + ttl_s, reader=sequence.reader)
            )

    # --- the queue --------------------------------------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self._waiting, _Waiting(sequence), key=_rank_waiting)
        self._queued_tokens += _tokens_to_compute(sequence)

    def _dequeue(self, index: int) -> Sequence:
        sequence = self._waiting.pop(index).sequence
        self._queued_tokens -= _tokens_to_compute(sequence)
        return sequence

    # --- planning ---------------------------------------------------------------------------------------------------

    def _plan_decodes(self, step: _Step) -> None:
        """Chunks for the sequences that lack one token only."""
        for sequence in list(self._running):
            if not step.budget:
                return
            # The state changes under way: one behind may have been preempted for one before it.
            if sequence.state is not State.RUNNING or _tokens_to_compute(sequence) != 1:
                continue
            if self._has_slot(sequence) or self._grow(sequence, step.events):
                step.plan(sequence)

    # --- memory -----------------------------------------------------------------------------------------------------

    def _has_slot(self, sequence: Sequence) -> bool:
        """Whether the next token's KV has a place in the sequence's blocks."""
        return sequence.num_computed < len(sequence.block_ids) * self._pool.block_size_tokens

    def _grow(self, sequence: Sequence, events: list[Event]) -> bool:
        """One more block, from sequences behind it if need be. False when the sequence itself had to give way."""
        while not self._pool.num_available:
            victim = next(
                s for s in reversed(self._running) if s.state is State.RUNNING and s.hold_ttl_s is None
            )
            if victim is not sequence:
                self._preempt(victim)
                continue
            if len(self._running) == 1 and sequence.num_preemptions >= _MAX_PREEMPTIONS_ALONE:
                self.end(sequence)
                events.append(Failed(sequence.id, Overloaded("no KV block is left for the next token")))
            else:
                self._preempt(sequence)
            return False
        sequence.block_ids += self._pool.allocate(1)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back into the queue, to be computed again from prompt and output so far."""
        self._stop(sequence)
        sequence.state = State.WAITING
        sequence.from_outside = False
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """No longer running: its place, its blocks and the room for its growth are there for others."""
        self._running.remove(sequence)
        self._num_left += 1
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.state is State.RESERVED:
            num_cached = sequence.num_computed // self._pool.block_size_tokens
            self._pool.release(sequence.block_ids[:num_cached])
            self._pool.quarantine(sequence.id, sequence.block_ids[num_cached:])
        else:
            self._pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed = 0

    def _name_blocks(self, sequence: Sequence, num_named: int) -> None:
        """Let others find the blocks that are full by now, from index `num_named` on."""
        num_full = sequence.num_computed // self._pool.block_size_tokens
        if num_full > len(sequence.hashes):
            self._extend_hashes(sequence)
        for index in range(num_named, num_full):
            parent = sequence.hashes[index - 1] if index else sequence.root
            self._pool.store(
                sequence.block_ids[index], sequence.hashes[index], parent, self._retention(sequence, index)
            )

    def _retention(self, sequence: Sequence, index: int) -> int:
        """The level is the prompt's: what the answer adds is worth no more than other answers."""
        is_prompt = (index + 1) * self._pool.block_size_tokens <= sequence.num_prompt_tokens
        return sequence.retention if is_prompt else 0

    def _extend_hashes(self, sequence: Sequence) -> None:
        """Hash the blocks that became full since the last time."""
        block_size = self._pool.block_size_tokens
        num_hashed = len(sequence.hashes) * block_size
        if len(sequence.token_ids) - num_hashed >= block_size:
            parent = sequence.hashes[-1] if sequence.hashes else sequence.root
            sequence.hashes += extend(parent, sequence.token_ids[num_hashed:], block_size)


def _tokens_to_compute(sequence: Sequence) -> int:
    """Known tokens whose KV is not there yet and has to be computed here."""
    if sequence.from_outside and sequence.state is not State.RUNNING:
        return 0
    return len(sequence.token_ids) - sequence.num_computed


def _check_level(name: str, level: int, low: int, high: int) -> None:
    if not low <= level <= high:
        raise InvalidRequest(name, level, f"must lie in {low}..{high}")


def _rank(sequence: Sequence) -> tuple[float, int]:
    return sequence.rank


def _rank_waiting(waiting: _Waiting) -> tuple[float, int]:
    return waiting.sequence.rank
