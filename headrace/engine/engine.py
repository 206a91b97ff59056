"""The engine: sequences come in as commands, tokens and blocks go out as step outputs. It knows nothing of the network.

    submit ─▶ waiting ─▶ running ─▶ NewToken … NewToken(finish_reason)
    submit, with hold_ttl_s ─▶ running ─▶ BlocksReady …, NewToken; the blocks stay held until release_hold or expiry
    submit, with several choices ─▶ one prompt ─▶ NewToken of each choice … NewToken(finish_reason) of each choice
    reserve ─▶ waiting ─▶ Reserved ─▶ (blocks are filled from outside) ─▶ adopt ─▶ NewToken … of each choice
                              └ abort ─▶ quarantine ─▶ settle

One thread owns the engine and calls everything here, `load` excepted; nothing is locked. A step is three verbs:
schedule (`scheduler.py`), run (`runner.py`), post-process (here).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

import structlog

from headrace.clock import Clock
from headrace.config import EngineSettings
from headrace.engine.block_pool import BlockPool, Hold, NamedBlock, PoolAudit
from headrace.engine.runner import ModelRunner
from headrace.engine.scheduler import Scheduler, Share
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
from headrace.errors import (
    AlreadyExists,
    HeadraceError,
    InternalError,
    NotFound,
    PermissionDenied,
    RankLost,
    RequestCancelled,
    StaleBlocks,
    Unavailable,
)
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
    holds: int  # of readers elsewhere
    expired_holds: int
    quarantined_blocks: int
    prefill_tokens_per_s: float  # lately, by steps that mostly prefilled; 0: not known yet
    decode_step_s: float  # lately, of a step that decodes, whatever else is in it; 0: not known yet
    busy_s: float  # spent in steps …
    at_s: float  # … until now, on the engine's clock
    tiers: list[TierStats]  # of the device, and of what there is below


_MAX_PROBLEMS_LOGGED = 20
# Each new step counts this much in the rate of prefill, and in the time of a decode step.
_RATE_WEIGHT = 0.2


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
        self._num_expired_holds = 0
        self._prefill_tokens_per_s = 0.0
        self._decode_step_s = 0.0
        self._busy_s = 0.0

    # --- commands ---------------------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence to be computed here. Raises InvalidRequest, AlreadyExists or Overloaded."""
        self._scheduler.add(sequence, self.clock.now())

    def reserve(self, sequence: Sequence) -> None:
        """Queue a sequence whose KV comes from outside: it gets blocks for all its tokens. Raises as `submit`."""
        assert sequence.hold_ttl_s is None
        sequence.from_outside = True
        self._scheduler.add(sequence, self.clock.now())

    def adopt(self, sequence_id: str, first_tokens: Mapping[int, int]) -> None:
        """The KV of a reserved sequence is here, and `first_tokens` follow it, by choice. Choices that are not among
        them are over. Raises NotFound if the sequence is not reserved.
        """
        reserved = [s for s in self._scheduler.find(sequence_id) if s.state is State.RESERVED]
        if not reserved:
            raise NotFound(f"no reserved sequence {sequence_id}")
        first = reserved[0]
        assert first_tokens.keys() <= set(first.choices)
        self._scheduler.adopt(first)
        branches = [first, *first.split()]
        going_on = [branch for branch in branches if branch.choices[0] in first_tokens]
        for branch in going_on:
            branch.token_ids.append(first_tokens[branch.choices[0]])
        self._branch(first, going_on)

    def abort(self, sequence_id: str, choice: int | None = None) -> None:
        """Stop a sequence, or that choice of it once it has split, without a further event; nothing for what is unknown
        or over. Blocks announced under a hold stay held, blocks that are being filled are quarantined until
        `settle(sequence_id)`.
        """
        for sequence in self._scheduler.find(sequence_id):
            if choice is None or list(sequence.choices) == [choice]:
                self._scheduler.end(sequence)

    def settle(self, owner: str) -> None:
        """Nobody outside can write into the aborted sequence's blocks any more. Nothing for an unknown owner."""
        self._pool.settle(owner)

    def hold_cached(
        self, owner: str, reason: str, reader: str, names: Items[bytes], ttl_s: float
    ) -> dict[int, int]:
        """Hold the leading blocks of `names` that are here, for one reader. Returns their generations by block id;
        none: there is no hold. Raises AlreadyExists.
        """
        if self._pool.owns(owner) or self._scheduler.find(owner):
            raise AlreadyExists(f"{owner} is in use")
        block_ids = self._pool.find_for_reader(names)
        if block_ids:
            self._pool.hold(Hold(owner, reason, block_ids, ttl_s, self.clock.now() + ttl_s, reader))
        return {block_id: self._pool.generation(block_id) for block_id in block_ids}

    def renew_hold(self, owner: str, reader: str | None = None) -> bool:
        """Start the hold's time again. False when there is no such hold (any more). Raises PermissionDenied when it is
        kept for another reader.
        """
        self.expire_holds()
        self._check_reader(owner, reader)
        return self._pool.renew_hold(owner, self.clock.now())

    def release_hold(
        self, owner: str, reader: str | None = None, generations: Mapping[int, int] | None = None
    ) -> bool:
        """The reader is done with the blocks. False when there is no such hold (any more).

        `generations` by block id: what the reader was told of the blocks it read. Raises StaleBlocks if one of them has
        been recycled since, PermissionDenied as `renew_hold`.
        """
        self._check_reader(owner, reader)
        changed = [i for i, told in (generations or {}).items() if not self._pool.is_generation(i, told)]
        if not self._pool.release_hold(owner):
            return False
        self.fail(owner, RequestCancelled(f"the hold of {owner} was released"))
        if changed:
            raise StaleBlocks(f"blocks {changed[:8]} of hold {owner} were recycled while they were read")
        return True

    def expire_holds(self) -> None:
        """End the holds whose time is over. Each step does this too."""
        for owner in self._pool.expired_holds(self.clock.now()):
            hold = self._pool.find_hold(owner)
            assert hold is not None
            self._num_expired_holds += 1
            log.warning(
                "hold expired",
                owner=owner,
                reason=hold.reason,
                reader=hold.reader,
                blocks=len(hold.block_ids),
            )
            self._pool.release_hold(owner)
            self.fail(owner, Unavailable(f"the hold expired while {owner} was being computed"))

    def begin_import(self, owner: str, count: int) -> list[int]:
        """Blocks to be filled with cached content of another engine; as many as can be spared, perhaps none."""
        count = min(count, self._scheduler.num_to_spare())
        return self._pool.begin_import(owner, count) if count > 0 else []

    def finish_import(self, owner: str, names: Items[NamedBlock]) -> None:
        """The import's blocks are here, one for each name, and checked: they can be found from now on."""
        self._pool.finish_import(owner, names)

    def abandon_import(self, owner: str) -> None:
        """Given up: the blocks are quarantined until `settle(owner)`. Nothing for an unknown owner."""
        self._pool.abandon_import(owner)

    def reset_cache(self) -> None:
        """Forget all cached blocks that nobody uses or holds, in every tier."""
        self._pool.forget_cached()

    def fail(self, sequence_id: str, error: HeadraceError) -> None:
        """End a sequence, with all its choices, by an error event; nothing for an id that is unknown or over."""
        choices = self._scheduler.find(sequence_id)
        for sequence in choices:
            self._scheduler.end(sequence)
        if choices:
            self._events.append(Failed(sequence_id, error))

    def fail_all(self, error: HeadraceError) -> None:
        """End every sequence with `error`: the last resort when the engine itself is at fault."""
        for sequence in self._scheduler.alive():
            self.fail(sequence.id, error)

    # --- questions --------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether the next step would do or report anything. False while all that waits, waits for blocks."""
        return bool(self._events) or self._pool.has_changes or self._scheduler.has_work

    @property
    def is_busy(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._scheduler.num_running or self._scheduler.num_waiting)

    def num_cached_blocks(self, hashes: list[bytes]) -> int:
        """How many blocks of this prefix need not be computed, whichever tier they are in."""
        return self._pool.num_cached_blocks(hashes)

    def missing(self, names: Items[NamedBlock]) -> list[NamedBlock]:
        """Those that are not here."""
        return [name for name in names if self._pool.tier(name.digest) is None]

    def hottest(self, max_blocks: int) -> list[NamedBlock]:
        """The blocks most worth keeping, each behind its parent."""
        return self._pool.hottest(max_blocks)

    def audit(self) -> PoolAudit:
        """Every block accounted for; what does not add up is logged. Walks the pool: for idle moments and on demand."""
        self.expire_holds()  # a long step may have kept them
        audit = self._pool.audit(
            self._scheduler.block_users(), self._scheduler.blocks_being_filled(), self.clock.now()
        )
        if audit.problems:
            log.error(
                "the block audit failed",
                problems=audit.problems[:_MAX_PROBLEMS_LOGGED],
                num_problems=len(audit.problems),
            )
        return audit

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
            holds=self._pool.num_holds,
            expired_holds=self._num_expired_holds,
            quarantined_blocks=self._pool.num_quarantined,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            decode_step_s=self._decode_step_s,
            busy_s=self._busy_s,
            at_s=self.clock.now(),
            tiers=self._pool.tier_stats(),
        )

    def shares(self, arriving: list[Sequence]) -> dict[str, Share]:
        """Of the load of the moment, by the sequences' `origin`; `arriving`: on their way here, or here by now. May be
        called from another thread.
        """
        return self._scheduler.shares(arriving)

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
        started_at_s = self.clock.now()
        try:
            results = self._runner.run(plan)
            self._note_rate(plan, self.clock.now() - started_at_s)
            return results
        except RankLost as error:
            return [ChunkResult(error=error)] * len(plan.chunks)
        except Exception as error:  # the engine loop: this step's sequences fail, the others go on
            log.exception("step failed", sequences=[chunk.sequence.id for chunk in plan.chunks])
            return [ChunkResult(error=InternalError(f"the step failed: {error!r}"))] * len(plan.chunks)

    def _note_rate(self, plan: StepPlan, seconds: float) -> None:
        """How fast prompts are computed, from the steps that are mostly that, and how long decodes wait for a token."""
        self._busy_s += seconds
        if any(_is_decode(chunk) for chunk in plan.chunks):
            known = self._decode_step_s or seconds
            self._decode_step_s = known + _RATE_WEIGHT * (seconds - known)
        num_prefill = sum(chunk.num_tokens for chunk in plan.chunks if not _is_decode(chunk))
        if 2 * num_prefill < plan.num_tokens or seconds <= 0:
            return
        known = self._prefill_tokens_per_s or num_prefill / seconds
        self._prefill_tokens_per_s = known + _RATE_WEIGHT * (num_prefill / seconds - known)

    def _post_process(self, plan: StepPlan, results: list[ChunkResult]) -> None:
        for chunk, result in zip(plan.chunks, results, strict=True):
            sequence, samples = chunk.sequence, chunk.samples
            error = result.error
            if error is None and samples and len(result.drawn) != len(sequence.choices):
                error = InternalError(f"the step drew {len(result.drawn)} tokens for {sequence.id}")
            if error is not None:
                self.fail(sequence.id, error)
            if sequence.state is not State.RUNNING:
                continue  # it failed here, or with another of its choices
            self._count(chunk)
            self._scheduler.computed(chunk)
            if result.prompt_logprobs:
                first = 1 + sequence.num_prompt_logprobs
                sequence.num_prompt_logprobs += len(result.prompt_logprobs)
                self._events.append(PromptLogprobs(sequence.id, first, result.prompt_logprobs))
            if sequence.hold_ttl_s is not None:
                self._announce_blocks(sequence)
            if samples:
                self._draw(sequence, result.drawn)

    def _count(self, chunk: Chunk) -> None:
        if not _is_decode(chunk):
            self._num_prefill_tokens += chunk.num_tokens

    def _announce_blocks(self, sequence: Sequence) -> None:
        """Report a held sequence's newly complete blocks; with its last chunk the partial one too."""
        is_last = sequence.num_computed == len(sequence.token_ids)
        num_full = sequence.num_computed // self._pool.block_size_tokens
        num_ready = len(sequence.block_ids) if is_last else num_full
        first = sequence.num_announced_blocks
        if num_ready > first:
            block_ids = sequence.block_ids[first:num_ready]
            generations = [self._pool.generation(block_id) for block_id in block_ids]
            self._events.append(BlocksReady(sequence.id, first, block_ids, generations))
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
        branches = [sequence, *sequence.split()]
        going_on = [
            branch for branch, token in zip(branches, drawn, strict=True) if self._append(branch, token)
        ]
        self._branch(sequence, going_on)

    def _branch(self, first: Sequence, going_on: list[Sequence]) -> None:
        """The choices that were split off `first` share its blocks, from their first tokens on."""
        copies: list[tuple[int, int]] = []
        for sequence in going_on:
            if sequence is not first:
                copies += self._scheduler.join(sequence, first)
        if copies:
            self._runner.copy_blocks(copies)
        if first not in going_on:
            self._scheduler.end(first)

    def _append(self, sequence: Sequence, token: Drawn) -> bool:
        """Whether the sequence goes on after the token."""
        sequence.token_ids.append(token.token_id)
        reason = sequence.finish_reason(token.token_id, self._eos_token_ids)
        self._emit(sequence.id, sequence.choices[0], token, reason)
        return reason is None

    def _emit(self, sequence_id: str, choice: int, token: Drawn, reason: FinishReason | None) -> None:
        self._num_output_tokens += 1
        self._events.append(NewToken(sequence_id, token.token_id, reason, choice, token.logprobs))

    def _check_reader(self, owner: str, reader: str | None) -> None:
        hold = self._pool.find_hold(owner)
        if hold is not None and reader is not None and hold.reader != reader:
            raise PermissionDenied(f"hold {owner} is kept for another reader than {reader}")

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


def _is_decode(chunk: Chunk) -> bool:
    return chunk.num_tokens == 1 and chunk.sequence.num_output_tokens > 0
