"""The engine's own thread: commands in order, one output a step, a loop that survives, a clean end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from queue import Queue

import pytest
from structlog.testing import capture_logs

from headrace.engine.engine_thread import EngineThread
from headrace.engine.scripted_runner import continuation
from headrace.engine.sequence import Failed, NewToken, StepOutput
from headrace.errors import InternalError, NotFound, Unavailable
from tests.support.audit import assert_idle_pool
from tests.support.engine_driver import EngineDriver, make_sequence

DEADLINE_S = 20.0  # for waits that end at once when all is well


class Host:
    """A thread around a driver's engine, and its outputs."""

    def __init__(self, **options) -> None:
        self.driver = EngineDriver(**options)
        self.outputs: Queue[StepOutput] = Queue()
        self.thread = EngineThread(self.driver.engine, self.outputs.put)

    def submit(self, sequence_id: str, token_ids: list[int], **more) -> None:
        sequence = make_sequence(sequence_id, token_ids, **more)
        self.thread.call(lambda engine: engine.submit(sequence)).result(DEADLINE_S)

    def until_end_of(self, sequence_id: str) -> list[StepOutput]:
        outputs = []
        while True:
            output = self.outputs.get(timeout=DEADLINE_S)
            outputs.append(output)
            for event in output.events:
                is_over = isinstance(event, Failed) or (isinstance(event, NewToken) and event.finish_reason)
                if event.sequence_id == sequence_id and is_over:
                    return outputs


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    host.thread.start()
    yield host
    host.thread.stop(DEADLINE_S)


def tokens_of(outputs: list[StepOutput], sequence_id: str) -> list[int]:
    events = [event for output in outputs for event in output.events if isinstance(event, NewToken)]
    return [event.token_id for event in events if event.sequence_id == sequence_id]


def test_a_sequence_runs_to_its_end(host: Host):
    host.submit("a", [1, 2, 3], max_tokens=5)
    outputs = host.until_end_of("a")
    assert tokens_of(outputs, "a") == continuation([1, 2, 3], 5)
    assert len(outputs) == 1 + 5, "one before the first step, then one a step; never an empty one"
    assert all(outputs)
    assert_idle_pool(host.thread.call(lambda engine: engine.audit()).result(DEADLINE_S))


def test_commands_run_in_order_on_the_engine_thread(host: Host):
    seen: list[tuple[int, str]] = []
    for number in range(20):
        host.thread.post(lambda engine, n=number: seen.append((n, threading.current_thread().name)))
    host.thread.call(lambda engine: None).result(DEADLINE_S)
    assert seen == [(number, "engine") for number in range(20)]


def test_what_a_call_raises_goes_to_its_caller(host: Host):
    with pytest.raises(NotFound):
        host.thread.call(lambda engine: engine.adopt("unknown", {0: 1})).result(DEADLINE_S)
    assert host.thread.call(lambda engine: 7).result(DEADLINE_S) == 7


def test_what_a_posted_command_raises_is_logged():
    host = Host()
    with capture_logs() as logs:
        host.thread.post(lambda engine: engine.adopt("unknown", {0: 1}))
        host.thread.start()
        host.thread.call(lambda engine: None).result(DEADLINE_S)
    host.thread.stop(DEADLINE_S)
    assert [entry["event"] for entry in logs] == ["posted command failed"]


def test_a_call_that_was_cancelled_does_not_run():
    host = Host()
    ran: list[str] = []
    future = host.thread.call(lambda engine: ran.append("cancelled"))
    assert future.cancel()
    host.thread.start()
    host.thread.call(lambda engine: ran.append("other")).result(DEADLINE_S)
    host.thread.stop(DEADLINE_S)
    assert ran == ["other"]


def test_a_hold_expires_while_nothing_else_happens(host: Host):
    host.submit("h", [1, 2, 3], hold_ttl_s=5.0)
    while not tokens_of([host.outputs.get(timeout=DEADLINE_S)], "h"):
        pass
    assert host.thread.call(lambda engine: engine.audit()).result(DEADLINE_S).held == 1
    host.driver.clock.advance(5.0)
    held = 1
    while held:  # ends by the test's own time limit if the loop does not wake by itself
        threading.Event().wait(0.01)
        held = host.driver.pool.audit().held


def test_a_broken_step_fails_its_sequences_and_the_loop_goes_on():
    host = Host()
    scheduler = host.driver.engine._scheduler
    whole_schedule = scheduler.schedule

    def broken_once(*_: object) -> object:
        scheduler.schedule = whole_schedule
        raise RuntimeError("fault in the scheduler")

    scheduler.schedule = broken_once
    host.thread.post(lambda engine: engine.submit(make_sequence("a", [1, 2, 3])))
    with capture_logs() as logs:
        host.thread.start()
        [failed] = host.until_end_of("a")[-1].events
        host.submit("b", [4, 5, 6], max_tokens=2)
        outputs = host.until_end_of("b")
        host.thread.stop(DEADLINE_S)
    assert isinstance(failed.error, InternalError)
    assert tokens_of(outputs, "b") == continuation([4, 5, 6], 2)
    assert [entry["event"] for entry in logs] == ["engine step failed"]


def test_a_listener_that_raises_does_not_stop_the_engine():
    driver = EngineDriver()
    done = threading.Event()

    def listen(output: StepOutput) -> None:
        if any(isinstance(event, NewToken) and event.finish_reason for event in output.events):
            done.set()
        raise RuntimeError("event loop is closed")

    thread = EngineThread(driver.engine, listen)
    with capture_logs() as logs:
        thread.start()
        thread.post(lambda engine: engine.submit(make_sequence("a", [1, 2, 3], max_tokens=2)))
        assert done.wait(DEADLINE_S)
        thread.stop(DEADLINE_S)
    assert {entry["event"] for entry in logs} == {"step output was not taken"}


def test_calls_after_stop_and_calls_never_answered_fail():
    host = Host()
    pending = host.thread.call(lambda engine: None)
    host.thread.stop(DEADLINE_S)
    later = host.thread.call(lambda engine: None)
    for future in (pending, later):
        with pytest.raises(Unavailable):
            future.result(DEADLINE_S)
    host.thread.post(lambda engine: None)


def hang(host: Host) -> threading.Event:
    """The engine's thread is inside a step until the returned event is set."""
    inside, go_on = threading.Event(), threading.Event()
    whole_run = host.driver.runner.run

    def run(plan: object) -> object:
        inside.set()
        go_on.wait(DEADLINE_S)
        return whole_run(plan)

    host.driver.runner.run = run
    host.submit("a", [1, 2, 3])
    assert inside.wait(DEADLINE_S)
    return go_on


def test_progress_age_grows_while_a_step_hangs(host: Host):
    assert host.thread.progress_age_s() == 0.0
    go_on = hang(host)
    host.driver.clock.advance(30.0)
    assert host.thread.progress_age_s() == 30.0
    go_on.set()
    host.until_end_of("a")
    host.thread.call(lambda engine: None).result(DEADLINE_S)
    assert host.thread.progress_age_s() == 0.0


def test_stop_does_not_wait_for_ever():
    host = Host()
    host.thread.start()
    go_on = hang(host)
    pending: Future[None] = host.thread.call(lambda engine: None)
    with capture_logs() as logs:
        host.thread.stop(0.05)
    assert [entry["event"] for entry in logs] == ["engine thread did not stop in time"]
    with pytest.raises(Unavailable):
        pending.result(DEADLINE_S)
    go_on.set()
    host.thread.stop(DEADLINE_S)
    assert not host.thread._thread.is_alive()


def test_an_idle_engine_audits_itself(host: Host):
    assert host.thread.last_audit is None
    host.driver.clock.advance(6.0)
    deadline = time.monotonic() + DEADLINE_S
    while host.thread.last_audit is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert_idle_pool(host.thread.last_audit)
