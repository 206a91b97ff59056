"""A host that reaches neither Redis nor the router, though its processes are well."""

from __future__ import annotations

import time
from random import Random

import grpc
import pytest

from tests.support.hosts import asked, random_prompt
from tests.support.processes import eventually, worker_status

PARTED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def cut_off(node, net):
    node.drop_from(net.address)
    node.drop_to(net.address)


def test_a_prefill_worker_is_removed_and_comes_back_without_a_restart(fleet):
    net, random = fleet.hosts.net, Random(4)
    incarnation = worker_status(fleet.prefill.address).incarnation
    cut_off(fleet.a, net)
    cut_at, answers = time.monotonic(), []

    def plan():
        answers.append(asked(fleet.router.address, random_prompt(random), explain=True))
        return answers[-1].messages[0].plan

    eventually(lambda: not plan().prefill_candidates, "it is nobody's candidate")
    removed_at = time.monotonic()
    fleet.a.heal()
    healed_at = time.monotonic()
    eventually(lambda: plan().prefill_workers, "it is back")
    print(
        f"\ncut off from Redis and router: removed after {removed_at - cut_at:.1f} s,"
        f" back {time.monotonic() - healed_at:.1f} s after the heal"
    )
    assert worker_status(fleet.prefill.address).incarnation == incarnation
    fleet.assert_right(answers)
    fleet.assert_idle()


def test_the_only_decode_worker_is_missed_with_a_clear_error_and_comes_back(fleet):
    net = fleet.hosts.net
    incarnation = worker_status(fleet.decode.address).incarnation
    with fleet.clients() as clients:
        eventually(lambda: len(clients.since(0)) > 10, "answers before")
        cut_at = time.monotonic()
        cut_off(fleet.b, net)
        eventually(lambda: any(a.error is not None for a in clients.since(0)), "an error")
        fleet.b.heal()
        healed_at = time.monotonic()
        eventually(lambda: clients.handed_off(since=healed_at), "answers after it")
    answers = clients.stop()
    failed = [a for a in answers if a.error is not None]
    back_at = min(a.ended_at for a in clients.handed_off(since=healed_at))
    print(
        f"\nthe only decode worker cut off: {len(answers)} answers, {len(failed)} errors,"
        f" after {', '.join(f'{a.ended_at - a.began_at:.1f} s' for a in failed)}; the first"
        f" {failed[0].ended_at - cut_at:.1f} s after the cut; right answers {back_at - healed_at:.1f} s after the heal"
    )
    assert {a.error.code() for a in failed} <= set(PARTED), failed
    fleet.assert_right([a for a in answers if a.error is None])
    assert worker_status(fleet.decode.address).incarnation == incarnation
    fleet.assert_idle()


@pytest.mark.nightly
def test_a_worker_that_was_replaced_meanwhile_does_not_take_its_name_back(fleet):
    """Two processes of one name: the one that was cut off, and the one that a supervisor has put into its place."""
    net, old = fleet.hosts.net, fleet.prefill
    cut_off(fleet.a, net)
    new = fleet.hosts.start("prefill", fleet.b)
    new.wait_until_serving()
    fleet.wait_for_hand_off()
    incarnation = worker_status(new.address).incarnation
    fleet.a.heal()
    eventually(lambda: "another process has taken over this worker id" in old.log.read_text(), "it is told")
    answers = [asked(fleet.router.address, random_prompt(Random(5 + n))) for n in range(3)]
    assert [a.prefill_worker for a in answers] == ["prefill"] * 3
    assert worker_status(new.address).incarnation == incarnation
    fleet.assert_right(answers)
    new.stop()
    fleet.hosts.processes["prefill"] = old
    eventually(lambda: "worker id is ours again" in old.log.read_text(), "its name is its own again")
    fleet.wait_for_hand_off()
    fleet.assert_idle()
