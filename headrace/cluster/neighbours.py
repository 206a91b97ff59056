"""The other workers of the fleet: connections to them before the first request needs one, and a home for what is cached
here when this worker ends.

Reads the directory every few seconds. A layout that does not fit shows here, before any request is paired: in
`Status`, in the metrics, and as the health of the service KvExchange.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from headrace.clock import Deadline
from headrace.directory.base import Directory
from headrace.directory.records import Role, WorkerRecord
from headrace.engine.block_pool import NamedBlock
from headrace.errors import HeadraceError, Unavailable
from headrace.rpc.status import errors_of
from headrace.rpc.v1 import kv_pb2, worker_pb2
from kv_transfer.metrics import KvMetrics
from kv_transfer.peers import Peers

log = structlog.get_logger()

# Ahead of need; each costs a few megabytes. Further ones are connected when a request needs them.
_MAX_CONNECTED = 64
_MEASURE_EVERY = 4  # looks around: what was not read from for so long
_OFFER_BLOCKS = 256  # at a time, so that no lease is long and the end of the drain time loses little
_MAX_SHARE = 8  # a neighbour gives up 1 / this of its pool for what is offered, where less is free


class Neighbours:
    """`run` until cancelled. Used on the event loop."""

    def __init__(
        self,
        directory: Directory,
        peers: Peers,
        metrics: KvMetrics,
        role: Callable[[], Role],
        set_exchange_ready: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._directory = directory
        self._peers = peers
        self._metrics = metrics
        self._role = role
        self._set_exchange_ready = set_exchange_ready
        self._ready = True

    async def run(self, interval_s: float) -> None:
        while True:
            try:
                await self._look_around()
                await self._peers.measure_unused(_MEASURE_EVERY * interval_s)
            except Unavailable as error:  # the directory: what is connected stays connected
                log.debug("neighbours not read", error=str(error))
            except Exception:  # one round; the next one may find others
                log.exception("neighbours not connected")
            await asyncio.sleep(interval_s)

    async def _look_around(self) -> None:
        others = await self.others()
        likely = [record for record in others if self._is_likely(record)][:_MAX_CONNECTED]
        await asyncio.gather(*(self._connect(record) for record in likely))
        refused = self._peers.refusals
        self._metrics.refused_peers.clear()
        for mismatch in refused.values():
            self._metrics.refused_peers.labels(mismatch.field).inc()
        ready = not likely or any(record.worker_id not in refused for record in likely)
        if ready != self._ready:
            self._ready = ready
            await self._set_exchange_ready(ready)
            log.warning("exchange with other workers", possible=ready, refused=sorted(refused))

    async def evacuate(
        self, hottest: Callable[[int], Awaitable[list[NamedBlock]]], deadline: Deadline
    ) -> None:
        """Offer what is cached here to the neighbour with most room, until it is there or the deadline."""
        try:
            others = [record for record in await self.others() if not record.draining]
        except Unavailable as error:
            log.warning("nobody to leave cached blocks to", error=str(error))
            return
        others.sort(key=lambda record: record.load.free_blocks, reverse=True)
        for record in others:
            if record.worker_id in self._peers.refusals:
                continue
            room = max(record.load.free_blocks, record.num_blocks // _MAX_SHARE)
            try:
                await self._offer(record, await hottest(room), deadline)
                return
            except HeadraceError as error:
                log.warning("cached blocks not taken", neighbour=record.worker_id, error=str(error))

    async def _offer(self, record: WorkerRecord, blocks: list[NamedBlock], deadline: Deadline) -> None:
        peer = await self._peers.connect(_ref(record))
        num_there = 0
        for start in range(0, len(blocks), _OFFER_BLOCKS):
            timeout_s = deadline.remaining_s()
            if timeout_s <= 0:
                break
            some = blocks[start : start + _OFFER_BLOCKS]
            request = kv_pb2.OfferRequest(
                owner=self._peers.own,
                expected_incarnation=record.incarnation,
                blocks=[
                    kv_pb2.NamedBlock(digest=block.digest, parent_digest=block.parent_digest)
                    for block in some
                ],
                timeout_s=timeout_s,
            )
            with errors_of(record.worker_id):
                response = await peer.stub.Offer(request, timeout=timeout_s)
            num_there += response.num_present
            if response.num_present < len(some):
                break  # it has no more room
        log.info("cached blocks left to a neighbour", neighbour=record.worker_id, blocks=num_there)

    async def others(self) -> list[WorkerRecord]:
        """Workers that serve what this one serves. Raises Unavailable."""
        records = await self._directory.workers()
        await self._peers.forget_absent({record.worker_id for record in records})
        return [
            record
            for record in records
            if record.worker_id != self._peers.own.worker_id
            and record.model_fingerprint == self._peers.layout.model_fingerprint
        ]

    def _is_likely(self, record: WorkerRecord) -> bool:
        """Whether this worker will read from it: prompts from prefill workers, prefixes from everybody."""
        return self._role() != Role.DECODE or record.role != Role.DECODE

    async def _connect(self, record: WorkerRecord) -> None:
        try:
            await self._peers.connect(_ref(record))
        except HeadraceError as error:
            log.debug("neighbour not connected", neighbour=record.worker_id, error=str(error))


def _ref(record: WorkerRecord) -> worker_pb2.PeerRef:
    return worker_pb2.PeerRef(
        worker_id=record.worker_id, address=record.address, incarnation=record.incarnation
    )
