from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import TransferFailed
from kv_transfer.faulty_transport import Faults, FaultyTransport
from kv_transfer.local_transport import LocalFabric, LocalTransport
from kv_transfer.transport import BlockRegion
from tests.support.parts import whole

SIZE = (3, 32)


@pytest.fixture
def blocks():
    return np.zeros(SIZE, np.uint8)


@pytest.fixture
def source():
    return np.full(SIZE, 7, np.uint8)


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def owner(source):
    return LocalTransport("owner", [BlockRegion(source.ctypes.data, *SIZE)], LocalFabric())


@pytest.fixture
def reader(blocks, owner, faults):
    regions = [BlockRegion(blocks.ctypes.data, *SIZE)]
    transport = FaultyTransport(LocalTransport("reader", regions, owner._fabric), faults)
    transport.connect("owner", [whole(owner)])
    return transport


def test_a_stalled_read_writes_only_when_the_stall_ends(reader, blocks, source, faults):
    faults.stall = True
    read = reader.read("owner", [0], [1])
    assert not read.poll()
    source[0] = 9
    assert not blocks.any()
    faults.stall = False
    assert read.poll()
    assert (blocks[1] == 9).all()


def test_a_stall_holds_up_reads_that_were_posted_before(reader, blocks, faults):
    read = reader.read("owner", [0], [1])
    faults.stall = True
    assert not read.poll()
    assert not blocks.any()


def test_a_stalled_read_ends_with_a_disconnect(reader, owner, blocks, faults):
    faults.stall = True
    read = reader.read("owner", [0], [1])
    reader.disconnect("owner")
    reader.connect("owner", [whole(owner)])
    faults.stall = False
    with pytest.raises(TransferFailed, match="disconnected"):
        read.poll()
    assert not blocks.any()


def test_a_delayed_read_begins_later(reader, blocks, faults):
    faults.delay_s = 3600.0
    read = reader.read("owner", [0], [1])
    assert not read.poll()
    assert not blocks.any()
    faults.delay_s = 0.0
    assert read.poll()
    assert blocks[1].all()


def test_so_many_reads_fail(reader, faults):
    faults.fail_next = 2
    for _ in range(2):
        with pytest.raises(TransferFailed, match="injected"):
            reader.read("owner", [0], [0])
    assert reader.read("owner", [0], [0]).poll()


def test_a_byte_of_each_block_that_arrives_is_wrong_once(reader, blocks, source, faults):
    faults.corrupt = True
    read = reader.read("owner", [0, 1], [2, 0])
    assert read.poll()
    assert read.poll()
    assert [(blocks[i] != source[0]).sum() for i in range(3)] == [1, len(blocks[1]), 1]
