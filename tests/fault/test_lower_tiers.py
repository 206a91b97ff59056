"""Workers with pools that are too small for their prompts: what was evicted comes back, and outlives the process."""

from __future__ import annotations

import pytest

from headrace.config import DirectorySettings
from headrace.directory.records import Role
from headrace.directory.redis_directory import RedisDirectory
from headrace.tier import Tier
from tests.support.fleet import BLOCK_SIZE, session_with, workers

P, D = Role.PREFILL, Role.DECODE
PROMPTS = [[3 + (step * i) % 200 for i in range(83)] for step in (7, 11, 13)]
TURNS = [0, 1, 2, 0, 2, 1, 0]
HASHED_TOKENS = 80  # of a prompt: its full blocks, the last token left out
NUM_BLOCKS = 26


@pytest.fixture
def settings_of(tiny_model_files, settings_with):
    def make(host_blocks: int, disk_cache_dir: str = "", num_blocks: int = NUM_BLOCKS):
        config = tiny_model_files.config
        block_bytes = config.num_layers * 2 * config.num_kv_heads * BLOCK_SIZE * config.head_dim * 4
        engine = {
            "num_blocks": num_blocks,
            "host_memory_bytes": host_blocks * block_bytes,
            "disk_cache_dir": disk_cache_dir,
        }
        return settings_with(engine=engine)

    return make


@pytest.fixture
async def expected(settings_of):
    async with workers(settings_of(0, num_blocks=200), D) as [d], session_with(d) as session:
        return [(await session.answer(prompt)).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize(("host_blocks", "on_disk"), [(100, False), (10, True), (0, True)])
async def test_hand_offs_with_prefixes_that_come_back(settings_of, expected, tmp_path, host_blocks, on_disk):
    settings = settings_of(host_blocks, str(tmp_path) if on_disk else "")
    cached: list[int] = []
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        for turn in TURNS:
            answer = await session.answer(PROMPTS[turn], prefill=[p])
            assert answer.token_ids == expected[turn]
            cached.append(answer.end.cached_tokens)
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) >= HASHED_TOKENS, "the decode worker's own tiers held all of it"


async def test_a_restarted_worker_finds_its_files_and_publishes_them(
    settings_of, expected, tmp_path, redis_url
):
    settings = settings_of(0, str(tmp_path))
    async with workers(settings, D) as [d], session_with(d) as session:
        for prompt in PROMPTS:
            await session.answer(prompt)
    async with workers(settings, D) as [d], session_with(d) as session:
        answer = await session.answer(PROMPTS[0])
        assert answer.token_ids == expected[0]
        assert answer.end.cached_tokens == HASHED_TOKENS
        tiers = await published(redis_url, d)
        assert {Tier.DEVICE, Tier.DISK} <= set(tiers)


async def published(redis_url: str, worker) -> list[Tier]:
    directory = RedisDirectory(DirectorySettings(url=redis_url))
    try:
        await worker.process._publisher.publish_pending()
        snapshot = await directory.blocks(worker.worker_id, worker.incarnation)
        return list(snapshot.blocks.values())
    finally:
        await directory.close()
