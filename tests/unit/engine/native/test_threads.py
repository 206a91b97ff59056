"""Who is pinned to a core: the thread that calls the kernels, as long as it does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.engine.native import library
from headrace.engine.native.threads import Team

pytestmark = pytest.mark.skipif(library.load() is None, reason="the kernels were not compiled")


@pytest.fixture
def cpus() -> Iterator[set[int]]:
    before = os.sched_getaffinity(0)
    if len(before) == 1:
        pytest.skip("one core: nobody is pinned")
    yield before
    os.sched_setaffinity(0, before)


def test_the_thread_that_calls_is_pinned_and_freed_with_the_team(cpus):
    team = Team(len(cpus))
    assert os.sched_getaffinity(0) == cpus
    team.pin_caller()
    assert os.sched_getaffinity(0) == {min(cpus)}
    del team
    assert os.sched_getaffinity(0) == cpus


def test_the_core_goes_from_the_thread_that_warms_up_to_the_one_that_serves(cpus):
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        team = Team(len(cpus))
        first.submit(team.pin_caller).result()
        assert first.submit(os.sched_getaffinity, 0).result() == {min(cpus)}
        second.submit(team.pin_caller).result()
        assert second.submit(os.sched_getaffinity, 0).result() == {min(cpus)}
        assert first.submit(os.sched_getaffinity, 0).result() == cpus


def test_a_thread_that_has_ended_needs_no_core(cpus):
    team = Team(len(cpus))
    with ThreadPoolExecutor(1) as ended:
        ended.submit(team.pin_caller).result()
    team.pin_caller()
    assert os.sched_getaffinity(0) == {min(cpus)}
    del team
    assert os.sched_getaffinity(0) == cpus


def test_fewer_threads_than_cores_are_left_to_the_system(cpus):
    team = Team(1)
    team.pin_caller()
    assert os.sched_getaffinity(0) == cpus
