import time

from headrace.clock import SystemClock, VirtualClock


def test_a_virtual_clock_moves_only_by_hand():
    clock = VirtualClock(5.0)
    assert (clock.now(), clock.now()) == (5.0, 5.0)
    clock.advance(2.5)
    assert clock.now() == 7.5


def test_the_system_clock_is_the_monotonic_one():
    before = time.monotonic()
    assert before <= SystemClock().now() <= time.monotonic()
