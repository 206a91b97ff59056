"""READs from several regions and from peers with another tensor parallelism, by known bytes, on each transport."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from headrace.errors import TransferFailed
from kv_transfer.layout import KvLayout
from kv_transfer.registry import TRANSPORTS, create_transport
from kv_transfer.slices import pairing
from kv_transfer.transport import BlockRegion, Part, Transport
from tests.support.parts import finish, part, whole

BLOCK_BYTES = 4096 + 64
LAYERS, HEADS, BLOCK_SIZE, ROW = 3, 8, 4, 24
NUM_BLOCKS = 5


@pytest.fixture(params=TRANSPORTS)
def make(request) -> Iterator:
    """`make(name, arrays)`: a transport around one region for each array of blocks."""
    made: list[Transport] = []

    def build(name: str, arrays: list[np.ndarray], num_scratch: int = 0) -> Transport:
        regions = [
            BlockRegion(blocks.ctypes.data, len(blocks) - num_scratch, blocks[0].nbytes, "cpu", num_scratch)
            for blocks in arrays
        ]
        made.append(create_transport(request.param, name, regions))
        return made[-1]

    yield build
    for transport in made:
        transport.close()


def random_blocks(seed: int, num_blocks: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, BLOCK_BYTES), np.uint8)


def test_block_ids_number_through_the_regions_of_a_peer(make):
    mine, pool, arena = np.zeros((6, BLOCK_BYTES), np.uint8), random_blocks(1, 4), random_blocks(2, 3)
    reader, owner = make("reader", [mine]), make("owner", [pool, arena])
    reader.connect("owner", [whole(owner)])
    finish(reader.read("owner", [6, 0, 4, 3, 5], [0, 1, 2, 3, 5]), owner)
    assert np.array_equal(mine[[0, 1, 2, 3, 5]], np.stack([arena[2], pool[0], arena[0], pool[3], arena[1]]))
    assert not mine[4].any()
    with pytest.raises(TransferFailed, match="remote block 7 does not exist; there are 7"):
        reader.read("owner", [7], [0])


def test_reads_land_in_region_0_only(make):
    mine, arena, source = np.zeros((2, BLOCK_BYTES), np.uint8), random_blocks(1, 2), random_blocks(2, 2)
    reader, owner = make("reader", [mine, arena]), make("owner", [source])
    reader.connect("owner", [whole(owner)])
    with pytest.raises(TransferFailed, match="local block 2"):
        reader.read("owner", [0], [2])


def test_scratch_is_a_target_and_hidden_from_peers(make):
    mine, source = np.zeros((3, BLOCK_BYTES), np.uint8), random_blocks(2, 3)
    reader, owner = make("reader", [mine], num_scratch=1), make("owner", [source], num_scratch=1)
    reader.connect("owner", [whole(owner)])
    finish(reader.read("owner", [1], [2]), owner)
    assert np.array_equal(mine[2], source[1])
    with pytest.raises(TransferFailed, match="remote block 2 does not exist; there are 2"):
        reader.read("owner", [2], [0])


def layout(size: int, rank: int = 0) -> KvLayout:
    return KvLayout(
        model_fingerprint="abc",
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=6,
        dtype="float32",
        row_bytes=ROW,
        block_size_tokens=BLOCK_SIZE,
        tp_size=size,
        tp_rank=rank,
        transport="any",
    )


def by_rank(values: np.ndarray, size: int) -> list[np.ndarray]:
    """[blocks, planes, heads, bytes] as each rank's blocks of bytes."""
    return [np.ascontiguousarray(each).reshape(len(values), -1) for each in np.split(values, size, axis=2)]


@pytest.mark.parametrize(
    ("reader_size", "owner_size"), [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2)]
)
def test_each_rank_gets_its_heads(make, reader_size, owner_size):
    shape = (NUM_BLOCKS, 2 * LAYERS, HEADS, BLOCK_SIZE * ROW)
    values = np.random.default_rng(3).integers(0, 256, shape, np.uint8)
    host_values = np.random.default_rng(4).integers(0, 256, shape, np.uint8)
    owned = list(zip(by_rank(values, owner_size), by_rank(host_values, owner_size), strict=True))
    owners = [make(f"owner/{rank}", list(arrays)) for rank, arrays in enumerate(owned)]
    everything = np.concatenate([values, host_values])
    remote, local = [4, NUM_BLOCKS + 2, 0], [1, 0, 3]
    for rank, expected in enumerate(by_rank(everything, reader_size)):
        mine = np.zeros((NUM_BLOCKS, expected.shape[1]), np.uint8)
        reader = make(f"reader/{rank}", [mine])
        slices = pairing(layout(reader_size, rank), layout(owner_size))
        reader.connect("owner", [Part(owners[each.owner_rank].metadata(), each) for each in slices])
        finish(reader.read("owner", remote, local), *owners)
        assert np.array_equal(mine[local], expected[remote])
        assert not mine[[2, 4]].any()


def test_metadata_of_another_peer_or_of_no_rank_is_refused(make):
    blocks = random_blocks(1, 2)
    reader, owner = make("reader", [blocks]), make("owner", [random_blocks(2, 2)])
    with pytest.raises(TransferFailed, match="other sent the metadata of owner"):
        reader.connect("other", [whole(owner)])
    with pytest.raises(TransferFailed, match="owner"):
        reader.connect("owner", [])


def test_metadata_of_another_transport_is_refused(make):
    blocks = random_blocks(1, 2)
    reader = make("reader", [blocks])
    name = next(name for name in TRANSPORTS if name != reader.name)
    stranger = create_transport(name, "owner", [BlockRegion(blocks.ctypes.data, 2, BLOCK_BYTES)])
    with pytest.raises(TransferFailed, match="not of this transport"):
        reader.connect("owner", [part(stranger.metadata(), BLOCK_BYTES)])
    stranger.close()
