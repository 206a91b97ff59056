from __future__ import annotations

import pytest

from headrace.clock import VirtualClock
from kv_transfer.lease import ReaderLease

TTL_S = 10.0


@pytest.fixture
def clock():
    return VirtualClock(100.0)


@pytest.fixture
def lease(clock):
    return ReaderLease(TTL_S, clock)


def test_not_valid_before_an_answer(lease, clock):
    assert not lease.valid()
    lease.sending()
    assert not lease.valid()


def test_valid_for_the_ttl_after_sending_not_after_the_answer(lease, clock):
    sent_at = lease.sending()
    clock.advance(6.0)
    lease.acknowledged(sent_at)
    assert lease.expires_at == 110.0
    clock.advance(3.9)
    assert lease.valid()
    clock.advance(0.2)
    assert not lease.valid()


def test_over_exactly_at_the_ttl(lease, clock):
    lease.acknowledged(lease.sending())
    clock.advance(TTL_S)
    assert not lease.valid()


def test_an_answer_that_comes_after_the_ttl_gives_nothing(lease, clock):
    sent_at = lease.sending()
    clock.advance(TTL_S)
    lease.acknowledged(sent_at)
    assert not lease.valid()


def test_a_renewal_extends_from_its_own_sending(lease, clock):
    lease.acknowledged(lease.sending())
    clock.advance(8.0)
    sent_at = lease.sending()
    clock.advance(1.0)
    lease.acknowledged(sent_at)
    clock.advance(8.9)
    assert lease.valid()
    clock.advance(0.2)
    assert not lease.valid()


def test_an_older_answer_that_comes_later_takes_nothing_away(lease, clock):
    first = lease.sending()
    clock.advance(5.0)
    second = lease.sending()
    lease.acknowledged(second)
    lease.acknowledged(first)
    assert lease.expires_at == second + TTL_S
