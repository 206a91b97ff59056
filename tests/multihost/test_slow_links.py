"""Links that become slow, or far: what the router makes of them."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from random import Random
from urllib.parse import urlsplit

import pytest

from tests.support.delay_proxy import delayed
from tests.support.hosts import Clients, Hosts, asked, random_prompt
from tests.support.processes import Process, assert_idle, eventually, free_port, tokens

DELAY_S = 0.05
TROUBLES = {
    "decode worker lost",
    "decode worker unreachable",
    "directory lost, serving goes on",
    "directory lost, the last view serves on",
    "hand-off failed",
    "handshake failed",
    "peer can not be read from",
    "worker set aside",
}


def test_prompts_stay_local_while_the_link_is_slow_and_no_longer(fleet):
    """As the plans in the answers say. Nobody uses the link meanwhile, so the worker looks at it by itself."""
    random, answers = Random(3), []

    def plan():
        answers.append(asked(fleet.router.address, random_prompt(random), explain=True))
        return answers[-1].messages[0].plan

    eventually(lambda: plan().prefill_workers, "a plan with a hand-off")
    fleet.a.limit("2mbit")
    limited_at, num_before = time.monotonic(), len(answers)
    eventually(lambda: not plan().prefill_workers, "a plan without")
    shifted_at, num_slow = time.monotonic(), len(answers) - num_before - 1
    local = answers[-1].messages[0].plan
    [remote] = local.prefill_candidates
    assert remote.exposed_transfer_s > local.prediction.prefill_s  # why
    fleet.a.lift_limit()
    lifted_at = time.monotonic()
    eventually(lambda: plan().prefill_workers, "a plan with a hand-off again")
    print(
        f"\nslow link: {num_slow} hand-offs over it, then local after {shifted_at - limited_at:.1f} s;"
        f" hand-offs again {time.monotonic() - lifted_at:.1f} s after it was fast again"
    )
    fleet.assert_right(answers)
    fleet.assert_idle()


@pytest.fixture
def far_apart(shared_fleet, tmp_path):
    """A fleet of its own, in which each message takes 50 ms between its processes, and to Redis. Blocks do not."""
    near, net = shared_fleet.hosts, shared_fleet.hosts.net
    redis, proxy_port = urlsplit(near.redis_url), free_port()
    with ExitStack() as stack:
        stack.enter_context(delayed((net.address, proxy_port), (redis.hostname, redis.port), DELAY_S))
        hosts = Hosts(net, tmp_path, near.files, f"redis://{net.address}:{proxy_port}/0")
        stack.callback(hosts.stop)
        for kind, node in (("prefill", shared_fleet.a), ("decode", shared_fleet.b)):
            worker = hosts.start(kind, node, f"rpc.advertise_host={net.address}")
            stack.enter_context(delayed((net.address, worker.port), (node.address, worker.port), DELAY_S))
        hosts.start("router")
        for process in hosts.processes.values():
            process.wait_until_serving()
        yield hosts


def events_of(process: Process) -> set[str]:
    """That it has logged."""
    lines = [line for line in process.log.read_text().splitlines() if line.startswith("{")]
    return {json.loads(line)["event"] for line in lines}


@pytest.mark.nightly
def test_everything_works_over_ways_of_50_ms(far_apart, reference):
    router, prefill, decode = (far_apart.processes[kind] for kind in ("router", "prefill", "decode"))
    random = Random(9)
    eventually(lambda: asked(router.address, random_prompt(random), 1).prefill_worker, "a hand-off")
    clients = Clients(router.address, num_clients=4, seed=10, num_tokens=100)
    clients.start()
    try:
        eventually(lambda: len(clients.since(0)) >= 20, "answers")
    finally:
        answers = clients.stop()
    assert [a.error for a in answers if a.error is not None] == []
    for answer in answers:
        assert tokens(answer.messages) == reference(answer.prompt, answer.num_tokens)
    handed_off = [a.messages[-1].timings.time_to_first_token_s for a in answers if a.prefill_worker]
    assert min(handed_off) > 4 * DELAY_S  # two hops, there and back
    for process in (router, prefill, decode):
        assert not TROUBLES & events_of(process)
    assert_idle(prefill.address, decode.address)
