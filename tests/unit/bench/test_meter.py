"""What is timed as the machine's best does the whole work: all products right, all bytes read."""

from __future__ import annotations

import pytest
import torch

from headrace.bench import meter
from headrace.bench.meter import Meter
from headrace.engine.native import library
from headrace.engine.native.threads import Team


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_matrices(dtype):
    x, w = meter._random((96, 64, 128), dtype)
    expected = x.double() @ w.double().t()
    ways = meter._torch_products(x, w)
    results = [ways[0].call(), ways[1].call().t()]
    if library.load() is not None:
        team = Team(1)
        ways.append(meter._native_product(x, w, team))
        results.append(ways[-1].call())
    for way, result in zip(ways, results, strict=True):
        assert way.amount == 2 * 96 * 64 * 128
        tolerance = 1e-4 if dtype == torch.float32 else 0.3
        torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=0.02)


def test_limits_are_measured():
    before = torch.get_num_threads()
    limits = Meter(1 << 20, torch.float32, 1).measure()
    assert limits.bytes_per_s > 0
    assert limits.flops_per_s > 0
    assert torch.get_num_threads() == before


def test_the_fastest_way_is_found(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now[0])

    def takes(seconds: float):
        return lambda: now.__setitem__(0, now[0] + seconds)

    slow, fast = meter._Way(takes(0.4), 100.0), meter._Way(takes(0.1), 50.0)
    assert meter._fastest([slow, fast]) is fast
    assert fast.rate() == pytest.approx(500.0)
