"""A process on a thread of its own: it serves until it is told to stop, or fails by itself."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.cluster.hosted import HostedProcess
from headrace.errors import RankLost

TIMEOUT_S = 20.0


class Serving:
    """Fails when `failing` is set, on whatever thread."""

    http_address = ""

    def __init__(self) -> None:
        self.failing = threading.Event()
        self.stopped = threading.Event()

    async def start(self) -> str:
        return "127.0.0.1:1"

    async def failed(self) -> None:
        await asyncio.to_thread(self.failing.wait, TIMEOUT_S)
        raise RankLost("rank 1 is gone")

    async def stop(self) -> None:
        self.stopped.set()
        self.failing.set()  # lets the thread above end


@pytest.fixture
def serving():
    return Serving()


def test_a_process_that_fails_is_stopped_and_said_to_have_failed(serving):
    told = threading.Event()
    hosted = HostedProcess(lambda report: serving, on_failure=told.set)
    assert hosted.address(TIMEOUT_S) == "127.0.0.1:1"
    assert not told.is_set()
    serving.failing.set()
    assert told.wait(TIMEOUT_S)
    assert serving.stopped.is_set()
    assert hosted.stop(TIMEOUT_S)


def test_a_process_that_is_stopped_has_not_failed(serving):
    hosted = HostedProcess(lambda report: serving, on_failure=lambda: pytest.fail("it did not fail"))
    hosted.address(TIMEOUT_S)
    assert hosted.stop(TIMEOUT_S)
    assert serving.stopped.is_set()
