"""The small fleets of the fault tests, with a router in front."""

from tests.fault.conftest import redis_url, settings, settings_with

__all__ = ["redis_url", "settings", "settings_with"]
