"""What the engine reports, in which order, and what becomes of the blocks: holds, reservations, failures."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from headrace.block_hash import extend
from headrace.engine.scripted_runner import continuation
from headrace.engine.sequence import BlocksReady, ChunkResult, Failed, NewToken, Reserved, Started, StepOutput
from headrace.errors import (
    AlreadyExists,
    InternalError,
    NotFound,
    PermissionDenied,
    RequestCancelled,
    Unavailable,
)
from headrace.sampling_params import FinishReason, SamplingParams
from tests.support.audit import assert_idle_pool, assert_sound
from tests.support.engine_driver import EOS, ROOT, EngineDriver, make_sequence

B = 4


def prompt(num_tokens: int, first: int = 10) -> list[int]:
    return list(range(first, first + num_tokens))


def test_an_answer_ends_by_length_with_its_last_token():
    driver = EngineDriver()
    driver.submit("a", prompt(3), max_tokens=2)
    driver.run()
    first, second = continuation(prompt(3), 2)
    assert driver.events == [
        Started("a", 0),
        NewToken("a", first, None),
        NewToken("a", second, FinishReason.LENGTH),
    ]
    assert_idle_pool(driver.engine.audit())


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_answer_ends_by_end_of_text_unless_told_otherwise(ignore_eos: bool):
    driver = EngineDriver(forced={"a": [5, EOS]})
    sequence = make_sequence("a", prompt(3))
    sequence.sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=ignore_eos)
    driver.engine.submit(sequence)
    driver.run()
    reasons = [event.finish_reason for event in driver.events if isinstance(event, NewToken)]
    assert reasons == ([None, None, FinishReason.LENGTH] if ignore_eos else [None, FinishReason.STOP])


def test_started_is_told_before_the_model_runs():
    driver = EngineDriver()
    driver.submit("a", prompt(3))
    early: list[tuple[StepOutput, int]] = []
    output = driver.engine.step(early=lambda out: early.append((out, len(driver.runner.steps))))
    [(before, num_runs)] = early
    assert (before.events, num_runs) == ([Started("a", 0)], 0)
    assert [type(event) for event in output.events] == [NewToken]
    # Nothing new to tell early: one output only.
    driver.engine.step(early=lambda out: early.append((out, -1)))
    assert len(early) == 1


def test_a_step_without_an_early_listener_reports_everything_at_the_end():
    driver = EngineDriver()
    driver.submit("a", prompt(3))
    assert [type(event) for event in driver.engine.step().events] == [Started, NewToken]


def test_stored_and_removed_blocks_are_reported():
    driver = EngineDriver(num_blocks=4)
    driver.submit("a", prompt(2 * B), max_tokens=1)
    output = driver.step()
    assert list(output.stored) == extend(ROOT, prompt(2 * B), B)
    driver.submit("b", prompt(3 * B, first=100), max_tokens=1)
    driver.run()
    assert driver.stored == set(extend(ROOT, prompt(3 * B, first=100), B)) | set(list(output.stored)[:1])
    driver.engine.reset_cache()
    assert driver.engine.has_work
    driver.run()
    assert driver.stored == set()
    assert driver.engine.audit().free == 4


def test_num_cached_blocks_looks_and_changes_nothing():
    driver = EngineDriver()
    driver.submit("a", prompt(2 * B), max_tokens=1)
    driver.run()
    before = driver.engine.audit()
    assert driver.engine.num_cached_blocks(extend(ROOT, prompt(3 * B), B)) == 2
    assert driver.engine.num_cached_blocks(extend(b"another root", prompt(3 * B), B)) == 0
    assert driver.engine.audit() == before


# --- holds -----------------------------------------------------------------------------------------------------------


def test_a_held_sequence_reports_blocks_as_they_complete_and_ends_after_one_token():
    driver = EngineDriver(max_step_tokens=6)
    driver.hold("h", prompt(14))
    outputs = [driver.step().events for _ in range(3)]
    token = continuation(prompt(14), 1)[0]
    ids = [i for event in driver.events if isinstance(event, BlocksReady) for i in event.block_ids]
    assert outputs == [
        [Started("h", 0), BlocksReady("h", 0, ids[:1], [0])],
        [BlocksReady("h", 1, ids[1:3], [0, 0])],
        [BlocksReady("h", 3, ids[3:], [0] * len(ids[3:])), NewToken("h", token, None)],
    ]
    assert len(set(ids)) == 4
    assert not driver.engine.has_work
    assert driver.engine.load().running == 0
    audit = driver.engine.audit()
    assert_sound(audit)
    assert (audit.held, audit.active) == (4, 0)


def test_a_hold_ends_by_release_and_full_blocks_stay_cached():
    driver = EngineDriver()
    driver.hold("h", prompt(B + 1))
    driver.run()
    assert driver.engine.release_hold("h")
    assert not driver.engine.release_hold("h")
    audit = driver.engine.audit()
    assert_idle_pool(audit)
    assert audit.cached == 1


def test_a_hold_ends_by_time_unless_renewed():
    driver = EngineDriver()
    driver.hold("h", prompt(B), ttl_s=5.0)
    driver.run()
    driver.clock.advance(4.0)
    assert driver.engine.renew_hold("h")
    driver.clock.advance(4.0)
    driver.step()
    assert driver.engine.audit().held == 1
    driver.clock.advance(1.0)
    assert not driver.engine.renew_hold("h"), "the time is over, though no step noticed yet"
    assert not driver.engine.renew_hold("unknown")
    assert_idle_pool(driver.engine.audit())
    assert driver.step().events == []


def test_cached_blocks_are_announced_at_the_first_report():
    driver = EngineDriver(max_step_tokens=3)
    driver.submit("a", prompt(2 * B), max_tokens=1)
    driver.run()
    driver.hold("h", prompt(2 * B + 3))
    driver.run()
    ready = [event for event in driver.events_of("h") if isinstance(event, BlocksReady)]
    assert [(event.first_index, len(event.block_ids)) for event in ready] == [(0, 3)]
    assert driver.cached_tokens("h") == 2 * B


@pytest.mark.parametrize(("token", "reason"), [(EOS, FinishReason.STOP), (5, None)])
def test_a_held_sequence_says_whether_its_token_ends_the_answer(token: int, reason: FinishReason | None):
    driver = EngineDriver(forced={"h": [token]})
    sequence = make_sequence("h", prompt(3), hold_ttl_s=5.0)
    sequence.sampling = SamplingParams(max_tokens=9, temperature=0.0)
    driver.engine.submit(sequence)
    driver.run()
    assert driver.events[-1] == NewToken("h", token, reason)
    assert driver.engine.audit().held == 1


def test_abort_of_a_held_sequence_keeps_what_was_announced():
    driver = EngineDriver(max_step_tokens=6)
    driver.hold("h", prompt(20), ttl_s=5.0)
    driver.step()
    driver.engine.abort("h")
    audit = driver.engine.audit()
    assert_sound(audit)
    assert audit.held == 1, "nobody was told of the other blocks"
    assert not driver.engine.has_work or driver.step().events == []
    with pytest.raises(AlreadyExists):
        driver.hold("h", prompt(3))
    assert driver.engine.renew_hold("h")
    assert driver.engine.release_hold("h")
    assert_idle_pool(driver.engine.audit())
    assert [type(event) for event in driver.events_of("h")] == [Started, BlocksReady]


def test_abort_of_a_waiting_held_sequence_leaves_nothing():
    driver = EngineDriver()
    driver.hold("h", prompt(5))
    driver.engine.abort("h")
    assert not driver.engine.release_hold("h")
    assert driver.engine.audit().free == 32
    driver.run()
    assert driver.events == []


def test_a_hold_that_expires_under_way_fails_its_sequence():
    driver = EngineDriver(max_step_tokens=6)
    driver.hold("h", prompt(20), ttl_s=5.0)
    driver.step()
    driver.clock.advance(5.0)
    driver.run()
    assert isinstance(driver.error("h"), Unavailable)
    assert "expired" in str(driver.error("h"))
    assert_idle_pool(driver.engine.audit())


def test_a_hold_that_is_released_under_way_ends_its_sequence():
    driver = EngineDriver(max_step_tokens=6)
    driver.hold("h", prompt(20))
    driver.step()
    assert driver.engine.release_hold("h")
    driver.run()
    assert isinstance(driver.error("h"), RequestCancelled)
    assert_idle_pool(driver.engine.audit())


# --- reservations ----------------------------------------------------------------------------------------------------


def handed_off(owner: EngineDriver, reader: EngineDriver, sequence_id: str, token_ids: list[int]) -> int:
    """Compute at `owner`, copy the missing blocks to `reader`, release. Returns the first token."""
    owner.hold(f"{sequence_id} held", token_ids)
    owner.run()
    [reserved] = [event for event in reader.events_of(sequence_id) if isinstance(event, Reserved)]
    for event in owner.events_of(f"{sequence_id} held"):
        if isinstance(event, BlocksReady):
            for index, remote_id in enumerate(event.block_ids, start=event.first_index):
                if index >= reserved.num_cached_blocks:
                    reader.runner.copy_block(owner.runner, remote_id, reserved.block_ids[index])
    assert owner.engine.release_hold(f"{sequence_id} held")
    [token] = owner.tokens(f"{sequence_id} held")
    return token


def test_an_adopted_sequence_goes_on_as_if_computed_here():
    owner, reader = EngineDriver(max_step_tokens=6), EngineDriver()
    tokens = prompt(11)
    reader.reserve("r", tokens, max_tokens=6)
    output = reader.step()
    assert [type(event) for event in output.events] == [Reserved]
    assert reader.engine.audit().filling == 3
    assert not reader.engine.has_work
    first = handed_off(owner, reader, "r", tokens)
    reader.engine.adopt("r", {0: first})
    reader.run()
    assert [first, *reader.tokens("r")] == continuation(tokens, 6)
    assert reader.events[-1] == NewToken("r", reader.tokens("r")[-1], FinishReason.LENGTH)
    assert reader.engine.load().prefill_tokens == 0
    reader.engine.settle("r")
    for driver in (owner, reader):
        assert_idle_pool(driver.engine.audit())


def test_the_next_turn_reserves_only_what_is_new():
    owner, reader = EngineDriver(), EngineDriver()
    tokens = prompt(10)
    reader.reserve("one", tokens, max_tokens=4)
    reader.step()
    reader.engine.adopt("one", {0: handed_off(owner, reader, "one", tokens)})
    reader.run()
    longer = [*tokens, *continuation(tokens, 4), *prompt(5, first=90)]
    reader.reserve("two", longer, max_tokens=3)
    reader.step()
    [reserved] = [event for event in reader.events_of("two") if isinstance(event, Reserved)]
    assert (reserved.num_cached_blocks, len(reserved.block_ids)) == (3, 5)
    first = handed_off(owner, reader, "two", longer)
    reader.engine.adopt("two", {0: first})
    reader.run()
    assert [first, *reader.tokens("two")] == continuation(longer, 3)


def test_abort_of_a_reserved_sequence_quarantines_until_settled():
    driver = EngineDriver(num_blocks=8)
    driver.submit("a", prompt(B), max_tokens=1)
    driver.run()
    driver.reserve("r", prompt(3 * B))
    driver.step()
    driver.engine.settle("r")
    assert driver.engine.audit().filling == 2, "there is nothing to settle yet"
    driver.engine.abort("r")
    driver.engine.abort("r")
    audit = driver.engine.audit()
    assert_sound(audit)
    assert (audit.cached, audit.quarantined, audit.filling) == (1, 2, 0)
    with pytest.raises(AlreadyExists):
        driver.reserve("r", prompt(B))
    driver.submit("needs all", prompt(7 * B, first=100), max_tokens=1)
    assert driver.step().events == []
    driver.engine.settle("r")
    driver.run()
    assert driver.tokens("needs all") == continuation(prompt(7 * B, first=100), 1)
    assert_idle_pool(driver.engine.audit())


def test_abort_of_a_waiting_reservation_leaves_nothing():
    driver = EngineDriver()
    driver.reserve("r", prompt(B))
    driver.engine.abort("r")
    driver.run()
    assert driver.events == []
    assert_idle_pool(driver.engine.audit())


def test_only_reserved_sequences_are_adopted():
    driver = EngineDriver()
    driver.submit("a", prompt(3))
    driver.reserve("r", prompt(3))
    for sequence_id in ("a", "r", "unknown"):
        with pytest.raises(NotFound):
            driver.engine.adopt(sequence_id, {0: 5})
    driver.step()
    with pytest.raises(NotFound):
        driver.engine.adopt("a", {0: 5})


def test_an_adopted_sequence_that_is_preempted_is_computed_here():
    owner, reader = EngineDriver(), EngineDriver(num_blocks=6)
    old, tokens = prompt(B), prompt(B + 1, first=50)
    reader.submit("old", old, max_tokens=16)
    reader.step()
    reader.reserve("r", tokens, max_tokens=12)
    reader.step()
    first = handed_off(owner, reader, "r", tokens)
    reader.engine.adopt("r", {0: first})
    reader.run()
    assert reader.engine.load().preemptions > 0
    assert reader.engine.load().prefill_tokens > B
    assert [first, *reader.tokens("r")] == continuation(tokens, 12)
    assert reader.tokens("old") == continuation(old, 16)
    assert [type(event) for event in reader.events_of("r")[:2]] == [Reserved, NewToken]
    assert not any(isinstance(event, Started) for event in reader.events_of("r"))
    assert_idle_pool(reader.engine.audit())


def test_wrong_contents_are_noticed():
    """The oracle itself: blocks that were never filled fail the step."""
    driver = EngineDriver()
    driver.reserve("r", prompt(5))
    driver.step()
    driver.engine.adopt("r", {0: 7})
    driver.run()
    assert isinstance(driver.error("r"), InternalError)


# --- failures --------------------------------------------------------------------------------------------------------


def test_one_sequence_fails_alone():
    broken = InternalError("no luck")
    driver = EngineDriver(forced={"b": [5, broken]})
    for name in "abc":
        driver.submit(name, prompt(2, first=ord(name)))
    driver.run()
    assert driver.error("b") is broken
    assert driver.tokens("b") == [5]
    for name in "ac":
        assert driver.tokens(name) == continuation(prompt(2, first=ord(name)), 4)
    assert_idle_pool(driver.engine.audit())


def test_a_step_that_raises_fails_its_own_sequences_only():
    driver = EngineDriver(max_sequences=2)
    for name in "abc":
        driver.submit(name, prompt(2, first=ord(name)))
    whole_run = driver.runner.run
    driver.runner.run = lambda plan: 1 // 0
    with capture_logs() as logs:
        driver.step()
    driver.runner.run = whole_run
    driver.run()
    for name in "ab":
        assert isinstance(driver.error(name), InternalError)
        assert "ZeroDivisionError" in str(driver.error(name))
    assert driver.tokens("c") == continuation(prompt(2, first=ord("c")), 4)
    assert [entry["event"] for entry in logs] == ["step failed"]
    assert_idle_pool(driver.engine.audit())


def test_a_sequence_without_a_draw_fails():
    driver = EngineDriver()
    driver.submit("a", prompt(2))
    driver.runner.run = lambda plan: [ChunkResult()] * len(plan.chunks)
    driver.run()
    assert isinstance(driver.error("a"), InternalError)


def test_a_failed_held_sequence_keeps_what_a_reader_may_be_reading():
    driver = EngineDriver(max_step_tokens=4, forced={"h": [InternalError("no luck")]})
    driver.hold("h", prompt(2 * B), ttl_s=5.0)
    driver.run()
    assert isinstance(driver.error("h"), InternalError)
    assert driver.engine.audit().held == 1
    driver.clock.advance(5.0)
    driver.step()
    assert_idle_pool(driver.engine.audit())


def test_fail_all_ends_everything():
    driver = EngineDriver(max_sequences=3)
    driver.submit("a", prompt(3))
    driver.reserve("r", prompt(3))
    driver.hold("h", prompt(9))
    driver.submit("waits", prompt(3))
    driver.step()
    driver.engine.fail_all(InternalError("broken"))
    driver.step()
    assert {event.sequence_id for event in driver.events if isinstance(event, Failed)} == {
        "a",
        "r",
        "h",
        "waits",
    }
    assert not driver.engine.has_work
    driver.engine.settle("r")
    driver.engine.release_hold("h")
    assert_idle_pool(driver.engine.audit())


def test_a_stall_is_logged_once_per_period():
    driver = EngineDriver(num_blocks=4)
    driver.reserve("r", prompt(3 * B))
    driver.step()
    driver.submit("waits", prompt(2 * B))
    assert not driver.engine.has_work
    with capture_logs() as logs:
        for _ in range(25):
            driver.step()
            driver.clock.advance(1.0)
    assert [entry["event"] for entry in logs] == ["sequences wait and nothing is scheduled"] * 2
    assert "needs 2 blocks, 1 of 4" in logs[0]["reason"]
    assert logs[0]["filling"] == 3
    driver.engine.abort("r")
    driver.engine.settle("r")
    driver.run()
    assert driver.tokens("waits") == continuation(prompt(2 * B), 4)


def test_load_tells_what_runs_and_what_was_done():
    driver = EngineDriver(max_sequences=1, max_step_tokens=4)
    driver.submit("a", prompt(6), max_tokens=2)
    driver.submit("b", prompt(9, first=100))
    driver.step()
    load = driver.engine.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 1, 2 + 9)
    assert (load.steps, load.prefill_tokens, load.output_tokens) == (1, 4, 0)
    driver.run()
    load = driver.engine.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (0, 0, 0)
    assert (load.prefill_tokens, load.output_tokens, load.queries) == (15, 6, 15)
    assert load.free_blocks + load.cached_blocks == 32


def test_holds_of_cached_blocks_are_the_readers_own():
    driver = EngineDriver()
    driver.submit("a", prompt(3 * B))
    driver.run()
    names = extend(ROOT, prompt(3 * B), B)
    held = driver.engine.hold_cached("l", "test", "me", names, ttl_s=5.0)
    assert len(held) >= 2
    with pytest.raises(PermissionDenied):
        driver.engine.renew_hold("l", "somebody else")
    with pytest.raises(PermissionDenied):
        driver.engine.release_hold("l", "somebody else")
    with pytest.raises(AlreadyExists):
        driver.engine.hold_cached("l", "test", "me", names, ttl_s=5.0)
    assert driver.engine.release_hold("l", "me", held)
    assert driver.engine.hold_cached("m", "test", "me", [b"?" * 16, *names], ttl_s=5.0) == {}
    assert not driver.engine.release_hold("m", "me")


def test_it_counts_how_long_it_computes_and_how_long_decodes_wait():
    """Steps of two seconds, by the engine's clock; the first one computes a prompt and decodes nothing."""
    driver = EngineDriver()
    run = driver.runner.run

    def slow_run(plan):
        driver.clock.advance(2.0)
        return run(plan)

    driver.runner.run = slow_run
    driver.submit("a", prompt(8), max_tokens=3)
    driver.engine.step()
    load = driver.engine.load()
    assert (load.busy_s, load.decode_step_s, load.prefill_tokens_per_s) == (2.0, 0.0, 4.0)
    driver.run()
    load = driver.engine.load()
    assert (load.busy_s, load.decode_step_s, load.at_s) == (6.0, 2.0, driver.clock.now())
    driver.clock.advance(10.0)
    assert driver.engine.load().busy_s == 6.0
