"""One fleet for all tests here, which leave it as they found it. Skipped where namespaces can not be made."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from headrace.engine.sequence import NewToken
from tests.support.engine_driver import make_sequence
from tests.support.engines import engine_for
from tests.support.hosts import BLOCK_SIZE, Fleet, Hosts, Reference
from tests.support.nodes import network, redis_at


@pytest.fixture(scope="session")
def shared_fleet(tiny_model_files, reference, tmp_path_factory) -> Iterator[Fleet]:
    with network() as net, redis_at(net.address) as url:
        a, b = net.add_node(), net.add_node()
        hosts = Hosts(net, tmp_path_factory.mktemp("hosts"), tiny_model_files, url)
        try:
            yield Fleet(hosts, a, b, reference)
        finally:
            hosts.stop()


@pytest.fixture
def fleet(shared_fleet) -> Iterator[Fleet]:
    """All is well: a hand-off has just succeeded."""
    shared_fleet.ensure_running()
    shared_fleet.wait_for_hand_off()
    yield shared_fleet
    for node in shared_fleet.hosts.net.nodes:
        node.restore()


@pytest.fixture(scope="session")
def reference(tiny_model_files) -> Reference:
    """The tokens that one engine alone draws: `reference(prompt, num_tokens)`."""
    engine = engine_for(tiny_model_files, block_size_tokens=BLOCK_SIZE, num_blocks=512)

    def answer(prompt: list[int], num_tokens: int) -> list[int]:
        engine.submit(make_sequence("reference", prompt, num_tokens, root=os.urandom(16)))
        found: list[int] = []
        while len(found) < num_tokens:
            found += [event.token_id for event in engine.step().events if isinstance(event, NewToken)]
        return found

    return answer
