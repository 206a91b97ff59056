"""What the planner makes of records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.cluster.planner.view import Observer
from headrace.directory.records import Role, RouterShare, WorkerLoad
from tests.support.directory_samples import record

LOAD = WorkerLoad(running=0, waiting=0, waiting_tokens=0, free_blocks=400, cached_blocks=500)


def worker(number: int, **load):
    return record(
        worker_id=f"w-{number}", incarnation=f"i-{number}", role=Role.DECODE, load=replace(LOAD, **load)
    )


def test_busy_is_told_by_the_worker_s_own_clock():
    observer = Observer()
    [first] = observer.view([worker(0, busy_s=10, at_s=100)], 0.0).workers
    assert first.busy is None
    [second] = observer.view([worker(0, busy_s=12, at_s=108)], 1.0).workers
    assert second.busy == 0.25
    [same_record] = observer.view([worker(0, busy_s=12, at_s=108)], 2.0).workers
    assert same_record.busy == 0.25
    observer.view([], 3.0)
    [another_life] = observer.view([worker(0, busy_s=1, at_s=5)], 4.0).workers
    assert another_life.busy is None


def test_only_those_that_can_work_together_count():
    odd = replace(worker(3), kv_dtype="bfloat16")
    view = Observer().view([worker(0), worker(1), odd, replace(worker(2), draining=True)], 0.0, {"w-1"})
    assert [each.worker_id for each in view.workers] == ["w-0", "w-1", "w-2"]
    assert [each.worker_id for each in view.pool(Role.DECODE)] == ["w-0", "w-1"]
    assert [each.removable for each in view.workers] == [False, True, False]
    assert view.workers[0].kv_use == pytest.approx(0.1)
    assert view.workers[0].cached_tokens == 500 * 32


def test_it_knows_for_how_long_a_worker_drains():
    observer = Observer()
    drains = replace(worker(0), draining=True)
    assert [observer.view([drains], at).workers[0].draining_s for at in (5.0, 8.0)] == [0.0, 3.0]
    assert observer.view([worker(0)], 9.0).workers[0].draining_s == 0.0
    assert observer.view([drains], 11.0).workers[0].draining_s == 0.0


def test_the_fixed_part_of_a_step_is_learned():
    """Steps of 20 ms and 1 ms a sequence."""
    observer = Observer()
    shares = (RouterShare("r", 8, 800, 0),)
    for number in range(1, 60):
        batch = 1 + number % 32
        load = {"running": batch, "decode_step_s": 0.020 + 0.001 * batch, "at_s": float(number)}
        view = observer.view([worker(0, **load, shares=shares)], float(number))
    [figures] = view.workers
    assert figures.fixed_step_s == pytest.approx(0.020, rel=0.2)
    [idle] = observer.view([worker(0, decode_step_s=0.05, at_s=100.0)], 100.0).workers
    assert idle.fixed_step_s == 0.0
