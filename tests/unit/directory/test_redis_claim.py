"""A claim in Redis: one has it, until it gives it up or dies."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from headrace.cluster.redis_server import RedisServer
from headrace.config import DirectorySettings
from headrace.directory.redis_directory import RedisDirectory
from headrace.errors import Unavailable


async def test_a_claim_is_one_s_until_given_up_or_over():
    with RedisServer() as server:
        directory = RedisDirectory(DirectorySettings(url=server.url, cluster=uuid.uuid4().hex[:8]))
        assert await directory.claim("planner", "a", 30)
        assert not await directory.claim("planner", "b", 30)
        assert not await directory.claim("planner", "b", 0)  # another one's is not given up
        assert await directory.claim("planner", "a", 30)
        assert await directory.claim("another", "b", 30)
        assert await directory.claim("planner", "a", 0)
        assert await directory.claim("planner", "b", 0.05)
        async with asyncio.timeout(20):
            while not await directory.claim("planner", "a", 30):
                await asyncio.sleep(0.01)
    with pytest.raises(Unavailable):
        await directory.claim("planner", "a", 30)
    await directory.close()
