"""A hand-off from one host to another."""

from __future__ import annotations

from random import Random

from tests.support.hosts import BLOCK_SIZE, asked, random_prompt
from tests.support.processes import worker_status


def test_a_hand_off_goes_over_tcp_and_brings_the_right_tokens(fleet):
    sent_bytes = fleet.a.sent_bytes
    answer = asked(fleet.router.address, random_prompt(Random(1)))
    fleet.assert_right([answer])
    hand_off = answer.messages[-1].hand_off
    assert hand_off.prefill_worker == "prefill"
    assert hand_off.blocks_moved == 300 // BLOCK_SIZE + 1
    assert fleet.a.sent_bytes - sent_bytes > hand_off.bytes_moved  # not by memory that both reach
    [peer] = worker_status(fleet.decode.address).peers
    assert (peer.worker_id, peer.transport, peer.device) == ("prefill", "tcp", "eth0")
    fleet.assert_idle()
