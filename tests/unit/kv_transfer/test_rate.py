from __future__ import annotations

import pytest

from kv_transfer.rate import Rate

MIB = 1 << 20


def test_there_is_no_rate_before_the_first_read():
    rate = Rate()
    rate.add(0, 1.0)
    assert rate.bytes_per_s == 0


def test_the_first_read_is_the_rate_however_small():
    rate = Rate()
    rate.add(1000, 0.5)
    assert rate.bytes_per_s == pytest.approx(2000)


def test_the_rate_predicts_how_long_the_next_bytes_take():
    """One READ that took long counts by its time: the mean of the rates would hide it."""
    rate = Rate()
    rate.add(MIB, MIB / 1e9)
    rate.add(MIB, 1.0)
    assert rate.bytes_per_s == pytest.approx(2 * MIB, rel=0.02)


def test_what_is_64_mib_ago_counts_half():
    rate = Rate()
    rate.add(64 * MIB, 3.0)
    rate.add(64 * MIB, 1.0)
    assert rate.bytes_per_s == pytest.approx((32 + 64) * MIB / (1.5 + 1.0))


def test_what_is_long_ago_is_forgotten():
    rate = Rate()
    for bytes_per_s in [1e6] * 20 + [1e9] * 20:
        rate.add(64 * MIB, 64 * MIB / bytes_per_s)
    assert rate.bytes_per_s == pytest.approx(1e9, rel=0.01)
