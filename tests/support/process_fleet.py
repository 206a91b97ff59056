"""Worker processes that can be killed, stopped and started again at the same address. NIXL between them.

Each has a port of its own that it keeps over its lives, as a pod behind a stable name does.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import grpc

from headrace.config import Settings
from tests.support.fleet import ServingWorker
from tests.support.processes import START_TIMEOUT_S, STOP_TIMEOUT_S, free_port


class ProcessWorker(ServingWorker):
    """One worker id, over several lives of its process."""

    idle_timeout_s = 60.0

    def __init__(self, settings: Settings, role: str, worker_id: str, folder: Path, **faults) -> None:
        port = free_port()
        super().__init__(worker_id, f"127.0.0.1:{port}")
        rpc = settings.rpc.model_copy(update={"port": port})
        self._arguments = [
            role,
            worker_id,
            settings.model_copy(update={"rpc": rpc}).model_dump_json(),
            json.dumps(faults),
        ]
        self.log = folder / f"{worker_id}.log"
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def is_alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def status_code(self) -> int | None:
        """Of its last life, once that is over."""
        return None if self._popen is None else self._popen.poll()

    async def start(self) -> None:
        """Returns once it answers."""
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(  # noqa: ASYNC220 - its output is a file
                [sys.executable, "-m", "tests.support.worker_main", *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                assert self.is_alive, f"{self.worker_id} ended: {self.log.read_text()[-3000:]}"
                with suppress(grpc.aio.AioRpcError):
                    self.incarnation = (await self.status()).incarnation
                    return
                await asyncio.sleep(0.1)

    def kill(self) -> None:
        self._send(signal.SIGKILL)
        if self._popen is not None:
            self._popen.wait()

    def pause(self) -> None:
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        self._send(signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that takes too long."""
        if self._popen is None:
            return
        self.go_on()
        self._send(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(STOP_TIMEOUT_S)
        self.kill()

    def _send(self, signum: signal.Signals) -> None:
        if self.is_alive:
            assert self._popen is not None
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signum)
