"""What each step computes: which sequences run, which wait, and who gets blocks. Called by the engine only.

    waiting ──admit──▶ running ──decode: one token a step──▶ ended
       ▲                  │ └─ prefill: chunks, as far as the step's budget goes
       └────preempt───────┘

A step's budget goes to decodes first, then to prefill chunks of running sequences, then to newly admitted ones, each in
the order of arrival. A sequence is admitted only when blocks for all its known tokens are there, so a prefill never
stops half-way for lack of memory. A decode that needs a block and finds none preempts the newest sequence: its blocks
go, it waits at the front with its output so far, and is computed again. Only younger sequences give way to older ones,
so the oldest always gets on.
"""

from __future__ import annotations

from collections import Counter, deque

from headrace.block_hash import extend
from headrace.config import EngineSettings
from headrace.engine.block_pool import BlockPool, BlockState, Hold
from headrace.engine.sequence import Chunk, Event, Failed, Reserved, Sequence, Started, State, StepPlan
from headrace.errors import AlreadyExists, InvalidRequest, Overloaded

_HOLD_REASON = "hand-off"

# A sequence that runs alone and finds no block waits for those held for somebody outside. Not without end: once it
# was preempted this often, it fails.
_MAX_PREEMPTIONS_ALONE = 8


class Scheduler:
    def __init__(self, pool: BlockPool, settings: EngineSettings) -> None:
        self._pool = pool
        self._max_step_tokens = settings.max_step_tokens
        self._max_sequences = settings.max_sequences
        self._max_waiting = settings.max_waiting
        self._sequences: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of arrival; reserved ones among them
        self._queued_tokens = 0
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

    @property
    def has_work(self) -> bool:
        """Whether the next `schedule` would plan or admit something."""
        return any(s.state is State.RUNNING for s in self._running) or self._next_admission() is not None

    def find(self, sequence_id: str) -> Sequence | None:
        return self._sequences.get(sequence_id)

    def alive(self) -> list[Sequence]:
        return list(self._sequences.values())

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises InvalidRequest if the pool can never hold it, AlreadyExists, Overloaded."""
        assert sequence.token_ids
        self._check_capacity(sequence)
        if sequence.id in self._sequences or self._pool.owns(sequence.id):
            raise AlreadyExists(f"sequence {sequence.id} is running, waiting, or still has blocks")
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(f"{len(self._waiting)} sequences are waiting, which is the limit")
        self._sequences[sequence.id] = sequence
        self._waiting.append(sequence)
        self._queued_tokens += _tokens_to_compute(sequence)

    def schedule(self, events: list[Event], now_s: float) -> StepPlan:
        """Plan a step and allocate its blocks. Appends Started, Reserved and Failed to `events` as they happen."""
        chunks: list[Chunk] = []
        budget = self._plan_decodes(chunks, self._max_step_tokens, events)
        budget = self._plan_prefills(chunks, budget)
        self._admit(chunks, budget, events, now_s)
        return StepPlan(chunks)

    def computed(self, chunk: Chunk) -> None:
        """The chunk's KV is in its blocks: name the ones that became full."""
        sequence = chunk.sequence
        num_named = sequence.num_computed // self._pool.block_size_tokens
        sequence.num_computed = chunk.start + chunk.num_tokens
        self._name_blocks(sequence, num_named)

    def adopt(self, sequence: Sequence, token_id: int) -> None:
        """A reserved sequence's blocks are filled: it decodes from `token_id` on."""
        assert sequence.state is State.RESERVED
        num_cached = sequence.num_computed // self._pool.block_size_tokens
        self._pool.arrived(sequence.block_ids[num_cached:])
        sequence.num_computed = len(sequence.token_ids)
        self._name_blocks(sequence, num_cached)
        sequence.token_ids.append(token_id)
        sequence.state = State.RUNNING

    def end(self, sequence: Sequence) -> None:
        """Finished, failed or aborted: give its blocks back. What a hold has announced stays held."""
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
            self._queued_tokens -= _tokens_to_compute(sequence)
        else:
            self._running.remove(sequence)
            self._give_back(sequence)
            self._pool.trim_hold(sequence.id, sequence.num_announced_blocks)
        sequence.state = State.FINISHED
        del self._sequences[sequence.id]

    def block_users(self) -> Counter[int]:
        """How many block tables have each block, for the audit. Blocks that are being filled have no user yet."""
        return Counter(
            block_id
            for sequence in self._running
            for block_id in sequence.block_ids
            if self._pool.state(block_id) is not BlockState.FILLING
        )

    def why_blocked(self) -> str:
        """What the first waiting sequence waits for, as a text for the log."""
        if len(self._running) >= self._max_sequences:
            return f"all {self._max_sequences} places for running sequences are taken"
        needed = self._pool.blocks_for(len(self._waiting[0].token_ids))
        return (
            f"it needs {needed} blocks, {self._pool.num_available} of {self._pool.num_blocks} are available"
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

    def _admit(self, chunks: list[Chunk], budget: int, events: list[Event], now_s: float) -> None:
        # A reservation computes nothing, so it needs no budget.
        while self._waiting and (budget or self._waiting[0].from_outside):
            matched = self._next_admission()
            if matched is None:
                return
            sequence = self._waiting.popleft()
            self._queued_tokens -= _tokens_to_compute(sequence)
            self._take_blocks(sequence, matched)
            if sequence.from_outside:
                events.append(Reserved(sequence.id, list(sequence.block_ids), len(matched)))
                continue
            if not sequence.num_preemptions:
                events.append(Started(sequence.id, sequence.num_cached_tokens))
            self._hold_blocks(sequence, now_s)
            budget = self._plan_chunk(sequence, chunks, budget)

    def _next_admission(self) -> list[int] | None:
        """The cached blocks for the first waiting sequence, if there are a place and blocks for it now."""
        if not self._waiting or len(self._running) >= self._max_sequences:
            return None
        sequence = self._waiting[0]
        self._extend_hashes(sequence)
        # At least one token goes through the model, for its logits; a reserved sequence brings its next token along.
        num_known = len(sequence.token_ids) - (not sequence.from_outside)
        matched = self._pool.match(sequence.hashes[: num_known // self._pool.block_size_tokens])
        num_new = self._pool.blocks_for(len(sequence.token_ids)) - len(matched)
        # Each running sequence that goes on to decode may soon need a block: to admit into these only to preempt
        # again would compute the same tokens over and over.
        headroom = sum(s.hold_ttl_s is None for s in self._running)
        return matched if num_new + headroom <= self._pool.num_available_beside(matched) else None

    def _take_blocks(self, sequence: Sequence, matched: list[int]) -> None:
        num_new = self._pool.blocks_for(len(sequence.token_ids)) - len(matched)
        self._pool.share(matched)
        new = self._pool.fill(num_new) if sequence.from_outside else self._pool.allocate(num_new)
        sequence.block_ids = [*matched, *new]
        sequence.num_computed = len(matched) * self._pool.block_size_tokens
        sequence.state = State.RESERVED if sequence.from_outside else State.RUNNING
        self._running.append(sequence)
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = sequence.num_computed
            self.num_queried_tokens += len(sequence.token_ids)
            self.num_cached_tokens += sequence.num_cached_tokens

    def _hold_blocks(self, sequence: Sequence, now_s: float) -> None:
        ttl_s = sequence.hold_ttl_s
        if ttl_s is not None:
            self._pool.hold(Hold(sequence.id, _HOLD_REASON, list(sequence.block_ids), ttl_s, now_s + ttl_s))

    # --- planning ---------------------------------------------------------------------------------------------------

    def _plan_decodes(self, chunks: list[Chunk], budget: int, events: list[Event]) -> int:
        """Chunks for the sequences that lack one token only. Returns what is left of the budget."""
        for sequence in list(self._running):
            if not budget:
                break
            # The state changes under way: a younger one may have been preempted for an older one.
            if sequence.state is not State.RUNNING or _tokens_to_compute(sequence) != 1:
                continue
            if self._has_slot(sequence) or self._grow(sequence, events):
                budget = self._plan_chunk(sequence, chunks, budget)
        return budget

    def _plan_prefills(self, chunks: list[Chunk], budget: int) -> int:
        for sequence in self._running:
            if not budget:
                break
            if sequence.state is State.RUNNING and _tokens_to_compute(sequence) > 1:
                budget = self._plan_chunk(sequence, chunks, budget)
        return budget

    @staticmethod
    def _plan_chunk(sequence: Sequence, chunks: list[Chunk], budget: int) -> int:
        num_tokens = min(_tokens_to_compute(sequence), budget)
        chunks.append(Chunk(sequence, sequence.num_computed, num_tokens))
        return budget - num_tokens

    # --- memory -----------------------------------------------------------------------------------------------------

    def _has_slot(self, sequence: Sequence) -> bool:
        """Whether the next token's KV has a place in the sequence's blocks."""
        return sequence.num_computed < len(sequence.block_ids) * self._pool.block_size_tokens

    def _grow(self, sequence: Sequence, events: list[Event]) -> bool:
        """One more block, from younger sequences if need be. False when the sequence itself had to give way."""
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
        """Back to the front of the queue, to be computed again from prompt and output so far."""
        self._give_back(sequence)
        self._running.remove(sequence)
        sequence.state = State.WAITING
        sequence.from_outside = False
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(sequence)
        self._queued_tokens += _tokens_to_compute(sequence)

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
            self._pool.store(sequence.block_ids[index], sequence.hashes[index], parent)

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
