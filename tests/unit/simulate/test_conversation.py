"""Policies on the beginning of Mooncake's conversation trace, three times as dense, eight workers of 5,000 blocks.

What others found on the whole of it, with a simulator of their own: hits 11 % (random), 30 % (local prefixes), 35 %
(with fetching), and the order of the mean times below.
"""

from functools import cache
from pathlib import Path

from headrace.simulate.result import row_of
from headrace.simulate.settings import FleetSettings
from headrace.traces.reading import read_trace
from headrace.traces.trace import Trace
from tests.unit.simulate.fleets import run

FILE = Path(__file__).parents[2] / "data" / "traces" / "mooncake_conversation.jsonl.gz"


@cache
def beginning() -> Trace:
    trace = read_trace(FILE)
    return Trace("conversation", trace.format, "", 512, trace.requests[:1_000]).dejittered(0).faster(3.0)


@cache
def row(policy):
    return row_of(run(beginning(), policy, FleetSettings()), policy, 0, 3.0)


def test_policies_come_in_the_order_that_others_found():
    order = [
        "oracle_one_cache",
        "local_or_fetch",
        "local_or_fetch_local",
        "least_work",
        "power_of_two",
        "random",
    ]
    times = [row(policy).ttft_mean_s for policy in order]
    assert times == sorted(times)
    assert times[-1] > 2 * times[0]


def test_the_default_does_well_and_does_not_collapse_on_the_block_that_all_share():
    default, conductor = row("predicted_time"), row("local_or_fetch")
    assert default.ttft_mean_s < 1.03 * conductor.ttft_mean_s
    assert default.ttft_p99_s < 1.05 * conductor.ttft_p99_s
    assert default.hit_rate_tokens > 0.95 * conductor.hit_rate_tokens
    assert default.busy_max_over_mean < 1.3


def test_the_longest_prefix_alone_sends_all_to_one_worker():
    longest = row("longest_prefix")
    assert longest.busy_max_over_mean > 7.5
    assert longest.ttft_mean_s > 50 * row("random").ttft_mean_s
