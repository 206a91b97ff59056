"""What the transfer thread relies on, over every implementation of the transport seam."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest

from headrace.errors import TransferFailed
from kv_transfer.faulty_transport import Faults, FaultyTransport
from kv_transfer.registry import create_transport
from kv_transfer.transport import BlockRegion, Read, Transport
from tests.support.parts import finish, part, whole

NUM_BLOCKS = 6
BLOCK_BYTES = 3 * 4096 + 64  # neither a power of two nor a multiple of a page


@dataclass
class End:
    """One side: its blocks as rows of bytes, and the transport around them."""

    name: str
    blocks: np.ndarray
    transport: Transport

    def poll(self, read: Read, *others: End) -> bool:
        """One look, at both sides."""
        for other in others:
            other.transport.progress()
        self.transport.progress()
        return read.poll()

    def finish(self, read: Read, *others: End) -> None:
        finish(read, self.transport, *(other.transport for other in others))


@pytest.fixture(params=["local", "nixl", "faulty local", "faulty nixl"])
def make(request) -> Iterator:
    """Builds an end; all are closed afterwards."""
    made: list[End] = []

    def build(name: str, num_blocks: int = NUM_BLOCKS, block_bytes: int = BLOCK_BYTES) -> End:
        blocks = np.random.default_rng(len(made)).integers(0, 256, (num_blocks, block_bytes), np.uint8)
        region = BlockRegion(blocks.ctypes.data, num_blocks, block_bytes)
        transport = create_transport(request.param.split()[-1], name, [region])
        if request.param.startswith("faulty"):
            transport = FaultyTransport(transport, Faults())
        made.append(End(name, blocks, transport))
        return made[-1]

    yield build
    for end in made:
        end.transport.close()


@pytest.fixture
def ends(make) -> tuple[End, End]:
    """A reader that is connected to an owner."""
    reader, owner = make("reader"), make("owner")
    reader.transport.connect("owner", [whole(owner.transport)])
    owner.transport.connect("reader", [whole(reader.transport)])
    return reader, owner


def test_the_named_blocks_arrive_and_no_others_change(ends):
    reader, owner = ends
    before, source = reader.blocks.copy(), owner.blocks.copy()
    reader.finish(reader.transport.read("owner", [4, 0, 5], [1, 5, 2]), owner)
    before[[1, 5, 2]] = source[[4, 0, 5]]
    assert np.array_equal(reader.blocks, before)
    assert np.array_equal(owner.blocks, source)


def test_reads_end_in_any_order_each_with_its_bytes(ends):
    reader, owner = ends
    reads = [reader.transport.read("owner", [i], [NUM_BLOCKS - 1 - i]) for i in range(NUM_BLOCKS)]
    for read in reversed(reads):
        reader.finish(read, owner)
    assert np.array_equal(reader.blocks, owner.blocks[::-1])


def test_the_bytes_are_those_of_the_moment_of_reading(ends):
    reader, owner = ends
    for value in (17, 18):
        owner.blocks[3] = value
        reader.finish(reader.transport.read("owner", [3], [0]), owner)
        assert (reader.blocks[0] == value).all()


def test_both_sides_read_from_each_other(ends):
    reader, owner = ends
    reader.finish(reader.transport.read("owner", [0], [1]), owner)
    owner.finish(owner.transport.read("reader", [1], [2]), reader)
    assert np.array_equal(owner.blocks[2], owner.blocks[0])


def test_a_done_read_stays_done(ends):
    reader, owner = ends
    read = reader.transport.read("owner", [0], [0])
    while not reader.poll(read, owner):
        pass
    reader.transport.disconnect("owner")
    assert read.poll()
    read.release()


def test_pools_of_different_sizes(make):
    reader, owner = make("reader", num_blocks=2), make("owner", num_blocks=40)
    reader.transport.connect("owner", [whole(owner.transport)])
    reader.finish(reader.transport.read("owner", [39], [1]), owner)
    assert np.array_equal(reader.blocks[1], owner.blocks[39])


@pytest.mark.parametrize(
    ("remote", "local", "named"),
    [
        ([NUM_BLOCKS], [0], f"remote block {NUM_BLOCKS}"),
        ([0, -1], [0, 1], "remote block -1"),
        ([0], [NUM_BLOCKS], f"local block {NUM_BLOCKS}"),
        ([0], [-2], "local block -2"),
    ],
)
def test_a_block_that_does_not_exist_is_named(ends, remote, local, named):
    reader, _ = ends
    before = reader.blocks.copy()
    with pytest.raises(TransferFailed, match=named):
        reader.transport.read("owner", remote, local)
    assert np.array_equal(reader.blocks, before)


def test_blocks_of_another_size_are_refused(make):
    reader, owner = make("reader"), make("owner", block_bytes=2 * BLOCK_BYTES)
    with pytest.raises(TransferFailed, match=f"{2 * BLOCK_BYTES} bytes, ours have {BLOCK_BYTES}"):
        reader.transport.connect("owner", [whole(owner.transport)])


@pytest.mark.parametrize("metadata", [b"", b"?", b"x" * 500])
def test_metadata_of_something_else_is_refused(make, metadata):
    with pytest.raises(TransferFailed, match="not of this transport"):
        make("reader").transport.connect("owner", [part(metadata, BLOCK_BYTES)])


def test_reading_from_a_stranger_fails(make):
    with pytest.raises(TransferFailed, match="stranger"):
        make("reader").transport.read("stranger", [0], [0])


def test_after_a_disconnect_nothing_is_read_until_connected_again(ends):
    reader, owner = ends
    reader.finish(reader.transport.read("owner", [0], [0]), owner)
    reader.transport.disconnect("owner")
    with pytest.raises(TransferFailed, match="not connected"):
        reader.transport.read("owner", [1], [1])
    reader.transport.connect("owner", [whole(owner.transport)])
    reader.finish(reader.transport.read("owner", [1], [1]), owner)
    assert np.array_equal(reader.blocks[1], owner.blocks[1])


def test_a_disconnect_of_a_stranger_does_nothing(ends):
    reader, owner = ends
    reader.transport.disconnect("stranger")
    reader.finish(reader.transport.read("owner", [0], [0]), owner)


def test_another_handshake_leaves_reads_alone(ends):
    reader, owner = ends
    read = reader.transport.read("owner", [2], [3])
    reader.transport.connect("owner", [whole(owner.transport)])
    reader.finish(read, owner)
    assert np.array_equal(reader.blocks[3], owner.blocks[2])


def test_closing_ends_reads_and_can_be_done_twice(ends):
    reader, _ = ends
    read = reader.transport.read("owner", [0], [0])
    reader.transport.close()
    reader.transport.close()
    before = reader.blocks.copy()
    with suppress(TransferFailed):
        assert read.poll()  # it was done already
    assert np.array_equal(reader.blocks, before)


def test_a_peer_that_closed_can_not_be_read_and_takes_nobody_else_along(ends, make):
    # Once there is a connection, a transport may go on reading the memory of a peer that closed but lives (CMA does).
    reader, owner = ends
    before = reader.blocks.copy()
    other = make("other")
    reader.transport.connect("other", [whole(other.transport)])
    owner.transport.close()
    with pytest.raises(TransferFailed):
        reader.finish(reader.transport.read("owner", [1], [1]))
    assert np.array_equal(reader.blocks, before)
    reader.finish(reader.transport.read("other", [1], [1]), other)
    assert np.array_equal(reader.blocks[1], other.blocks[1])


def test_a_restarted_peer_is_read_under_its_new_incarnation(ends, make):
    reader, owner = ends
    owner.transport.close()
    successor = make("owner-2")
    reader.transport.disconnect("owner")
    reader.transport.connect("owner-2", [whole(successor.transport)])
    reader.finish(reader.transport.read("owner-2", [5], [0]), successor)
    assert np.array_equal(reader.blocks[0], successor.blocks[5])
