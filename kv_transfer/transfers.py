"""READs of a worker's ranks, as if it were one: each rank reads its own slices into its own memory, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from headrace.errors import HeadraceError
from kv_transfer.rate import Rate
from kv_transfer.transfer_thread import Probe, Transfer, TransferStats, TransferThread
from kv_transfer.transport import Part


class RankTransfers(Protocol):
    """One rank's transport, used on the event loop: a `TransferThread` here, or one in another process."""

    async def metadata(self) -> bytes: ...

    async def connect(self, peer: str, parts: Sequence[Part], timeout_s: float) -> None:
        """Raises TransferFailed."""
        ...

    async def probe(self, peer: str) -> Probe: ...

    async def disconnect(self, peer: str) -> None: ...

    def read(
        self, peer: str, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]
    ) -> Transfer: ...

    def serve_for(self, seconds: float) -> None: ...


class Transfers:
    """All ranks of this worker. Used on one event loop."""

    def __init__(self, own: TransferThread, others: Sequence[RankTransfers] = ()) -> None:
        self._own = own
        self._ranks: list[RankTransfers] = [own, *others]
        self._rates: dict[str, Rate] = {}  # of several ranks together
        self._reading: set[asyncio.Task[None]] = set()

    async def metadata(self) -> list[bytes]:
        """By rank."""
        return list(await asyncio.gather(*(rank.metadata() for rank in self._ranks)))

    async def connect(self, peer: str, parts: Sequence[Sequence[Part]], timeout_s: float) -> None:
        """`parts`: by rank of ours. Raises TransferFailed."""
        each = zip(self._ranks, parts, strict=True)
        await asyncio.gather(*(rank.connect(peer, its, timeout_s) for rank, its in each))
        self._rates.setdefault(peer, Rate())

    async def probe(self, peer: str) -> Probe:
        """Of all ranks at once; the slowest counts. As `TransferThread.probe`."""
        probes = await asyncio.gather(*(rank.probe(peer) for rank in self._ranks))
        latency_s = max(probe.latency_s for probe in probes)
        num_bytes = sum(probe.bytes_per_s * probe.latency_s for probe in probes)
        self._note(peer, TransferStats(round(num_bytes), latency_s))
        return Probe(max(probe.first_s for probe in probes), latency_s, num_bytes / latency_s)

    def unused_s(self, peer: str) -> float:
        """As `TransferThread.unused_s`: every READ is one of this process's rank, too."""
        return self._own.unused_s(peer)

    async def measure(self, peer: str) -> TransferStats:
        """As `TransferThread.measure`. This process's rank stands for the others: they have the same way."""
        stats = await self._own.measure(peer)
        return TransferStats(stats.bytes * len(self._ranks), stats.seconds)

    async def disconnect(self, peer: str) -> None:
        """All READs from the peer are over afterwards. Nothing for an unknown peer."""
        self._rates.pop(peer, None)
        await asyncio.gather(*(rank.disconnect(peer) for rank in self._ranks))

    def bytes_per_s(self, peer: str) -> float:
        """Of READs from it since it was connected, probes included; 0 while there were none."""
        if len(self._ranks) == 1:
            return self._own.bytes_per_s(peer)
        rate = self._rates.get(peer)
        return rate.bytes_per_s if rate is not None else 0.0

    def read(self, peer: str, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> Transfer:
        """Start a READ of equally many blocks."""
        parts = [rank.read(peer, remote_block_ids, local_block_ids) for rank in self._ranks]
        if len(parts) == 1:
            return parts[0]
        whole = Transfer(peer, remote_block_ids, local_block_ids)
        task = asyncio.create_task(self._follow(whole, parts))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)
        return whole

    def serve_for(self, seconds: float) -> None:
        """A peer may read from us within that time: look after it often."""
        for rank in self._ranks:
            rank.serve_for(seconds)

    async def _follow(self, whole: Transfer, parts: list[Transfer]) -> None:
        """It is done when all parts are, has failed when one has, and is over when all are."""
        found: list[TransferStats | HeadraceError] = []
        for ended in asyncio.as_completed([_result(part) for part in parts]):
            result = await ended
            found.append(result)
            if isinstance(result, HeadraceError):
                whole.fail(result)
        stats = [each for each in found if isinstance(each, TransferStats)]
        if len(stats) < len(parts):
            whole.finish(next(each for each in found if isinstance(each, HeadraceError)))
            return
        total = TransferStats(sum(each.bytes for each in stats), max(each.seconds for each in stats))
        self._note(whole.peer, total)
        whole.finish(total)

    def _note(self, peer: str, stats: TransferStats) -> None:
        if (rate := self._rates.get(peer)) is not None:
            rate.add(stats.bytes, stats.seconds)


async def _result(part: Transfer) -> TransferStats | HeadraceError:
    """Once it is over."""
    await part.settled()
    try:
        return await part.done
    except HeadraceError as error:
        return error
