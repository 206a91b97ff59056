"""What is charged is credited, whatever happens in between."""

import pytest

from headrace.clock import VirtualClock
from router.ledger import Ledger
from router.policy.prediction import planned
from router.policy.views import ClusterView, Pool, RequestView
from tests.unit.router.test_policy import worker


def plan_of(decode, *prefill, num_tokens=100):
    view = ClusterView(Pool.of(prefill), Pool.of([decode]))
    return planned(RequestView(num_tokens, seed=1), view, decode, prefill, "")


def test_a_request_moves_from_pending_prefill_to_decode():
    ledger = Ledger(VirtualClock())
    plan = plan_of(worker("d0"), worker("p0", cached_tokens=30), worker("p1"))
    with ledger.charged(plan, 100) as charge:
        assert ledger.pending_prefill_tokens == {"p0.1": 70}
        assert ledger.active_tokens == {"d0.1": 100}
        assert ledger.of("p0.1").queue_s(0.0) == pytest.approx(plan.prediction.prefill_s)
        assert ledger.of("d0.1").queue_s(0.0) == 0.0
        charge.prefilled()
        charge.generated(5)
        assert ledger.of("p0.1").queue_s(0.0) == 0.0
        assert ledger.pending_prefill_tokens == {}
        assert ledger.active_tokens == {"d0.1": 105}
        assert ledger.of("d0.1").active_sequences == 1
    assert ledger.accounts == {}


def test_a_failure_credits_everything():
    ledger = Ledger(VirtualClock())
    with pytest.raises(ZeroDivisionError), ledger.charged(plan_of(worker("d0")), 100):
        assert ledger.pending_prefill_tokens == {"d0.1": 100}  # it prefills itself
        assert ledger.of("d0.1").num_requests == 1
        raise ZeroDivisionError
    assert ledger.accounts == {}


def test_other_requests_keep_their_share():
    ledger = Ledger(VirtualClock())
    plan = plan_of(worker("d0"), worker("p0"))
    with ledger.charged(plan, 100):
        with ledger.charged(plan, 50):
            assert ledger.pending_prefill_tokens == {"p0.1": 150}
            assert ledger.of("p0.1").num_requests == 2
        assert ledger.pending_prefill_tokens == {"p0.1": 100}


def test_a_queue_drains_as_time_passes_but_not_faster_than_its_first_prompt():
    clock = VirtualClock()
    ledger = Ledger(clock)
    plan = plan_of(worker("d0"), worker("p0"))
    each_s = plan.prediction.prefill_s
    with ledger.charged(plan, 100) as first, ledger.charged(plan, 100):
        clock.advance(each_s / 4)
        assert ledger.of("p0.1").queue_s(clock.now()) == pytest.approx(1.75 * each_s)
        clock.advance(10 * each_s)  # far longer than predicted: the second one still has to come
        assert ledger.of("p0.1").queue_s(clock.now()) == pytest.approx(each_s)
        first.prefilled()
        clock.advance(each_s / 2)
        assert ledger.of("p0.1").queue_s(clock.now()) == pytest.approx(each_s / 2)
    assert ledger.accounts == {}
