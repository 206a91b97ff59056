"""Any order of commands, steps and time: tokens are right, blocks add up, nothing is lost, nobody reads recycled KV.

The world outside is played too: it fills reserved blocks, may write late into those of an aborted sequence, and reads
announced blocks until it releases them or its time is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.engine.block_pool import BlockState
from headrace.engine.scripted_runner import ScriptedRunner, continuation
from headrace.engine.sequence import BlocksReady, Chunk, Event, Failed, NewToken, Reserved, Started, StepPlan
from headrace.errors import Overloaded, RequestCancelled, Unavailable
from headrace.sampling_params import FinishReason
from tests.support.audit import assert_idle_pool, assert_sound
from tests.support.engine_driver import VOCAB_SIZE, EngineDriver, make_sequence

B = 2
NUM_BLOCKS = 10
TTL_S = 5.0
# Few first halves and few endings: common prefixes and equal prompts are frequent.
BASE = list(range(20, 30))
prompts = st.builds(
    lambda shared, ending: BASE[:shared] + ending,
    st.integers(0, 8),
    st.lists(st.sampled_from([7, 8]), min_size=1, max_size=2),
)

arrivals = st.tuples(st.sampled_from(["submitted", "held", "reserved"]), prompts, st.integers(1, 9))


@dataclass
class Seen:
    """What the world outside knows of one sequence."""

    id: str
    kind: str  # "submitted", "held", "reserved"
    prompt: list[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    reserved: Reserved | None = None
    adopted: bool = False
    announced: list[int] = field(default_factory=list)
    is_over: bool = False
    aborted: bool = False
    may_fail: bool = False  # its hold is over while it may still compute
    hold_until_s: float | None = None


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = EngineDriver(NUM_BLOCKS, B, max_step_tokens=4, max_sequences=4, max_waiting=5)
        self.engine = self.driver.engine
        self.seen: dict[str, Seen] = {}
        self.sound = True  # False once something was found: the end is not looked at then

    # --- commands ---------------------------------------------------------------------------------------------------

    @rule(arrivals=st.lists(arrivals, min_size=1, max_size=3))
    def bring(self, arrivals: list[tuple[str, list[int], int]]) -> None:
        for kind, prompt, max_tokens in arrivals:
            self.bring_one(kind, prompt, max_tokens)

    def bring_one(self, kind: str, prompt: list[int], max_tokens: int) -> None:
        seen = Seen(f"{kind} {len(self.seen)}", kind, prompt, max_tokens)
        sequence = make_sequence(seen.id, prompt, max_tokens, hold_ttl_s=TTL_S if kind == "held" else None)
        try:
            (self.engine.reserve if kind == "reserved" else self.engine.submit)(sequence)
        except Overloaded:
            assert self.engine.load().waiting >= 5
            return
        self.seen[seen.id] = seen

    @precondition(lambda self: self.fillable())
    @rule(data=st.data())
    def fill_and_adopt(self, data: st.DataObject) -> None:
        seen = data.draw(st.sampled_from(self.fillable()))
        assert seen.reserved is not None
        outside = filled(seen.prompt)
        for index in range(seen.reserved.num_cached_blocks, len(seen.reserved.block_ids)):
            self.driver.runner.copy_block(outside, index, seen.reserved.block_ids[index])
        [token] = continuation(seen.prompt, 1)
        seen.tokens.append(token)
        if seen.max_tokens == 1:  # the first token ends the answer: nothing is adopted
            self.engine.abort(seen.id)
            seen.is_over = seen.aborted = True
        else:
            self.engine.adopt(seen.id, token)
            seen.adopted = True

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seen = data.draw(st.sampled_from(self.living()))
        self.engine.abort(seen.id)
        seen.is_over = seen.aborted = True

    @precondition(lambda self: self.given_up())
    @rule(data=st.data(), late=st.booleans())
    def settle(self, data: st.DataObject, late: bool) -> None:
        """A transfer that was given up goes on writing for a while, until it is known to be over."""
        seen = data.draw(st.sampled_from(self.given_up()))
        assert seen.reserved is not None
        if late:
            for block_id in seen.reserved.block_ids[seen.reserved.num_cached_blocks :]:
                self.driver.runner.copy_block(filled([99] * B), 0, block_id)
        else:
            self.engine.settle(seen.id)
            seen.reserved = None

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def settle_what_is_not_given_up(self, data: st.DataObject) -> None:
        self.engine.settle(data.draw(st.sampled_from(self.living())).id)

    @precondition(lambda self: self.all_held())
    @rule(data=st.data(), renew=st.booleans())
    def renew_or_release(self, data: st.DataObject, renew: bool) -> None:
        seen = data.draw(st.sampled_from(self.all_held()))
        has_hold = seen.hold_until_s is not None
        if renew:
            assert self.engine.renew_hold(seen.id) == has_hold
            seen.hold_until_s = self.driver.clock.now() + TTL_S if has_hold else None
        else:
            self.engine.expire_holds()
            assert self.engine.release_hold(seen.id) == has_hold
            self.hold_is_over(seen)

    @rule()
    def reset_cache(self) -> None:
        self.engine.reset_cache()

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.5]))
    def advance(self, seconds: float) -> None:
        self.driver.clock.advance(seconds)
        for seen in self.seen.values():
            if seen.hold_until_s is not None and seen.hold_until_s <= self.driver.clock.now():
                self.hold_is_over(seen)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        self.sound = False
        for _ in range(count):
            for event in self.driver.step().events:
                self.take(event)
            assert set(self.driver.pool._tree.block_names().values()) == self.driver.stored
            self.blocks_add_up()
            self.announced_blocks_keep_their_content()
        self.sound = True

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def blocks_add_up(self) -> None:
        assert_sound(self.engine.audit())

    @invariant()
    def announced_blocks_keep_their_content(self) -> None:
        for seen in self.seen.values():
            if seen.announced:
                expected = filled(seen.prompt)
                for index, block_id in enumerate(seen.announced):
                    num_tokens = min(B, len(seen.prompt) - index * B)
                    found = self.driver.runner._kv[block_id][:num_tokens]
                    assert found == expected._kv[index][:num_tokens]

    @invariant()
    def given_up_blocks_are_out_of_reach(self) -> None:
        for seen in self.given_up():
            assert seen.reserved is not None
            for block_id in seen.reserved.block_ids[seen.reserved.num_cached_blocks :]:
                assert self.driver.pool.state(block_id) is BlockState.QUARANTINED

    def teardown(self) -> None:
        """Let everything come to its end: nothing may be lost, and every block comes back."""
        if not self.sound:
            return
        for seen in self.living():
            if seen.kind == "reserved" and not seen.adopted:
                self.engine.abort(seen.id)
                seen.is_over = seen.aborted = True
        for seen in self.seen.values():
            self.engine.settle(seen.id)
        for _ in range(40):
            self.advance(2.0)
            self.step(10)
            if not self.living():
                break
        self.advance(TTL_S)
        self.step(2)
        assert self.living() == []
        assert not self.engine.has_work
        assert_idle_pool(self.engine.audit())
        assert (self.engine.load().running, self.engine.load().waiting_tokens) == (0, 0)

    # --- the world outside ------------------------------------------------------------------------------------------

    def living(self) -> list[Seen]:
        return [seen for seen in self.seen.values() if not seen.is_over]

    def fillable(self) -> list[Seen]:
        return [seen for seen in self.living() if seen.reserved is not None and not seen.adopted]

    def given_up(self) -> list[Seen]:
        return [seen for seen in self.seen.values() if seen.aborted and seen.reserved and not seen.adopted]

    def all_held(self) -> list[Seen]:
        return [seen for seen in self.seen.values() if seen.kind == "held"]

    def hold_is_over(self, seen: Seen) -> None:
        """Nothing, if there was none: a sequence that waits can still get one."""
        if seen.hold_until_s is None:
            return
        seen.hold_until_s = None
        seen.announced = []
        seen.may_fail = True

    def take(self, event: Event) -> None:
        seen = self.seen[event.sequence_id]
        # A hold's end and an abort may cross.
        assert not seen.is_over or (seen.aborted and seen.may_fail and isinstance(event, Failed))
        match event:
            case Started():
                assert seen.kind != "reserved"
                assert event.num_cached_tokens % B == 0
                assert event.num_cached_tokens < len(seen.prompt)
                if seen.kind == "held":
                    seen.hold_until_s = self.driver.clock.now() + TTL_S
            case Reserved():
                assert seen.kind == "reserved"
                assert len(event.block_ids) == -(-len(seen.prompt) // B)
                seen.reserved = event
            case BlocksReady():
                assert seen.kind == "held"
                assert event.first_index == len(seen.announced)
                seen.announced += event.block_ids
            case NewToken():
                self.take_token(seen, event)
            case Failed():
                seen.is_over = True
                if isinstance(event.error, Overloaded):
                    assert seen.kind != "held"
                else:
                    assert isinstance(event.error, (Unavailable, RequestCancelled))
                    assert seen.may_fail

    def take_token(self, seen: Seen, event: NewToken) -> None:
        assert seen.kind != "reserved" or seen.adopted
        seen.tokens.append(event.token_id)
        assert seen.tokens == continuation(seen.prompt, len(seen.tokens))
        is_last = len(seen.tokens) == seen.max_tokens
        assert event.finish_reason == (FinishReason.LENGTH if is_last else None)
        seen.is_over = is_last or seen.kind == "held"
        if seen.kind == "held":
            assert len(seen.announced) == -(-len(seen.prompt) // B)


def filled(token_ids: list[int]) -> ScriptedRunner:
    """A cache elsewhere whose blocks 0, 1, … hold the KV of these tokens."""
    num_blocks = -(-len(token_ids) // B)
    runner = ScriptedRunner(num_blocks, B, VOCAB_SIZE)
    sequence = make_sequence("outside", token_ids)
    sequence.block_ids = list(range(num_blocks))
    runner.run(StepPlan([Chunk(sequence, 0, len(token_ids))]))
    return runner


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
