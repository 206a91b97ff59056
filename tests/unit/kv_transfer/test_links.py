from __future__ import annotations

import pytest

from kv_transfer.links import Rate

MIB = 1 << 20


def test_there_is_no_rate_before_the_first_read():
    rate = Rate()
    rate.add(0, 1.0)
    assert rate.bytes_per_s is None


def test_the_first_read_is_the_rate_however_small():
    rate = Rate()
    rate.add(1000, 0.5)
    assert rate.bytes_per_s == pytest.approx(2000)


def test_a_large_read_weighs_more_than_many_small_ones():
    rate = Rate()
    for _ in range(10):
        rate.add(10_000, 1.0)
    rate.add(64 * MIB, 64 * MIB / 1e9)
    assert rate.bytes_per_s == pytest.approx(1e9, rel=0.01)
    rate.add(10_000, 1.0)
    assert rate.bytes_per_s == pytest.approx(1e9, rel=0.01)


def test_what_is_64_mib_ago_has_half_of_the_weight():
    rate = Rate()
    for _ in range(100):
        rate.add(64 * MIB, 64 * MIB / 2e9)
    rate.add(64 * MIB, 64 * MIB / 1e9)
    assert rate.bytes_per_s == pytest.approx(1.5e9)
