"""The transport of a rank in another process on this machine: asked for by rank 0, over a socket.

    rank 0: RemoteRank ── [id, method, arguments] ──▶ rank n: serve ─▶ its own TransferThread
                       ◀── [id, result, error] ──

Messages are JSON with their length before them. Bytes of blocks do not come this way.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import Any

import structlog

from headrace.errors import HeadraceError, TransferFailed
from kv_transfer.slices import Slice
from kv_transfer.transfer_thread import Probe, Transfer, TransferStats, TransferThread
from kv_transfer.transport import Part

log = structlog.get_logger()

_LENGTH = struct.Struct("<I")
_CALL_TIMEOUT_S = 30.0  # as within one process

Checksums = Callable[[list[int]], list[int]]


class RemoteRank:
    """Implements `RankTransfers`. Used on the event loop that it was opened on."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_gone: Callable[[], None]
    ) -> None:
        self._writer = writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reads: set[asyncio.Task[None]] = set()
        self._gone = False
        self._receiving = asyncio.create_task(self._receive(reader, on_gone))

    @classmethod
    async def open(cls, connection: socket.socket, on_gone: Callable[[], None]) -> RemoteRank:
        """`on_gone()` is called when the rank's process is no more, unless this is closed before."""
        reader, writer = await asyncio.open_connection(sock=connection)
        return cls(reader, writer, on_gone)

    async def close(self) -> None:
        """The rank ends by this."""
        self._receiving.cancel()
        await asyncio.gather(self._receiving, return_exceptions=True)
        self._give_up()
        await asyncio.gather(*self._reads, return_exceptions=True)
        await _closed(self._writer)

    async def metadata(self) -> bytes:
        return bytes.fromhex(await self._call("metadata"))

    async def connect(self, peer: str, parts: Sequence[Part], timeout_s: float) -> None:
        described = [(part.metadata.hex(), astuple(part.slice)) for part in parts]
        await self._call("connect", peer, described, timeout_s)

    async def probe(self, peer: str) -> Probe:
        return Probe(*await self._call("probe", peer))

    async def disconnect(self, peer: str) -> None:
        await self._call("disconnect", peer)

    def read(self, peer: str, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> Transfer:
        transfer = Transfer(peer, remote_block_ids, local_block_ids)
        task = asyncio.create_task(self._follow(transfer))
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)
        return transfer

    def serve_for(self, seconds: float) -> None:
        if not self._gone:
            _send(self._writer, [0, "serve_for", seconds])

    async def checksums(self, block_ids: list[int]) -> list[int]:
        return await self._call("checksums", block_ids)

    async def _follow(self, transfer: Transfer) -> None:
        """However long it takes: a READ is over when the rank says so, or is no more."""
        arguments = transfer.peer, transfer.remote_block_ids, transfer.local_block_ids
        try:
            transfer.finish(TransferStats(*await self._call("read", *arguments, timeout_s=None)))
        except HeadraceError as error:
            transfer.finish(error)

    async def _call(self, method: str, *arguments: Any, timeout_s: float | None = _CALL_TIMEOUT_S) -> Any:
        """Raises TransferFailed."""
        if self._gone:
            raise TransferFailed("a rank of this worker is gone")
        number = next(self._ids)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        _send(self._writer, [number, method, *arguments])
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise TransferFailed(
                f"a rank of this worker did not answer {method} within {timeout_s:g} s"
            ) from None
        finally:
            self._waiting.pop(number, None)

    async def _receive(self, reader: asyncio.StreamReader, on_gone: Callable[[], None]) -> None:
        while (message := await _received(reader)) is not None:
            number, result, error = message
            answer = self._waiting.get(number)
            if answer is None or answer.done():
                continue
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(TransferFailed(error))
        self._give_up()
        on_gone()

    def _give_up(self) -> None:
        self._gone = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(TransferFailed("a rank of this worker is gone"))


async def serve(connection: socket.socket, transfers: TransferThread, checksums: Checksums) -> None:
    """At the rank: do what rank 0 asks, until it is gone."""
    reader, writer = await asyncio.open_connection(sock=connection)
    methods = _methods(transfers, checksums)
    tasks: set[asyncio.Task[None]] = set()
    try:
        while (message := await _received(reader)) is not None:
            number, method, *arguments = message
            if method == "serve_for":
                transfers.serve_for(*arguments)
                continue
            task = asyncio.create_task(_answer(writer, number, methods[method](*arguments)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await _closed(writer)


def _methods(transfers: TransferThread, checksums: Checksums) -> dict[str, Callable[..., Awaitable[Any]]]:
    async def metadata() -> str:
        return (await transfers.metadata()).hex()

    async def connect(peer: str, parts: list[tuple[str, list[int]]], timeout_s: float) -> None:
        described = [Part(bytes.fromhex(text), Slice(*piece)) for text, piece in parts]
        await transfers.connect(peer, described, timeout_s)

    async def probe(peer: str) -> tuple[float, ...]:
        return astuple(await transfers.probe(peer))

    async def read(peer: str, remote: list[int], local: list[int]) -> tuple[float, ...]:
        transfer = transfers.read(peer, remote, local)
        await transfer.settled()
        return astuple(await transfer.done)

    async def sums(block_ids: list[int]) -> list[int]:
        return await asyncio.to_thread(checksums, block_ids)

    return {
        "metadata": metadata,
        "connect": connect,
        "probe": probe,
        "disconnect": transfers.disconnect,
        "read": read,
        "checksums": sums,
    }


async def _answer(writer: asyncio.StreamWriter, number: int, work: Awaitable[Any]) -> None:
    try:
        _send(writer, [number, await work, None])
    except HeadraceError as error:
        _send(writer, [number, None, str(error)])
    except Exception as error:  # whoever asked is told
        log.exception("a call of rank 0 failed")
        _send(writer, [number, None, f"unexpected: {error!r}"])


def _send(writer: asyncio.StreamWriter, message: list[Any]) -> None:
    data = json.dumps(message).encode()
    writer.write(_LENGTH.pack(len(data)) + data)


async def _received(reader: asyncio.StreamReader) -> Any:
    """The next message; None at the end."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return json.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
