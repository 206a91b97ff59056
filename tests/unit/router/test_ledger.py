"""What is charged is credited, whatever happens in between."""

import pytest

from router.ledger import Ledger
from router.policy.views import Plan
from tests.unit.router.test_policy import worker


def test_a_request_moves_from_pending_prefill_to_decode():
    ledger = Ledger()
    plan = Plan(worker("d0"), (worker("p0", cached_tokens=30), worker("p1")), ())
    with ledger.charged(plan, 100) as charge:
        assert ledger.pending_prefill_tokens == {"p0.1": 70}
        assert ledger.active_tokens == {"d0.1": 100}
        charge.prefilled()
        charge.generated(5)
        assert ledger.pending_prefill_tokens["p0.1"] == 0
        assert ledger.active_tokens["d0.1"] == 105
    assert ledger.pending_prefill_tokens == {}
    assert ledger.active_tokens == {}


def test_a_failure_credits_everything():
    ledger = Ledger()
    with pytest.raises(ZeroDivisionError), ledger.charged(Plan(worker("d0"), (), ()), 100):
        assert ledger.pending_prefill_tokens == {"d0.1": 100}  # it prefills itself
        raise ZeroDivisionError
    assert ledger.pending_prefill_tokens == {}
    assert ledger.active_tokens == {}


def test_other_requests_keep_their_share():
    ledger = Ledger()
    plan = Plan(worker("d0"), (worker("p0"),), ())
    with ledger.charged(plan, 100):
        with ledger.charged(plan, 50):
            assert ledger.pending_prefill_tokens == {"p0.1": 150}
        assert ledger.pending_prefill_tokens == {"p0.1": 100}
