"""How often requests may be dispatched again."""

from headrace.clock import VirtualClock
from router.retry_budget import RetryBudget


def taken(budget: RetryBudget, tries: int) -> int:
    return sum(budget.take() for _ in range(tries))


def test_a_full_budget_lets_every_request_in_flight_be_dispatched_again_once():
    assert taken(RetryBudget(50, VirtualClock()), 80) == 50


def test_it_refills_in_ten_seconds_and_no_further():
    clock = VirtualClock()
    budget = RetryBudget(100, clock)
    assert taken(budget, 200) == 100
    clock.advance(0.05)  # half a request's worth
    assert not budget.take()
    clock.advance(0.05)
    assert taken(budget, 5) == 1
    clock.advance(4.0)
    assert 39 <= taken(budget, 200) <= 40
    clock.advance(1000.0)
    assert taken(budget, 200) == 100


def test_a_steady_loss_is_bounded_by_the_rate_of_refill():
    clock = VirtualClock()
    budget = RetryBudget(10, clock)
    taken(budget, 10)
    allowed = 0
    for _ in range(600):  # ten tries a second for a minute
        clock.advance(0.1)
        allowed += taken(budget, 1)
    assert 59 <= allowed <= 60
