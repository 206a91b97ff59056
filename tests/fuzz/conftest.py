"""How many requests through each door: together over 20,000; `HEADRACE_FUZZ_REQUESTS` sets another number."""

from __future__ import annotations

import os

import pytest

from headrace.cluster.redis_server import RedisServer
from tests.support.fleet import fleet_settings


@pytest.fixture(scope="session")
def num_requests() -> int:
    return int(os.environ.get("HEADRACE_FUZZ_REQUESTS", "7000"))


@pytest.fixture
def settings(tiny_model_files):
    with RedisServer() as redis:
        yield fleet_settings(tiny_model_files, redis.url, engine={"grammar_timeout_s": 0.5})
