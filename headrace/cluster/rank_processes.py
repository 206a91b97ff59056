"""Rank 0's side of the processes of a worker's other ranks: started on this machine, met, ended with it."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from headrace.cluster.rank import Job
from headrace.config import Settings
from headrace.engine.parallel.group import Group, GroupBroken, open_store
from headrace.engine.parallel.link import Failure, Link, LinkClosed, unpack_reply
from headrace.engine.parallel.ranks import Rank, Ranks, blamed
from headrace.engine.shard import Shard
from headrace.errors import RankLost

log = structlog.get_logger()

_START_TIMEOUT_S = 120.0  # for loading their shards, once rank 0 has loaded its own
_END_TIMEOUT_S = 8.0


class RankProcess:
    """One of them, and what leads to it."""

    def __init__(self, job: Job) -> None:
        self.number = job.rank
        steps, their_steps = socket.socketpair()
        self.control, their_control = socket.socketpair()
        self.link = Link(steps)
        fds = their_steps.fileno(), their_control.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace.cluster.rank_process", *map(str, fds)],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
        )
        their_steps.close()
        their_control.close()
        with suppress(LinkClosed):  # `wait` says why
            self.link.send(job.pack())

    def wait(self, deadline: float) -> None:
        """For its word that it has done the next thing of its start. Raises RankLost."""
        try:
            reply = unpack_reply(self.link.receive(max(0.01, deadline - time.monotonic())))
        except LinkClosed:
            raise RankLost(f"rank {self.number} {self.ended(1.0) or 'is gone'} while it started") from None
        except TimeoutError:
            raise RankLost(f"rank {self.number} did not start in time") from None
        if isinstance(reply, Failure):
            raise RankLost(f"rank {self.number} failed to start: {reply.text}")

    def ended(self, timeout_s: float) -> str | None:
        """How, if it does within that time."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        if status < 0:
            return f"was killed by signal {-status} ({signal.Signals(-status).name})"
        return f"ended with status {status}"

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """It ends when its connections do, or by force."""
        self.link.close()
        self.control.close()
        if self.ended(_END_TIMEOUT_S) is None:
            log.warning("rank did not end, killing it", rank=self.number)
            self.kill()
            self._process.wait()


class RankProcesses:
    """Ranks 1 .. n-1 of one worker."""

    def __init__(
        self, settings: Settings, worker_id: str, incarnation: str, log_file: Path | None = None
    ) -> None:
        """Starts them; they load their shards meanwhile."""
        self.size = settings.engine.tensor_parallel_size
        self._timeout_s = settings.engine.rank_timeout_s
        self.each: list[RankProcess] = []
        for rank in range(1, self.size):
            job = Job(rank, self.size, worker_id, incarnation, settings, log_file)
            self.each.append(RankProcess(job))

    def meet(self, vocab_size: int, on_lost: Callable[[RankLost], None]) -> Ranks:
        """Once this process has loaded its own shard. Raises RankLost, and leaves no rank."""
        try:
            return self._meet(vocab_size, on_lost)
        except BaseException:
            self.kill()
            raise

    def _meet(self, vocab_size: int, on_lost: Callable[[RankLost], None]) -> Ranks:
        deadline = time.monotonic() + _START_TIMEOUT_S
        for process in self.each:
            process.wait(deadline)
        others = [Rank(process.number, process.link, process.ended) for process in self.each]
        try:
            store = open_store(self._timeout_s)
            for rank in others:
                rank.link.send(store.port.to_bytes(4, "little"), self._timeout_s)
            group = Group(store, Shard(0, self.size), vocab_size, self._timeout_s)
        except (GroupBroken, LinkClosed, TimeoutError) as error:
            raise blamed(others, error, self._timeout_s) from None
        deadline = time.monotonic() + self._timeout_s
        for process in self.each:
            process.wait(deadline)
        return Ranks(others, group, self._timeout_s, on_lost)

    def kill(self) -> None:
        """When one is lost, what the others do is of no use any more."""
        for process in self.each:
            process.kill()

    async def close(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(process.close) for process in self.each))
