from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headrace.errors import LayoutMismatch
from kv_transfer.layout import KvLayout
from kv_transfer.slices import Slice, pairing

LAYOUT = KvLayout(
    model_fingerprint="abc",
    num_layers=3,
    num_kv_heads=8,
    head_dim=4,
    dtype="float32",
    row_bytes=16,
    block_size_tokens=2,
    transport="local",
)
SIZES = [1, 2, 4, 8, 16]  # of 8 heads: with 16 ranks two have each


def filled(num_ranks: int, values: np.ndarray) -> list[np.ndarray]:
    """One block by rank, as bytes. `values`: [planes, heads, bytes of a head]."""
    heads = [replace(LAYOUT, tp_size=num_ranks, tp_rank=rank).heads for rank in range(num_ranks)]
    return [np.ascontiguousarray(values[:, each.start : each.stop]).ravel() for each in heads]


@pytest.mark.parametrize("reader_size", SIZES)
@pytest.mark.parametrize("owner_size", SIZES)
def test_the_slices_of_all_ranks_bring_each_byte_to_its_place_once(reader_size, owner_size):
    head_bytes = LAYOUT.block_size_tokens * LAYOUT.row_bytes
    values = np.random.default_rng(0).integers(0, 256, (2 * LAYOUT.num_layers, 8, head_bytes), np.uint8)
    owners, expected = filled(owner_size, values), filled(reader_size, values)
    for rank in range(reader_size):
        reader = replace(LAYOUT, tp_size=reader_size, tp_rank=rank)
        block, times = np.zeros(reader.block_bytes, np.uint8), np.zeros(reader.block_bytes, int)
        for piece in pairing(reader, replace(LAYOUT, tp_size=owner_size)):
            assert piece.remote_block_bytes == len(owners[piece.owner_rank])
            assert piece.local_block_bytes == reader.block_bytes
            for i in range(piece.count):
                here = piece.local_offset + i * piece.local_stride
                there = piece.remote_offset + i * piece.remote_stride
                source = owners[piece.owner_rank][there : there + piece.nbytes]
                block[here : here + piece.nbytes] = source
                times[here : here + piece.nbytes] += 1
        assert (times == 1).all()
        assert np.array_equal(block, expected[rank])


@pytest.mark.parametrize("size", SIZES)
def test_equal_tp_is_one_whole_block_of_the_same_rank(size):
    reader = replace(LAYOUT, tp_size=size, tp_rank=size - 1)
    assert pairing(reader, replace(reader, tp_rank=0)) == [Slice.whole(reader.block_bytes, size - 1)]


def test_heads_that_do_not_divide_move_as_whole_blocks_between_equal_ranks():
    odd = replace(LAYOUT, num_kv_heads=3)
    assert [piece.count for piece in pairing(odd, odd)] == [1]


@pytest.mark.parametrize(
    ("ours", "theirs", "heads"),
    [(3, 2, 6), (2, 3, 6), (1, 2, 3), (4, 1, 6), (1, 12, 8), (1, 0, 8), (0, 0, 8)],
)
def test_other_pairings_are_refused_with_what_is_supported(ours, theirs, heads):
    reader = replace(LAYOUT, num_kv_heads=heads, tp_size=ours)
    with pytest.raises(LayoutMismatch, match=f"must be a multiple.*num_kv_heads.*; it is {heads}") as caught:
        pairing(reader, replace(reader, tp_size=theirs))
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == ("tp_size", ours, theirs)


def test_readers_of_copied_heads_share_out_the_ranks_that_have_them():
    readers = [replace(LAYOUT, tp_size=8, tp_rank=rank) for rank in range(8)]
    sources = [pairing(reader, replace(LAYOUT, tp_size=16))[0].owner_rank for reader in readers]
    assert sources == [0, 3, 4, 7, 8, 11, 12, 15]
