"""An engine, the world outside it, and what both may do at any time. Every step is held against the rules.

The world brings sequences, fills reserved blocks, may write late into those of an aborted sequence, reads announced
blocks until it releases them or their time is over, and lets time pass. It knows how each sequence has to go on, which
positions were computed, what the directory believes to be cached, and who comes before whom.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from headrace.block_hash import extend
from headrace.engine import scheduler
from headrace.engine.block_pool import BlockState
from headrace.engine.scripted_runner import ScriptedRunner, continuation
from headrace.engine.sequence import (
    BlocksReady,
    Chunk,
    Event,
    Failed,
    NewToken,
    Reserved,
    Sequence,
    Started,
    State,
    StepOutput,
    StepPlan,
)
from headrace.errors import Overloaded, RequestCancelled, Unavailable
from headrace.priority import rank_s
from headrace.sampling_params import FinishReason
from headrace.tier import Tier
from tests.property.operations import Choices, Operation
from tests.support.audit import assert_idle_pool, assert_sound
from tests.support.engine_driver import ROOT, VOCAB_SIZE, EngineDriver, make_sequence

B = 2
NUM_BLOCKS = 10
Tiers = dict[bytes, Tier]
MAX_STEP_TOKENS = 4
MAX_SEQUENCES = 4
MAX_WAITING = 6
TTL_S = 5.0
# Few first halves and few endings: common prefixes and equal prompts are frequent.
BASE = list(range(20, 30))


@dataclass
class Seen:
    """What the world knows of one sequence."""

    sequence: Sequence
    kind: str  # "submitted", "held", "reserved"
    prompt: list[int]
    max_tokens: int
    rank: tuple[float, int]
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_preemptions: int = 0
    num_overtaken: int = 0  # since it last began to wait
    reserved: Reserved | None = None
    adopted: bool = False
    announced: list[int] = field(default_factory=list)
    is_over: bool = False
    aborted: bool = False
    may_fail: bool = False  # its hold is over while it may still compute
    hold_until_s: float | None = None

    @property
    def id(self) -> str:
        return self.sequence.id

    @property
    def num_known(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def can_be_preempted(self) -> bool:
        return self.sequence.state is State.RUNNING and self.kind != "held"


class World:
    def __init__(self, num_host_blocks: int = 0) -> None:
        self.driver = EngineDriver(
            NUM_BLOCKS,
            B,
            num_host_blocks=num_host_blocks,
            max_step_tokens=MAX_STEP_TOKENS,
            max_sequences=MAX_SEQUENCES,
            max_waiting=MAX_WAITING,
        )
        self.engine = self.driver.engine
        self.seen: dict[str, Seen] = {}
        self.believed: dict[bytes, Tier] = {}  # what a listener believes to be cached, and where
        self.num_queried = 0
        self.num_hits = 0
        self.num_drawn = 0

    def run(self, operations: list[Operation]) -> None:
        for name, number in operations:
            getattr(self, name)(Choices(number))
            self.check()
        self.come_to_an_end()

    # --- operations -------------------------------------------------------------------------------------------------

    def bring(self, choices: Choices) -> None:
        for _ in range(1 + choices.below(2)):
            self.bring_one(choices)

    def bring_one(self, choices: Choices) -> None:
        kind = choices.of(["submitted", "submitted", "held", "reserved"])
        prompt = BASE[: choices.below(9)] + [choices.of([7, 8]) for _ in range(1 + choices.below(2))]
        sequence = make_sequence(
            f"{kind} {len(self.seen)}",
            prompt,
            max_tokens=1 + choices.below(9),
            hold_ttl_s=TTL_S if kind == "held" else None,
        )
        sequence.priority = choices.of([0, 0, 0, -1, 1, 4])
        sequence.retention = choices.of([0, 0, 0, 1, 3])
        try:
            (self.engine.reserve if kind == "reserved" else self.engine.submit)(sequence)
        except Overloaded:
            assert self.engine.load().waiting >= MAX_WAITING
            return
        arrived_s = rank_s(self.driver.clock.now(), sequence.priority)
        max_tokens = sequence.sampling.max_tokens
        self.seen[sequence.id] = Seen(sequence, kind, prompt, max_tokens, (arrived_s, len(self.seen)))

    def fill_and_adopt(self, choices: Choices) -> None:
        fillable = [seen for seen in self.living() if seen.reserved is not None and not seen.adopted]
        if not fillable:
            return
        seen = choices.of(fillable)
        assert seen.reserved is not None
        outside = filled(seen.prompt)
        for index in range(seen.reserved.num_cached_blocks, len(seen.reserved.block_ids)):
            self.driver.runner.copy_block(outside, index, seen.reserved.block_ids[index])
        [token] = continuation(seen.prompt, 1)
        seen.tokens.append(token)
        seen.num_computed = len(seen.prompt)
        if seen.max_tokens == 1:  # the first token ends the answer: nothing is adopted
            self.engine.abort(seen.id)
            seen.is_over = seen.aborted = True
        else:
            self.engine.adopt(seen.id, {0: token})
            seen.adopted = True

    def abort(self, choices: Choices) -> None:
        if self.living():
            seen = choices.of(self.living())
            self.engine.abort(seen.id)
            seen.is_over = seen.aborted = True

    def settle(self, choices: Choices) -> None:
        """A transfer that was given up goes on writing for a while, until it is known to be over."""
        if not self.given_up():
            return
        late = choices.below(2)
        seen = choices.of(self.given_up())
        assert seen.reserved is not None
        if late:
            for block_id in seen.reserved.block_ids[seen.reserved.num_cached_blocks :]:
                self.driver.runner.copy_block(filled([99] * B), 0, block_id)
        else:
            self.engine.settle(seen.id)
            seen.reserved = None

    def settle_what_is_not_given_up(self, choices: Choices) -> None:
        if self.living():
            self.engine.settle(choices.of(self.living()).id)

    def renew_or_release(self, choices: Choices) -> None:
        held = [seen for seen in self.seen.values() if seen.kind == "held"]
        if not held:
            return
        renew = choices.below(2)
        seen = choices.of(held)
        has_hold = seen.hold_until_s is not None
        if renew:
            assert self.engine.renew_hold(seen.id) == has_hold
            seen.hold_until_s = self.driver.clock.now() + TTL_S if has_hold else None
        else:
            self.engine.expire_holds()
            assert self.engine.release_hold(seen.id) == has_hold
            self.hold_is_over(seen)

    def reset_cache(self, _: Choices) -> None:
        self.engine.reset_cache()
        assert self.engine.load().cached_blocks == 0

    def advance(self, choices: Choices) -> None:
        self.let_pass(choices.of([0.5, 2.0, 4.5]))

    def step(self, choices: Choices) -> None:
        for _ in range(choices.below(4)):
            self.one_step()
            self.check()
        self.one_step()

    # --- a step, and what is right in it ----------------------------------------------------------------------------

    def one_step(self) -> None:
        waiting = [seen for seen in self.living() if seen.sequence.state is State.WAITING]
        running = [seen for seen in self.living() if seen.sequence.state is State.RUNNING]
        decoding = [seen for seen in running if seen.num_known - seen.num_computed == 1]
        preemptible = [seen for seen in running if seen.can_be_preempted]
        num_steps = len(self.driver.runner.steps)
        outputs: list[StepOutput] = []
        believed = dict(self.believed)
        outputs.append(self.engine.step(early=lambda output: self.take_early(output, outputs)))
        chunks = [chunk for step in self.driver.runner.steps[num_steps:] for chunk in step]
        preempted = [s for s in preemptible if s.sequence.num_preemptions > s.num_preemptions]
        for seen in preempted:
            seen.num_preemptions = seen.sequence.num_preemptions
            seen.num_computed = seen.num_overtaken = 0
        # What was in the tree when sequences were admitted: not less than right before the model ran, and not more than
        # before, with what was adopted meanwhile.
        self.take(outputs[0], (self.believed_after(outputs[:1]), believed | outputs[0].stored), chunks)
        for output in outputs[1:]:
            self.take(output, ({}, {}), [])
        self.last_in_rank_gave_way(preempted, preemptible)
        self.decodes_came_first(chunks, decoding)
        self.nobody_was_overtaken_for_ever(waiting)

    def take_early(self, output: StepOutput, outputs: list[StepOutput]) -> None:
        outputs.append(StepOutput(list(output.events), output.stored, output.removed))

    def believed_after(self, outputs: list[StepOutput]) -> dict[bytes, Tier]:
        believed = dict(self.believed)
        for output in outputs:
            believed |= output.stored
            for digest in output.removed:
                del believed[digest]
        return believed

    def take(
        self, output: StepOutput, known: tuple[Tiers, Tiers], chunks: list[tuple[str, int, int]]
    ) -> None:
        assert all(self.believed.get(digest) is not tier for digest, tier in output.stored.items())
        assert self.believed.keys() >= set(output.removed)
        self.believed = self.believed_after([output])
        arrivals = [event for event in output.events if isinstance(event, (Started, Reserved))]
        for event in arrivals:
            self.take_arrival(event, known)
        self.take_chunks(chunks)
        for event in output.events:
            if event not in arrivals:
                self.take_event(event)

    def take_arrival(self, event: Started | Reserved, known: tuple[Tiers, Tiers]) -> None:
        seen = self.seen[event.sequence_id]
        assert not seen.is_over
        if isinstance(event, Started):
            assert seen.kind != "reserved"
            num_cached = event.num_cached_tokens
            seen.num_computed = num_cached
            if seen.kind == "held":
                seen.hold_until_s = self.driver.clock.now() + TTL_S
        else:
            assert seen.kind == "reserved"
            assert len(event.block_ids) == -(-len(seen.prompt) // B)
            num_cached = event.num_cached_blocks * B
            seen.reserved = event
        hashes = extend(ROOT, seen.prompt, B)[: (len(seen.prompt) - (seen.kind != "reserved")) // B]
        least, most = (prefix_length(hashes, digests) * B for digests in known)
        assert least <= num_cached <= most, f"{seen.id} found {num_cached} tokens, known {least} to {most}"
        self.num_queried += len(seen.prompt)
        self.num_hits += num_cached

    def take_chunks(self, chunks: list[tuple[str, int, int]]) -> None:
        """Each position is computed once, in order, unless the sequence was preempted."""
        assert len({sequence_id for sequence_id, _, _ in chunks}) == len(chunks)
        assert sum(num_tokens for _, _, num_tokens in chunks) <= MAX_STEP_TOKENS
        for sequence_id, start, num_tokens in chunks:
            seen = self.seen[sequence_id]
            if seen.num_preemptions and not seen.num_computed:
                assert start % B == 0
            else:
                assert start == seen.num_computed, f"{seen.id} has {seen.num_computed}, computes from {start}"
            seen.num_computed = start + num_tokens
            assert num_tokens > 0
            assert seen.num_computed <= seen.num_known

    def take_event(self, event: Event) -> None:
        seen = self.seen[event.sequence_id]
        # A hold's end and an abort may cross.
        assert not seen.is_over or (seen.aborted and seen.may_fail and isinstance(event, Failed))
        if isinstance(event, BlocksReady):
            assert seen.kind == "held"
            assert event.first_index == len(seen.announced)
            seen.announced += event.block_ids
        elif isinstance(event, NewToken):
            self.take_token(seen, event)
        else:
            assert isinstance(event, Failed)
            seen.is_over = True
            if isinstance(event.error, Overloaded):
                assert seen.kind != "held"
            else:
                assert isinstance(event.error, (Unavailable, RequestCancelled))
                assert seen.may_fail

    def take_token(self, seen: Seen, event: NewToken) -> None:
        assert seen.kind != "reserved" or seen.adopted
        self.num_drawn += 1
        seen.tokens.append(event.token_id)
        assert seen.num_computed == seen.num_known - 1, "drawn before all was computed"
        assert seen.tokens == continuation(seen.prompt, len(seen.tokens))
        is_last = len(seen.tokens) == seen.max_tokens
        assert event.finish_reason == (FinishReason.LENGTH if is_last else None)
        seen.is_over = is_last or seen.kind == "held"
        if seen.kind == "held":
            assert len(seen.announced) == -(-len(seen.prompt) // B)

    def last_in_rank_gave_way(self, preempted: list[Seen], preemptible: list[Seen]) -> None:
        for seen in preempted:
            for other in preemptible:
                if other.rank > seen.rank:
                    assert other in preempted, f"{seen.id} gave way, {other.id} behind it did not"

    def decodes_came_first(self, chunks: list[tuple[str, int, int]], decoding: list[Seen]) -> None:
        """In order of rank; who was left out found the budget spent on those before it."""
        planned = [sequence_id for sequence_id, _, _ in chunks]
        left_out = [s for s in decoding if s.id not in planned and s.sequence.state is State.RUNNING]
        for seen in left_out:
            assert len(planned) == MAX_STEP_TOKENS
            assert all(self.seen[other].rank < seen.rank for other in planned)

    def nobody_was_overtaken_for_ever(self, waiting: list[Seen]) -> None:
        admitted = [seen for seen in waiting if seen.sequence.state is not State.WAITING]
        for seen in waiting:
            if seen.sequence.state is State.WAITING:
                seen.num_overtaken += sum(other.rank > seen.rank for other in admitted)
                assert seen.num_overtaken <= scheduler.MAX_OVERTAKEN
            else:
                seen.num_overtaken = 0

    # --- what holds at any time -------------------------------------------------------------------------------------

    def check(self) -> None:
        assert_sound(self.engine.audit())
        for seen in self.seen.values():
            if seen.announced:
                self.announced_blocks_keep_their_content(seen)
            if seen.hold_until_s is not None and seen.is_over:
                assert self.driver.pool._holds[seen.id].block_ids == seen.announced
        for seen in self.given_up():
            assert seen.reserved is not None
            for block_id in seen.reserved.block_ids[seen.reserved.num_cached_blocks :]:
                assert self.driver.pool.state(block_id) is BlockState.QUARANTINED
        load = self.engine.load()
        assert load.preemptions == sum(seen.sequence.num_preemptions for seen in self.seen.values())
        assert (load.queries, load.cached_tokens) == (self.num_queried, self.num_hits)
        assert load.output_tokens == self.num_drawn
        self.nobody_is_forgotten()

    def announced_blocks_keep_their_content(self, seen: Seen) -> None:
        expected = filled(seen.prompt)
        for index, block_id in enumerate(seen.announced):
            num_tokens = min(B, len(seen.prompt) - index * B)
            found = self.driver.runner._kv[block_id][:num_tokens]
            assert found == expected._kv[index][:num_tokens]

    def nobody_is_forgotten(self) -> None:
        """The engine sees that the first of those who wait fits, where nothing else keeps it going."""
        alive = [seen for seen in self.living() if seen.sequence.state is not State.WAITING]
        waiting = [seen for seen in self.living() if seen.sequence.state is State.WAITING]
        if waiting and not alive:
            first = min(waiting, key=lambda seen: seen.rank)
            if self.fits_alone(first):
                assert self.engine.has_work, f"{first.id} fits"

    def fits_alone(self, seen: Seen) -> bool:
        pool = self.driver.pool
        names = {digest: block_id for block_id, digest in pool._tree.block_names().items()}
        token_ids = seen.prompt + seen.tokens
        from_outside = seen.kind == "reserved" and not seen.adopted
        hashes = extend(ROOT, token_ids, B)[: (len(token_ids) - (not from_outside)) // B]
        num_matched = prefix_length(hashes, set(names))
        num_idle = sum(pool.state(names[digest]) is BlockState.CACHED for digest in hashes[:num_matched])
        num_new = -(-len(token_ids) // B) - num_matched
        num_last = max(-(-(len(seen.prompt) + seen.max_tokens - 1) // B), -(-len(token_ids) // B))
        room = min(num_last - num_matched - num_new, (1 << seen.num_preemptions) - 1)
        return num_new + room <= pool.num_available - num_idle

    def come_to_an_end(self) -> None:
        """Nothing is lost, and every block comes back."""
        for seen in self.living():
            if seen.kind == "reserved" and not seen.adopted:
                self.engine.abort(seen.id)
                seen.is_over = seen.aborted = True
        for seen in self.seen.values():
            self.engine.settle(seen.id)
            seen.reserved = None
        for _ in range(60):
            if not self.living():
                break
            self.let_pass(1.0)
            for _ in range(10):
                self.one_step()
        self.let_pass(TTL_S)
        self.one_step()
        self.check()
        assert self.living() == []
        assert not self.engine.has_work
        assert_idle_pool(self.engine.audit())
        assert (self.engine.load().running, self.engine.load().waiting_tokens) == (0, 0)
        assert self.believed == {digest: self.driver.pool.tier(digest) for digest in self.everything()}

    def everything(self) -> set[bytes]:
        pool = self.driver.pool
        return {*pool._tree.block_names().values(), *pool._host.block_names().values()}

    # --- the world outside ------------------------------------------------------------------------------------------

    def living(self) -> list[Seen]:
        return [seen for seen in self.seen.values() if not seen.is_over]

    def given_up(self) -> list[Seen]:
        return [seen for seen in self.seen.values() if seen.aborted and seen.reserved and not seen.adopted]

    def let_pass(self, seconds: float) -> None:
        self.driver.clock.advance(seconds)
        for seen in self.seen.values():
            if seen.hold_until_s is not None and seen.hold_until_s <= self.driver.clock.now():
                self.hold_is_over(seen)

    def hold_is_over(self, seen: Seen) -> None:
        """Nothing, if there was none: a sequence that waits can still get one."""
        if seen.hold_until_s is not None:
            seen.hold_until_s = None
            seen.announced = []
            seen.may_fail = True


def prefix_length(hashes: list[bytes], known: Collection[bytes]) -> int:
    return next((index for index, digest in enumerate(hashes) if digest not in known), len(hashes))


def filled(token_ids: list[int]) -> ScriptedRunner:
    """A cache elsewhere whose blocks 0, 1, … hold the KV of these tokens."""
    num_blocks = -(-len(token_ids) // B)
    runner = ScriptedRunner(num_blocks, B, VOCAB_SIZE)
    sequence = make_sequence("outside", token_ids)
    sequence.block_ids = list(range(num_blocks))
    runner.run(StepPlan([Chunk(sequence, 0, len(token_ids))]))
    return runner
