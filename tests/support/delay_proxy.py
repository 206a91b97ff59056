"""A way that takes time: TCP connections through this process, each byte handed on a while after it came."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CHUNK_BYTES = 64 << 10
_MAX_CHUNKS = 256  # under way, each way of a connection


@contextmanager
def delayed(listen: tuple[str, int], target: tuple[str, int], delay_s: float) -> Iterator[None]:
    """Until the block ends, connections to `listen` lead to `target`, with `delay_s` each way."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    proxy = _Proxy(target, delay_s)
    try:
        asyncio.run_coroutine_threadsafe(proxy.start(listen), loop).result(10)
        yield
    finally:
        asyncio.run_coroutine_threadsafe(proxy.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


class _Proxy:
    def __init__(self, target: tuple[str, int], delay_s: float) -> None:
        self._target = target
        self._delay_s = delay_s
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, listen: tuple[str, int]) -> None:
        self._server = await asyncio.start_server(self._accept, *listen)

    async def close(self) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.sleep(self._delay_s)
            there, back = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        ways = [asyncio.create_task(self._one_way(*way)) for way in ((reader, back), (there, writer))]
        try:
            await asyncio.gather(*ways)
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, back):
                end.transport.abort()

    async def _one_way(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_CHUNKS)
        delivery = asyncio.create_task(_deliver(under_way, sink))
        try:
            data = b"-"
            while data:
                data = await source.read(_CHUNK_BYTES)
                await under_way.put((loop.time() + self._delay_s, data))
            await delivery
        except ConnectionError:
            sink.transport.abort()
        finally:
            delivery.cancel()


async def _deliver(under_way: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
    """Each chunk at its time; an empty one is the end."""
    loop = asyncio.get_running_loop()
    with suppress(ConnectionError):
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                sink.write_eof()
                return
            sink.write(data)
            await sink.drain()
