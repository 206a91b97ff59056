from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import TransferFailed
from kv_transfer.local_transport import LocalFabric, LocalTransport
from kv_transfer.transport import BlockRegion
from tests.support.parts import whole

SIZE = (2, 32)


@pytest.fixture
def blocks():
    return np.zeros(SIZE, np.uint8), np.full(SIZE, 7, np.uint8)


@pytest.fixture
def pair(blocks):
    fabric = LocalFabric()
    reader, owner = (
        LocalTransport(name, [BlockRegion(array.ctypes.data, *SIZE)], fabric)
        for name, array in zip(["reader", "owner"], blocks, strict=True)
    )
    reader.connect("owner", [whole(owner)])
    return reader, owner


def test_a_read_that_was_disconnected_never_writes(pair, blocks):
    reader, owner = pair
    read = reader.read("owner", [0], [0])
    reader.disconnect("owner")
    reader.connect("owner", [whole(owner)])  # a new connection does not revive it
    with pytest.raises(TransferFailed, match="disconnected"):
        read.poll()
    assert not blocks[0].any()


def test_a_read_whose_owner_closes_fails(pair, blocks):
    reader, owner = pair
    read = reader.read("owner", [0], [0])
    owner.close()
    with pytest.raises(TransferFailed, match="gone"):
        read.poll()
    assert not blocks[0].any()


def test_fabrics_are_apart(pair):
    _, owner = pair
    array = np.zeros(SIZE, np.uint8)
    stranger = LocalTransport("stranger", [BlockRegion(array.ctypes.data, *SIZE)], LocalFabric())
    stranger.connect("owner", [whole(owner)])
    with pytest.raises(TransferFailed, match="gone"):
        stranger.read("owner", [0], [0]).poll()
