"""The engine: sequences come in as commands, tokens and blocks go out as step outputs. It knows nothing of the network.

    submit ─▶ waiting ─▶ running ─▶ NewToken … NewToken(finish_reason)
    submit, with hold_ttl_s ─▶ running ─▶ BlocksReady …, NewToken; the blocks stay held until release_hold or expiry
    submit, with several choices ─▶ one prompt ─▶ NewToken of each choice … NewToken(finish_reason) of each choice
    reserve ─▶ waiting ─▶ Reserved ─▶ (blocks are filled from outside) ─▶ adopt ─▶ NewToken …
                              └ abort ─▶ quarantine ─▶ settle

One thread owns the engine and calls everything here, `load` excepted; nothing is locked. A step is three verbs:
schedule (`scheduler.py`), run (`runner.py`), post-process (here).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import structlog

from headrace.clock import Clock
from headrace.config import EngineSettings
from headrace.engine.block_pool import BlockPool, PoolAudit
from headrace.engine.runner import ModelRunner
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import (
    BlocksReady,
    Chunk,
    ChunkResult,
    Drawn,
    Event,
    Failed,
    NewToken,
    PromptLogprobs,
    Sequence,
    State,
    StepOutput,
    StepPlan,
    finish_reason,
)
from headrace.engine.tiers import TierStats
from headrace.errors import HeadraceError, InternalError, NotFound, RequestCancelled, Unavailable
from headrace.sampling_params import FinishReason

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine is, and what it did since its start."""

    running: int  # sequences that compute or are reserved
    waiting: int
    waiting_tokens: int  # known tokens still to be computed here, of waiting and running sequences
    free_blocks: int
    cached_blocks: int
    steps: int  # times the model ran
    prefill_tokens: int  # put through the model in prefill chunks, computed again after preemption included
    output_tokens: int  # drawn here
    cached_tokens: int  # prompt tokens found in the prefix tree …
    queries: int  # … out of so many looked up, each sequence counted once
    preemptions: int
    tiers: list[TierStats]  # of the device, and of what there is below


class Engine:
    def __init__(
        self,
        runner: ModelRunner,
        pool: BlockPool,
        settings: EngineSettings,
        eos_token_ids: frozenset[int],
        clock: Clock,
    ) -> None:
        self.clock = clock
        self._runner = runner
        self._pool = pool
        self._scheduler = Scheduler(pool, settings)
        self._eos_token_ids = eos_token_ids
        self._stall_warning_s = settings.stall_warning_s
        self._stalled_since_s: float | None = None
        self._events: list[Event] = []
        self._num_steps = 0
        self._num_prefill_tokens = 0
        self._num_output_tokens = 0

    # --- commands ---------------------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence to be computed here. Raises InvalidRequest, AlreadyExists or Overloaded."""
        self._scheduler.add(sequence, self.clock.now())

    def reserve(self, sequence: Sequence) -> None:
        """Queue a sequence whose KV comes from outside: it gets blocks for all its tokens. Raises as `submit`."""
        assert sequence.hold_ttl_s is None
        assert len(sequence.choices) == 1
        sequence.from_outside = True
        self._scheduler.add(sequence, self.clock.now())

    def adopt(self, sequence_id: str, token_id: int) -> None:
        """The KV of a reserved sequence is here, and `token_id` follows it. Raises NotFound if it is not reserved."""
        reserved = [s for s in self._scheduler.find(sequence_id) if s.state is State.RESERVED]
        if not reserved:
            raise NotFound(f"no reserved sequence {sequence_id}")
        self._scheduler.adopt(reserved[0], token_id)

    def abort(self, sequence_id: str) -> None:
        """Stop a sequence without a further event; nothing for an id that is unknown or over. Blocks announced under a
        hold stay held, blocks that are being filled are quarantined until `settle(sequence_id)`.
        """
        for sequence in self._scheduler.find(sequence_id):
            self._scheduler.end(sequence)

    def settle(self, owner: str) -> None:
        """Nobody outside can write into the aborted sequence's blocks any more. Nothing for an unknown owner."""
        self._pool.settle(owner)

    def renew_hold(self, owner: str) -> bool:
        """Start the hold's time again. False when there is no such hold (any more)."""
        self.expire_holds()
        return self._pool.renew_hold(owner, self.clock.now())

    def release_hold(self, owner: str) -> bool:
        """The reader is done with the blocks. False when there is no such hold (any more)."""
        if not self._pool.release_hold(owner):
            return False
        self._fail(owner, RequestCancelled(f"the hold of {owner} was released"))
        return True

    def expire_holds(self) -> None:
        """End the holds whose time is over. Each step does this too."""
        for owner in self._pool.expired_holds(self.clock.now()):
            self._pool.release_hold(owner)
            log.warning("hold expired", owner=owner)
            self._fail(owner, Unavailable(f"the hold expired while {owner} was being computed"))

    def reset_cache(self) -> None:
        """Forget all cached blocks that nobody uses or holds, in every tier."""
        self._pool.forget_cached()

    def fail_all(self, error: HeadraceError) -> None:
        """End every sequence with `error`: the last resort when the engine itself is at fault."""
        for sequence in self._scheduler.alive():
            self._fail(sequence.id, error)

    # --- questions --------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether the next step would do or report anything. False while all that waits, waits for blocks."""
        return bool(self._events) or self._pool.has_changes or self._scheduler.has_work

    def num_cached_blocks(self, hashes: list[bytes]) -> int:
        """How many blocks of this prefix need not be computed, whichever tier they are in."""
        return self._pool.num_cached_blocks(hashes)

    def audit(self) -> PoolAudit:
        """Every block accounted for. Walks the pool: for idle moments and status calls."""
        return self._pool.audit(self._scheduler.block_users())

    def load(self) -> EngineLoad:
        """Cheap, and may be called from another thread: figures of one moment, perhaps of two."""
        return EngineLoad(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            waiting_tokens=self._scheduler.num_waiting_tokens,
            free_blocks=self._pool.num_free,
            cached_blocks=self._pool.num_cached,
            steps=self._num_steps,
            prefill_tokens=self._num_prefill_tokens,
            output_tokens=self._num_output_tokens,
            cached_tokens=self._scheduler.num_cached_tokens,
            queries=self._scheduler.num_queried_tokens,
            preemptions=self._scheduler.num_preemptions,
            tiers=self._pool.tier_stats(),
        )

    # --- the step ---------------------------------------------------------------------------------------------------

    def step(self, early: Callable[[StepOutput], None] | None = None) -> StepOutput:
        """Schedule, run, post-process. Returns what happened since the last output, which may be nothing.

        `early`, where given, gets what is known before the model runs (Started, Reserved and the like), if anything.
        """
        self.expire_holds()
        self._pool.start_step()
        num_events = len(self._events)
        plan = self._scheduler.schedule(self._events, self.clock.now())
        self._watch_for_stall(progressed=bool(plan.chunks) or len(self._events) > num_events)
        if plan.chunks:
            if early is not None and self._events:
                early(self._take_output())
            self._post_process(plan, self._run(plan))
        return self._take_output()

    def _run(self, plan: StepPlan) -> list[ChunkResult]:
        self._num_steps += 1
        try:
            return self._runner.run(plan)
        except Exception as error:  # the engine loop: this step's sequences fail, the others go on
            log.exception("step failed", sequences=[chunk.sequence.id for chunk in plan.chunks])
            return [ChunkResult(error=InternalError(f"the step failed: {error!r}"))] * len(plan.chunks)

    def _post_process(self, plan: StepPlan, results: list[ChunkResult]) -> None:
        for chunk, result in zip(plan.chunks, results, strict=True):
            sequence, samples = chunk.sequence, chunk.samples
            error = result.error
            if error is None and samples and len(result.drawn) != len(sequence.choices):
                error = InternalError(f"the step drew {len(result.drawn)} tokens for {sequence.id}")
            if error is not None:
                self._fail(sequence.id, error)
            if sequence.state is not State.RUNNING:
                continue  # it failed here, or with another of its choices
            self._count(chunk)
            self._scheduler.computed(chunk)
            if result.prompt_logprobs:
                sequence.num_prompt_logprobs += len(result.prompt_logprobs)
                self._events.append(PromptLogprobs(sequence.id, result.prompt_logprobs))
            if sequence.hold_ttl_s is not None:
                self._announce_blocks(sequence)
            if samples:
                self._draw(sequence, result.drawn)

    def _count(self, chunk: Chunk) -> None:
        is_decode = chunk.num_tokens == 1 and chunk.sequence.num_output_tokens > 0
        if not is_decode:
            self._num_prefill_tokens += chunk.num_tokens

    def _announce_blocks(self, sequence: Sequence) -> None:
        """Report a held sequence's newly complete blocks; with its last chunk the partial one too."""
        is_last = sequence.num_computed == len(sequence.token_ids)
        num_full = sequence.num_computed // self._pool.block_size_tokens
        num_ready = len(sequence.block_ids) if is_last else num_full
        first = sequence.num_announced_blocks
        if num_ready > first:
            self._events.append(BlocksReady(sequence.id, first, sequence.block_ids[first:num_ready]))
            sequence.num_announced_blocks = num_ready

    def _draw(self, sequence: Sequence, drawn: Items[Drawn]) -> None:
        """Each choice goes on with its own token. A held sequence ends here, with the first tokens of all."""
        if sequence.hold_ttl_s is not None:
            for choice, token in zip(sequence.choices, drawn, strict=True):
                reason = finish_reason(
                    sequence.sampling, token.token_id, sequence.num_output_tokens + 1, self._eos_token_ids
                )
                self._emit(sequence.id, choice, token, reason)
            self._scheduler.end(sequence)
            return
        others = sequence.split()
        goes_on = [self._append(*pair) for pair in zip([sequence, *others], drawn, strict=True)]
        copies: list[tuple[int, int]] = []
        for other, other_goes_on in zip(others, goes_on[1:], strict=True):
            if other_goes_on:
                copies += self._scheduler.join(other, sequence)
        if copies:
            self._runner.copy_blocks(copies)
        if not goes_on[0]:
            self._scheduler.end(sequence)

    def _append(self, sequence: Sequence, token: Drawn) -> bool:
        """Whether the sequence goes on after the token."""
        sequence.token_ids.append(token.token_id)
        reason = sequence.finish_reason(token.token_id, self._eos_token_ids)
        self._emit(sequence.id, sequence.choices[0], token, reason)
        return reason is None

    def _emit(self, sequence_id: str, choice: int, token: Drawn, reason: FinishReason | None) -> None:
        self._num_output_tokens += 1
        self._events.append(NewToken(sequence_id, token.token_id, reason, choice, token.logprobs))

    def _fail(self, sequence_id: str, error: HeadraceError) -> None:
        """End a sequence with all its choices; nothing when it is over already."""
        choices = self._scheduler.find(sequence_id)
        for sequence in choices:
            self._scheduler.end(sequence)
        if choices:
            self._events.append(Failed(sequence_id, error))

    def _take_output(self) -> StepOutput:
        events, self._events = self._events, []
        stored, removed = self._pool.drain_changes()
        return StepOutput(events, stored, removed)

    def _watch_for_stall(self, *, progressed: bool) -> None:
        """Log, once per period, that sequences wait and nothing is scheduled."""
        now_s = self.clock.now()
        if progressed or not self._scheduler.num_waiting:
            self._stalled_since_s = None
        elif self._stalled_since_s is None:
            self._stalled_since_s = now_s
        elif now_s - self._stalled_since_s >= self._stall_warning_s:
            self._stalled_since_s = now_s
            audit = self.audit()
            log.warning(
                "sequences wait and nothing is scheduled",
                waiting=self._scheduler.num_waiting,
                reason=self._scheduler.why_blocked(),
                held=audit.held,
                filling=audit.filling,
                quarantined=audit.quarantined,
            )
