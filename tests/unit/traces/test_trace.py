"""What is made of a trace before it is replayed."""

from headrace.traces.trace import Trace, TraceRequest


def trace_of(*requests: TraceRequest, relative=False) -> Trace:
    return Trace("t", "mooncake", "", 512, requests, relative=relative)


def test_a_coarse_clock_is_spread_up_to_the_next_tick_in_order():
    requests = [TraceRequest(3.0 * tick, 10 * tick + n + 1, 1) for tick in range(20) for n in range(5)]
    spread = trace_of(*requests).dejittered(seed=1)
    assert [request.num_input for request in spread.requests] == [request.num_input for request in requests]
    for before, after in zip(requests, spread.requests, strict=True):
        assert before.at_s <= after.at_s < before.at_s + 3.0
    assert len({request.at_s for request in spread.requests}) == 100
    assert spread == trace_of(*requests).dejittered(seed=1) != trace_of(*requests).dejittered(seed=2)


def test_a_fine_clock_stays():
    trace = trace_of(*(TraceRequest(float(n), 1, 1) for n in range(9)), TraceRequest(8.0, 1, 1))
    assert trace.dejittered(seed=1) is trace


def test_copies_share_no_blocks_and_no_session():
    trace = trace_of(TraceRequest(0.0, 600, 1, (0, 1), "s"), TraceRequest(2.0, 600, 1, (0, 7), "s", 1.0))
    twice = trace.times(2)
    assert [request.at_s for request in twice.requests] == [0.0, 0.0, 2.0, 2.0]
    first, second, first_again, second_again = (set(request.blocks) for request in twice.requests)
    assert first & first_again and second & second_again
    assert not (first | first_again) & (second | second_again)
    assert {len(requests) for requests in twice.by_session().values()} == {2}


def test_sessions_get_starts_and_nobody_thinks_for_too_long():
    def turn(session, at_s, think_s=None):
        return TraceRequest(at_s, 1, 1, (), session, think_s)

    trace = trace_of(
        turn("a", 0.0), turn("a", 500.0, 490.0), turn("a", 510.0, 9.0), turn("b", 0.0), relative=True
    )
    started = trace.with_starts(10.0, seed=3, think_cap_s=60.0)
    a, b = started.by_session()["a"], started.by_session()["b"]
    assert [request.at_s - a[0].at_s for request in a] == [0.0, 70.0, 80.0]
    assert [request.think_s for request in a] == [None, 60.0, 9.0]
    assert b[0].at_s > 0
    assert not started.relative


def test_faster_means_denser_arrivals_and_no_hurry_in_thinking():
    trace = trace_of(TraceRequest(6.0, 1, 1, (), "s", 5.0)).faster(3.0)
    assert (trace.requests[0].at_s, trace.requests[0].think_s) == (2.0, 5.0)
