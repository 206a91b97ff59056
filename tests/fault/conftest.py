"""Settings of small fleets. Each module has a Redis of its own, so that nobody sees another one's workers."""

from __future__ import annotations

from functools import partial

import pytest

from headrace.cluster.redis_server import RedisServer
from tests.support.fleet import fleet_settings


@pytest.fixture(scope="module")
def redis_url():
    with RedisServer() as server:
        yield server.url


@pytest.fixture(scope="module")
def settings_with(tiny_model_files, redis_url):
    """`settings_with(kv={…}, …)`: changes by section."""
    return partial(fleet_settings, tiny_model_files, redis_url)


@pytest.fixture(scope="module")
def settings(settings_with):
    return settings_with()
