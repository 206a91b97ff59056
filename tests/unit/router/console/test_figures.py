"""What recent answers say, by worker and over all."""

from __future__ import annotations

from router.console.figures import RATE_S, by_worker, latency, of_all
from router.recent import Answered


def answered(
    at_s=0.0, prefill="p", decode="d", *, cached: int | None = 30, itl_s: float | None = 0.02, failed=()
):
    return Answered(at_s, prefill, decode, 0.1, itl_s, 100, 40, cached, 1000, 0.01, failed)


def test_percentiles_are_the_least_values_that_so_many_do_not_exceed():
    assert latency([]) == latency([]) and latency([]).p50_s is None
    assert latency([0.3]).p95_s == 0.3
    spread = latency([i / 100 for i in range(100, 0, -1)])
    assert (spread.count, spread.p50_s, spread.p95_s) == (100, 0.5, 0.95)


def test_each_worker_gets_its_own_part():
    figures = by_worker([answered(), answered(prefill="d", itl_s=None), answered(failed=("q",))], now_s=0.0)
    assert figures["p"].ttft.count == 2 and figures["p"].itl.count == 0
    assert figures["d"].ttft.count == 1 and figures["d"].itl.count == 2
    assert figures["q"].transfers.failures == 1 and figures["p"].transfers.failures == 0
    assert figures["p"].transfers.sent_bytes == 2000 and figures["p"].transfers.received_bytes == 0


def test_rates_are_of_the_last_seconds_only():
    transfers = by_worker([answered(0.0), answered(100.0)], now_s=100.0)["p"].transfers
    assert transfers.sent_bytes == 2000
    assert transfers.sent_bytes_per_s == 1000 / RATE_S


def test_a_worker_that_did_not_report_counts_neither_as_hit_nor_as_miss():
    hits = of_all([answered(), answered(cached=None)]).hits
    assert (hits.prompt_tokens, hits.predicted_tokens, hits.reported_tokens) == (100, 40, 30)
