from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch

from headrace.config import EngineSettings
from headrace.engine.kv_cache import KvCache
from headrace.engine.kv_memory import KvMemory
from headrace.engine.shard import Shard
from headrace.errors import InvalidRequest
from headrace.model_config import ModelConfig

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 3, 2, 8, 4
BLOCK_VALUES = LAYERS * 2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM

CONFIG = ModelConfig(
    architecture="llama",
    num_layers=LAYERS,
    hidden_size=32,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    vocab_size=16,
    max_model_tokens=64,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)


def make_cache(num_blocks: int = 6, dtype: torch.dtype = torch.float32) -> KvCache:
    return KvCache(CONFIG, num_blocks, BLOCK_SIZE, dtype)


@pytest.mark.parametrize(("dtype", "item"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_size_follows_from_memory(dtype, item):
    block_bytes = BLOCK_VALUES * item
    settings = EngineSettings(block_size_tokens=BLOCK_SIZE, kv_memory_bytes=5 * block_bytes + block_bytes - 1)
    cache = KvCache.for_model(CONFIG, settings, dtype)
    assert (cache.num_blocks, cache.block_bytes) == (5, block_bytes)


def test_number_of_blocks_wins_over_memory():
    settings = EngineSettings(block_size_tokens=BLOCK_SIZE, kv_memory_bytes=1, num_blocks=7)
    assert KvCache.for_model(CONFIG, settings, torch.float32).num_blocks == 7


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (EngineSettings(block_size_tokens=BLOCK_SIZE, num_blocks=1), "engine.num_blocks"),
        (
            EngineSettings(block_size_tokens=BLOCK_SIZE, kv_memory_bytes=BLOCK_VALUES * 4 * 2 - 1),
            "engine.kv_memory_bytes",
        ),
    ],
)
def test_too_few_blocks_are_refused(settings, field):
    with pytest.raises(InvalidRequest, match="at least 2 blocks") as raised:
        KvCache.for_model(CONFIG, settings, torch.float32)
    assert raised.value.field == field


def test_a_block_is_one_piece_of_memory():
    cache = make_cache()
    assert cache.address % mmap.PAGESIZE == 0
    assert cache.tensor.is_contiguous()
    assert cache.tensor.nbytes == cache.num_blocks * cache.block_bytes
    assert cache.tensor[4].data_ptr() == cache.address + 4 * cache.block_bytes
    assert not cache.tensor.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_name(dtype):
    assert make_cache(dtype=dtype).dtype_name == {torch.float32: "float32", torch.bfloat16: "bfloat16"}[dtype]


def test_write_touches_the_named_slots_and_nothing_else():
    cache = make_cache()
    cache.tensor.fill_(7.0)
    k_TKD, v_TKD = torch.randn(3, KV_HEADS, HEAD_DIM), torch.randn(3, KV_HEADS, HEAD_DIM)
    blocks, offsets = [5, 0, 5], [3, 1, 0]
    cache.write(1, torch.tensor(blocks), torch.tensor(offsets), k_TKD, v_TKD)
    expected = torch.full_like(cache.tensor, 7.0)
    for row, (block, offset) in enumerate(zip(blocks, offsets, strict=True)):
        expected[block, 1, 0, :, offset] = k_TKD[row]
        expected[block, 1, 1, :, offset] = v_TKD[row]
    assert torch.equal(cache.tensor, expected)


def test_gather_puts_blocks_in_the_order_asked_for():
    cache = make_cache()
    cache.tensor.normal_()
    ids = torch.tensor([4, 0, 4, 2])
    expected = torch.cat([cache.tensor[i, 2] for i in ids.tolist()], dim=2)  # [2, K, C, D]
    assert torch.equal(cache.gather(2, ids), expected)
    out = torch.empty_like(expected)
    assert torch.equal(cache.gather(2, ids, out=out), expected)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_are_of_the_bytes_of_each_block(dtype):
    cache = make_cache(dtype=dtype)
    cache.tensor.normal_()
    memory = KvMemory(cache, 0)
    expected = memory.checksums([3, 0])
    assert expected[0] != expected[1]
    block = cache.tensor[3].view(torch.uint8).flatten()
    for position in (0, len(block) // 2 + 1, len(block) - 1):
        block[position] += 1
        changed = memory.checksums([3, 0])
        assert changed[0] != expected[0]
        assert changed[1] == expected[1]
        block[position] -= 1
    assert memory.checksums([3, 0]) == expected


def test_a_checksum_sees_what_changed_places():
    """Two heads' keys, and two layers', exchanged: the same bytes, elsewhere."""
    cache = make_cache()
    cache.tensor.normal_()
    memory = KvMemory(cache, 0)
    [expected] = memory.checksums([0])
    for places in (cache.tensor[0, 0, 0, :2], cache.tensor[0, :2, 0, 0]):
        places[:] = places.flip(0)
        assert memory.checksums([0]) != [expected]
        places[:] = places.flip(0)
    assert memory.checksums([0]) == [expected]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_checksums_of_all_ranks_combined_are_those_of_one(num_ranks):
    """Of 4 KV heads: of two heads a rank, of one, and of one that two ranks have."""
    config = replace(CONFIG, num_heads=8, num_kv_heads=4)
    whole = KvCache(config, 4, BLOCK_SIZE, torch.float32)
    whole.tensor.normal_()
    combined = [0, 0]
    for rank in range(num_ranks):
        shard = KvCache(config, 4, BLOCK_SIZE, torch.float32, shard=Shard(rank, num_ranks))
        shard.tensor[:] = whole.tensor[:, :, :, shard.heads.start : shard.heads.stop]
        of_rank = KvMemory(shard, 0).checksums([3, 0])
        combined = [a ^ b for a, b in zip(combined, of_rank, strict=True)]
    assert combined == KvMemory(whole, 0).checksums([3, 0])
