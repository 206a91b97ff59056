"""What this process knows of the fleet: live workers, and who holds which block. The watcher writes, dispatch reads.

A worker id stands for one incarnation at a time; with the incarnation go its blocks. Everything here is
synchronous and runs on one event loop, so a reader never sees half a change.

`match` is the reader's question. It knows what workers have reported (`index`), and what they were sent a moment ago
and can not have reported yet (`assume`). `loads_of_others` is what workers have reported of other routers' requests;
its own the reader knows better.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.clock import Clock, SystemClock
from headrace.directory.assumed import DEFAULT_TTL_S, AssumedContent
from headrace.directory.base import BlockSnapshot
from headrace.directory.prefix_index import DEFAULT_MAX_BLOCKS, Matches, PrefixIndex
from headrace.directory.records import DirectoryEvent, RouterShare, WorkerRecord


class DirectoryView:
    """`workers` is by worker id. Readers change neither `workers` nor `index`."""

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        max_index_blocks: int = DEFAULT_MAX_BLOCKS,
        assumed_ttl_s: float = DEFAULT_TTL_S,
        router_id: str = "",
    ) -> None:
        """`router_id`: the reader's own, in the loads that workers report."""
        self.router_id = router_id
        self.workers: dict[str, WorkerRecord] = {}
        self.index = PrefixIndex(max_index_blocks)
        self.version = 0  # of `workers`
        self._others = np.zeros((0, 3), np.int64)  # by place: sequences, tokens, pending tokens
        self.num_gaps = 0  # times that an event was missing
        self.report_age_s = (
            0.0  # how old what workers report is by the time it is here, as the writer found it last
        )
        self._clock = clock or SystemClock()
        self._assumed = AssumedContent(assumed_ttl_s, self._clock)
        self._sequences: dict[str, int] = {}  # by worker id: the last event that the index holds
        self._gone_at: dict[tuple[str, str], float] = {}  # (worker id, incarnation) that somebody found dead

    def match(self, hashes: Sequence[bytes]) -> Matches:
        """How much of the prompt each worker holds, or is assumed to."""
        matches = self.index.match(hashes)
        for (worker_id, incarnation), length in self._assumed.runs(hashes).items():
            if self.has(worker_id, incarnation):
                matches.assume(worker_id, length)
        return matches

    def loads_of_others(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Other routers' sequences, tokens in their contexts and pending prompt tokens, [3, n], of the workers at these
        places of the index.
        """
        return self._others.take(places, axis=0).T

    def assume(self, worker_id: str, incarnation: str, hashes: Sequence[bytes]) -> None:
        """The worker is being sent a prompt with these blocks: `match` counts them until they can be in the index."""
        self._assumed.add((worker_id, incarnation), hashes)

    def forget_assumed(self, worker_id: str, incarnation: str, hashes: Sequence[bytes]) -> None:
        """The prompt did not get there. What other prompts of the same beginning brought is forgotten with it."""
        self._assumed.remove((worker_id, incarnation), hashes)

    @property
    def num_assumed_blocks(self) -> int:
        return len(self._assumed)

    def mark_gone(self, worker_id: str, incarnation: str) -> None:
        """Somebody could not reach this incarnation: it vanishes now, however fresh its record is.

        `is_gone` tells how it can come back. Another incarnation of the same worker id is not touched.
        """
        self._gone_at[worker_id, incarnation] = self._clock.now()
        self.drop(worker_id, incarnation)

    def is_gone(self, worker_id: str, incarnation: str, for_s: float) -> bool:
        """Whether this incarnation was marked gone less than `for_s` ago.

        A dead worker's record has expired by then. One that still refreshes it was out of reach for a moment:
        it is taken back.
        """
        now = self._clock.now()
        self._gone_at = {key: at for key, at in self._gone_at.items() if now - at < for_s}
        return (worker_id, incarnation) in self._gone_at

    def admit(self, record: WorkerRecord) -> None:
        """A new or refreshed record. Blocks of an earlier incarnation are forgotten."""
        known = self.workers.get(record.worker_id)
        if known is not None and known.incarnation != record.incarnation:
            self.drop(known.worker_id, known.incarnation)
        self.workers[record.worker_id] = record
        self._hear(record.worker_id, record.load.shares)
        self.version += 1

    def drop(self, worker_id: str, incarnation: str) -> None:
        """Forget the worker, if it is still this incarnation."""
        if self.has(worker_id, incarnation):
            del self.workers[worker_id]
            self.version += 1
            self._hear(worker_id, ())
            self._sequences.pop(worker_id, None)
            self.index.forget(worker_id)
            self._assumed.drop((worker_id, incarnation))

    def has(self, worker_id: str, incarnation: str) -> bool:
        known = self.workers.get(worker_id)
        return known is not None and known.incarnation == incarnation

    def sequence(self, worker_id: str) -> int | None:
        """The worker's last event that the index holds; None while its blocks were not loaded."""
        return self._sequences.get(worker_id)

    def load(self, worker_id: str, incarnation: str, snapshot: BlockSnapshot) -> None:
        """The worker holds exactly the snapshot's blocks. Ignored if it is another incarnation by now."""
        if self.has(worker_id, incarnation):
            self._sequences[worker_id] = snapshot.sequence
            self.index.replace(worker_id, snapshot.blocks)

    def apply(self, event: DirectoryEvent) -> bool:
        """A CHANGED event of an incarnation in the view. Returns False if one before it is missing: load its blocks.

        An event that a snapshot already held is passed over.
        """
        assert self.has(event.worker_id, event.incarnation)
        sequence = self._sequences.get(event.worker_id)
        if sequence is None or event.sequence > sequence + 1:
            self.num_gaps += 1
            return False
        if event.sequence == sequence + 1:
            self._sequences[event.worker_id] = event.sequence
            if event.shares is not None:
                self._hear(event.worker_id, event.shares)
            self.index.store(event.worker_id, event.stored)
            self.index.remove(event.worker_id, event.removed)
            self._assumed.remove((event.worker_id, event.incarnation), event.removed)
        return True

    def _hear(self, worker_id: str, shares: Iterable[RouterShare]) -> None:
        place = self.index.place(worker_id)
        if place >= len(self._others):
            more = np.zeros((place + 1, 3), np.int64)
            self._others = np.concatenate((self._others, more))
        others = [share for share in shares if share.router_id != self.router_id]
        self._others[place] = (
            sum(share.num_sequences for share in others),
            sum(share.num_tokens for share in others),
            sum(share.num_pending_tokens for share in others),
        )
