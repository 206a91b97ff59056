"""A hand-off from one host to another."""

from __future__ import annotations

import random

from tests.support.processes import eventually, tokens, worker_status

NUM_TOKENS = 20


def prompts(seed: int):
    """Different ones, of 300 tokens."""
    numbers = random.Random(seed)
    while True:
        yield [numbers.randrange(3, 200) for _ in range(300)]


def test_a_hand_off_goes_over_tcp_and_brings_the_right_tokens(fleet, reference):
    prompt = prompts(1)
    eventually(lambda: fleet.ask(next(prompt), max_tokens=1)[-1].hand_off.prefill_worker, "prefill is seen")
    sent_bytes, asked = fleet.a.sent_bytes, next(prompt)
    answer = fleet.ask(asked, max_tokens=NUM_TOKENS)
    assert tokens(answer) == reference(asked, NUM_TOKENS)
    hand_off = answer[-1].hand_off
    assert hand_off.prefill_worker == fleet.prefill.name
    assert hand_off.blocks_moved == 300 // 16 + 1
    assert (
        fleet.a.sent_bytes - sent_bytes > hand_off.bytes_moved
    )  # over the wire, not by the memory they share
    [peer] = worker_status(fleet.decode.address).peers
    assert (peer.worker_id, peer.transport, peer.device) == (fleet.prefill.name, "tcp", "eth0")
    fleet.assert_idle()
