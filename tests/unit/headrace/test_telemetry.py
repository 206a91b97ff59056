"""What probes get from the metrics port: they speak no TLS and show no certificate."""

from __future__ import annotations

import asyncio
import threading
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, Gauge

from headrace import telemetry
from headrace.errors import Unavailable
from headrace.telemetry import serve_metrics


def status(port: int, path: str) -> int:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
            return response.status
    except HTTPError as error:
        return error.code


async def test_metrics_health_and_readiness_on_one_port():
    registry = CollectorRegistry()
    Gauge("headrace_something", "Some figure", registry=registry).set(3)
    ready = False
    port, stop = serve_metrics(registry, "127.0.0.1", 0, lambda: ready)
    try:
        body = await asyncio.to_thread(lambda: urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read())
        assert b"headrace_something 3.0" in body
        assert await asyncio.to_thread(status, port, "/health") == 200
        assert await asyncio.to_thread(status, port, "/ready") == 503
        ready = True
        assert await asyncio.to_thread(status, port, "/ready") == 200
    finally:
        await asyncio.to_thread(stop)


async def test_an_event_loop_that_does_not_turn_is_neither_healthy_nor_ready(monkeypatch):
    port, stop = serve_metrics(CollectorRegistry(), "127.0.0.1", 0, lambda: True)
    monkeypatch.setattr(telemetry, "_LOOP_TIMEOUT_S", 0.3)
    found: list[int] = []
    asked = threading.Event()

    def ask() -> None:
        found.extend(status(port, path) for path in ("/health", "/ready"))
        asked.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(60)  # on the event loop, which does not turn meanwhile
    thread.join()
    await asyncio.to_thread(stop)
    assert found == [503, 503]


async def test_a_taken_port_is_named():
    port, stop = serve_metrics(CollectorRegistry(), "127.0.0.1", 0, lambda: True)
    try:
        with pytest.raises(Unavailable, match=str(port)):
            serve_metrics(CollectorRegistry(), "127.0.0.1", port, lambda: True)
    finally:
        await asyncio.to_thread(stop)
