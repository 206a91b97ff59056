"""The times of a request, by a clock that is moved by hand."""

import pytest

from decode_worker.pace import DecodeBatch, Pace
from headrace.clock import VirtualClock


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def batch(clock):
    return DecodeBatch(clock)


def test_the_parts_of_a_request(clock, batch):
    pace = Pace(batch, 100)
    pace.asked()
    clock.advance(2)
    pace.started(num_cached_tokens=40)
    clock.advance(3)
    pace.token(0)
    clock.advance(10)  # what is left of a transfer
    for _ in range(5):
        pace.token(0)
        clock.advance(0.5)
    times = pace.times
    assert (times.queue_s, times.prefill_s) == (2, 3)
    assert (times.prefill_tokens, times.context_tokens) == (60, 40)
    assert (times.decode_s, times.decode_tokens) == (2.0, 4)
    assert times.mean_batch == 1
    assert times.mean_batch_context_tokens == pytest.approx(103.5)  # 102, 103, 104, 105


def test_the_batch_is_averaged_over_the_time_of_the_request(clock, batch):
    one, other = Pace(batch, 10), Pace(batch, 1000)
    for pace in (one, other):
        pace.token(0)
    one.token(0)
    clock.advance(1)
    other.token(0)
    clock.advance(1)
    other.choice_over(0)
    clock.advance(2)
    one.token(0)
    assert one.times.mean_batch == pytest.approx(5 / 4)
    one.close()
    assert batch.sums()[1] == pytest.approx(5)
    clock.advance(1)
    assert batch.sums()[1] == pytest.approx(5)  # nobody is left


def test_a_second_attempt_counts_alone(clock, batch):
    pace = Pace(batch, 100)
    pace.asked()
    clock.advance(5)
    pace.started(0)
    pace.asked()
    clock.advance(1)
    pace.started(90)
    pace.started(0)  # preempted: it began before
    clock.advance(1)
    pace.token(0)
    assert (pace.times.queue_s, pace.times.prefill_s, pace.times.prefill_tokens) == (1, 1, 10)


def test_choices_are_sequences_of_the_batch(clock, batch):
    pace = Pace(batch, 100)
    for choice in (0, 1):
        pace.token(choice)
    for choice in (0, 1):
        pace.token(choice)
    clock.advance(1)
    pace.token(0)
    assert pace.times.mean_batch == 2
    assert pace.times.mean_batch_context_tokens == 204
