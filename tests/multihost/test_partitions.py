"""Hosts that do not reach each other, while both reach the router and Redis; and a host that reaches only the other."""

from __future__ import annotations

import time

import pytest

from tests.support.hosts import figures
from tests.support.nodes import Node
from tests.support.processes import eventually

NUM_ANSWERS = 15


def both_ways(a: Node, b: Node) -> None:
    a.drop_from(b.address)
    b.drop_from(a.address)


def from_owner_to_reader(a: Node, b: Node) -> None:
    b.drop_from(a.address)


def from_reader_to_owner(a: Node, b: Node) -> None:
    a.drop_from(b.address)


@pytest.mark.parametrize(
    "cut",
    [both_ways, from_owner_to_reader, pytest.param(from_reader_to_owner, marks=pytest.mark.nightly)],
)
def test_a_partition_between_workers_costs_no_answer(fleet, cut):
    with fleet.clients() as clients:
        eventually(lambda: len(clients.handed_off(since=0)) >= NUM_ANSWERS, "hand-offs before")
        cut_at = time.monotonic()
        cut(fleet.a, fleet.b)
        eventually(lambda: len(clients.since(cut_at)) >= NUM_ANSWERS, "answers during the partition")
        healed_at = time.monotonic()
        for node in (fleet.a, fleet.b):
            node.heal()
        ended = fleet.ensure_running()
        eventually(lambda: clients.handed_off(since=healed_at), "hand-offs after it")
    answers = clients.stop()
    print(f"\n{cut.__name__}: {figures(answers, cut_at, healed_at)}, ended: {ended}")
    fleet.assert_right(answers)
    fleet.assert_idle()
