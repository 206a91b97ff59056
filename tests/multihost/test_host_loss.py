"""A host that goes down: its link first, so that nobody hears of the end of its processes."""

from __future__ import annotations

import time
from random import Random

import grpc

from tests.support.hosts import Fleet, asked, figures, random_prompt
from tests.support.nodes import Node
from tests.support.processes import Process, eventually


def lose(node: Node, process: Process) -> None:
    node.set_link(up=False)
    process.kill()


def test_the_prefill_host_is_lost_and_replaced(fleet):
    with fleet.clients(seed=6) as clients:
        eventually(lambda: len(clients.handed_off(since=0)) >= 5, "hand-offs before")
        lost_at = time.monotonic()
        lose(fleet.a, fleet.prefill)
        eventually(lambda: len(clients.since(lost_at)) >= 10, "answers without it")
        fleet.a.set_link(up=True)
        assert fleet.ensure_running() == ["prefill"]
        serving_at = time.monotonic()
        eventually(lambda: clients.handed_off(since=serving_at), "hand-offs from its successor")
    answers = clients.stop()
    print(f"\nprefill host lost, its successor serves: {figures(answers, lost_at, serving_at)}")
    fleet.assert_right(answers)
    fleet.assert_idle()


def test_the_decode_host_is_lost_with_and_without_another(fleet):
    c = fleet.hosts.net.add_node()
    spare = fleet.hosts.start("decode", c, name="spare")
    spare.wait_until_serving()
    with fleet.clients(num_clients=4, seed=7, num_tokens=400) as clients:
        eventually(lambda: _decode_workers(fleet) == {"decode", "spare"}, "both decode")
        eventually(lambda: len(clients.since(0)) >= 8, "answers before")
        lost_at = time.monotonic()
        lose(fleet.b, fleet.decode)
        eventually(lambda: len(clients.since(lost_at)) >= 8, "answers by the other")
        found_at = time.monotonic()
    answers = clients.stop()
    print(f"\ndecode host lost, another there: {figures(answers, lost_at, found_at)}")
    fleet.assert_right(answers)

    lose(c, spare)
    asked_at = time.monotonic()
    nobody = asked(fleet.router.address, answers[0].prompt)
    assert nobody.error is not None
    assert nobody.error.code() == grpc.StatusCode.UNAVAILABLE
    assert "decode worker" in nobody.error.details()
    print(f"and without one: {nobody.error.details()!r} after {nobody.ended_at - asked_at:.1f} s")

    fleet.b.set_link(up=True)
    assert fleet.ensure_running() == ["decode"]
    fleet.wait_for_hand_off()
    after = asked(fleet.router.address, answers[0].prompt)
    fleet.assert_right([after])
    fleet.assert_idle()


def _decode_workers(fleet: Fleet) -> set[str]:
    plan = asked(fleet.router.address, random_prompt(Random(8)), explain=True).messages[0].plan
    return {each.worker for each in plan.decode_candidates}
