from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from headrace.errors import TransferFailed
from kv_transfer.faulty_transport import Chaos, Fault, Faults, FaultyTransport
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


def test_a_dropped_read_is_done_without_its_bytes(reader, blocks, faults):
    faults.drop = True
    assert reader.read("owner", [0], [1]).poll()
    assert not blocks.any()


def test_bytes_that_come_twice_come_while_the_connection_lives(reader, owner, blocks, faults):
    faults.duplicate = True
    for lives in (True, False):
        read = reader.read("owner", [0], [1])
        assert read.poll()
        blocks[:] = 0
        if not lives:
            reader.disconnect("owner")
        reader.progress()
        assert (blocks[1] == 7).all() == lives
        blocks[:] = 0
        reader.progress()
        assert not blocks.any()


def test_bytes_that_come_twice_come_as_late_as_is_said(reader, blocks, faults):
    faults.duplicate, faults.duplicate_after_s = True, 3600.0
    assert reader.read("owner", [0], [1]).poll()
    blocks[:] = 0
    reader.progress()
    assert not blocks.any()


def test_a_link_that_breaks_brings_half_and_ends_other_reads(reader, owner, blocks, faults):
    waiting = reader.read("owner", [2], [2])  # the local transport copies at the first poll
    faults.kill_next = 1
    read = reader.read("owner", [0, 1], [0, 1])
    with pytest.raises(TransferFailed, match="broke"):
        read.poll()
    assert blocks[0].all()
    assert not blocks[1].any()
    with pytest.raises(TransferFailed, match="disconnected"):
        waiting.poll()
    with pytest.raises(TransferFailed, match="not connected"):
        reader.read("owner", [0], [0])
    reader.connect("owner", [whole(owner)])
    assert reader.read("owner", [1], [1]).poll()


def test_faults_of_one_peer_leave_others_alone(reader, owner, faults, source, blocks):
    other = LocalTransport("other", [BlockRegion(source.ctypes.data, *SIZE)], owner._fabric)
    reader.connect("other", [whole(other)])
    faults.by_peer["other"] = Faults(stall=True)
    assert not reader.read("other", [0], [0]).poll()
    assert reader.read("owner", [0], [1]).poll()


@pytest.mark.parametrize("include_probes", [True, False])
def test_probes_go_unharmed_unless_asked(owner, include_probes):
    memory = np.zeros((4, 32), np.uint8)
    faults = Faults(fail_next=1, include_probes=include_probes)
    inner = LocalTransport("prober", [BlockRegion(memory.ctypes.data, *SIZE, num_scratch=1)], owner._fabric)
    transport = FaultyTransport(inner, faults)
    transport.connect("owner", [whole(owner)])
    if include_probes:
        with pytest.raises(TransferFailed, match="injected"):
            transport.read("owner", [0], [3])
    else:
        assert transport.read("owner", [0], [3]).poll()
        assert faults.fail_next == 1


def test_chaos_is_the_same_for_a_seed_and_draws_every_kind():
    chances = dict.fromkeys(Fault, 0.1)
    drawn = [[Chaos(random.Random(seed), chances).draw() for _ in range(1)] for seed in (5, 5)]
    assert drawn[0] == drawn[1]
    chaos = Chaos(random.Random(5), chances)
    counts = Counter(chaos.draw() for _ in range(2000))
    assert set(counts) == {*Fault, None}
    assert counts[None] > max(counts[fault] for fault in Fault)


@pytest.mark.parametrize("fault", Fault)
def test_a_drawn_fault_happens(reader, blocks, source, faults, fault):
    faults.chaos = Chaos(random.Random(1), {fault: 1.0}, max_delay_s=3600.0)
    if fault is Fault.FAIL:
        with pytest.raises(TransferFailed, match="injected"):
            reader.read("owner", [0, 1], [0, 1])
        return
    read = reader.read("owner", [0, 1], [0, 1])
    if fault is Fault.KILL:
        with pytest.raises(TransferFailed, match="broke"):
            read.poll()
        return
    assert read.poll() == (fault not in (Fault.STALL, Fault.DELAY))
    wrong = int((blocks[:2] != source[:2]).sum())
    arrived = fault is Fault.DUPLICATE
    assert wrong == (0 if arrived else 1 if fault is Fault.CORRUPT else blocks[:2].size)
    if arrived:
        blocks[:] = 0
        reader.progress()
        assert np.array_equal(blocks[:2], source[:2])
