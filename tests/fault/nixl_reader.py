"""The reading side of tests whose peers die, as a process of its own: what ends it, UCX's assertions included, fails a
test and no more.

The child serves calls by name, in order: each begins before the next one does, and answers when it is done.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from headrace.errors import TransferFailed
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.transfer_thread import Transfer, TransferThread
from kv_transfer.transport import BlockRegion
from tests.support.parts import part

TIMEOUT_S = 30.0


class NixlReader:
    """The test's end. Blocks are named by their ids at both sides."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        arguments = (theirs, dict(os.environ), num_blocks, block_bytes)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._loop = asyncio.get_running_loop()  # of the test under way
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    async def begin(self) -> None:
        """For a test: nobody is connected, all blocks are 0."""
        self._loop = asyncio.get_running_loop()
        await self._call("begin")

    async def connect(self, name: str, metadata: bytes) -> bytes:
        """Returns our metadata."""
        return await self._call("connect", name, metadata)

    async def disconnect(self, name: str) -> None:
        await self._call("disconnect", name)

    async def read(self, name: str, remote: Sequence[int], local: Sequence[int]) -> int:
        """Start a READ. Returns its number."""
        return await self._call("read", name, list(remote), list(local))

    async def done(self, number: int) -> int:
        """The bytes of a READ, once it is over. Raises TransferFailed."""
        return await self._call("done", number)

    async def settled(self, number: int) -> None:
        await self._call("settled", number)

    async def is_under_way(self, number: int) -> bool:
        """Neither done nor settled once the thread has looked at it again and again."""
        return await self._call("is_under_way", number)

    async def clear(self) -> None:
        await self._call("clear")

    async def values(self, local: Sequence[int]) -> set[int]:
        """The least and the greatest byte of these blocks."""
        return await self._call("values", list(local))

    async def metadata(self) -> bytes:
        return await self._call("metadata")

    def kill(self) -> None:
        self._process.kill()
        self._process.join(TIMEOUT_S)
        self._thread.join(TIMEOUT_S)
        self._connection.close()

    async def _call(self, method: str, *arguments: Any) -> Any:
        number, answer = next(self._numbers), self._loop.create_future()
        self._calls[number] = answer
        try:
            self._connection.send((number, method, arguments))
            async with asyncio.timeout(TIMEOUT_S):
                return await answer
        except BrokenPipeError:
            raise self._ended() from None
        finally:
            self._calls.pop(number, None)

    def _receive(self) -> None:
        """On its own thread, until the process is gone."""
        with suppress(EOFError, OSError):
            while True:
                number, result = self._connection.recv()
                self._loop.call_soon_threadsafe(self._answer, number, result)
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._fail_all)

    def _answer(self, number: int, result: Any) -> None:
        answer = self._calls.get(number)
        if answer is None or answer.done():
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def _fail_all(self) -> None:
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(self._ended())

    def _ended(self) -> ConnectionError:
        self._process.join(TIMEOUT_S)
        return ConnectionError(f"the reader's process ended with {self._process.exitcode}")


def _serve(connection: Connection, environment: dict[str, str], num_blocks: int, block_bytes: int) -> None:
    os.environ.update(environment)

    async def main() -> None:
        await _Child(connection, num_blocks, block_bytes).run()

    asyncio.run(main())


class _Child:
    def __init__(self, connection: Connection, num_blocks: int, block_bytes: int) -> None:
        self._connection = connection
        self._blocks = np.zeros((num_blocks, block_bytes), np.uint8)
        region = BlockRegion(self._blocks.ctypes.data, num_blocks, block_bytes)
        self._transfers = TransferThread(lambda: NixlTransport("reader", [region]))
        self._reads: list[Transfer] = []
        self._peers: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        await self._transfers.start()
        with suppress(EOFError):
            while True:
                number, method, arguments = await asyncio.to_thread(self._connection.recv)
                task = asyncio.create_task(self._answer(number, getattr(self, f"on_{method}"), arguments))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        await self._transfers.close()

    async def _answer(self, number: int, method: Any, arguments: tuple[Any, ...]) -> None:
        try:
            result = await method(*arguments)
        except Exception as error:  # noqa: BLE001 - raised where it was called
            result = error if isinstance(error, TransferFailed) else RuntimeError(repr(error))
        self._connection.send((number, result))

    async def on_begin(self) -> None:
        while self._peers:
            await self._transfers.disconnect(self._peers.pop())
        self._blocks[:] = 0

    async def on_connect(self, name: str, metadata: bytes) -> bytes:
        self._peers.add(name)
        await self._transfers.connect(name, [part(metadata, self._blocks.shape[1])], TIMEOUT_S)
        return await self._transfers.metadata()

    async def on_disconnect(self, name: str) -> None:
        await self._transfers.disconnect(name)

    async def on_read(self, name: str, remote: list[int], local: list[int]) -> int:
        self._reads.append(self._transfers.read(name, remote, local))
        return len(self._reads) - 1

    async def on_done(self, number: int) -> int:
        return (await self._reads[number].done).bytes

    async def on_settled(self, number: int) -> None:
        await self._reads[number].settled()

    async def on_is_under_way(self, number: int) -> bool:
        transfer = self._reads[number]
        settled = asyncio.create_task(transfer.settled())
        for _ in range(20):
            await self._transfers.metadata()
        under_way = not (settled.done() or transfer.done.done())
        settled.cancel()
        return under_way

    async def on_clear(self) -> None:
        self._blocks[:] = 0

    async def on_values(self, local: list[int]) -> set[int]:
        blocks = self._blocks[local]
        return {int(blocks.min()), int(blocks.max())}

    async def on_metadata(self) -> bytes:
        return await self._transfers.metadata()
