"""What a router process has for itself, as the real one puts it together, and what reaches it of the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from headrace.clock import Clock
from headrace.directory.base import BlockSnapshot
from headrace.directory.records import DirectoryEvent, WorkerRecord
from headrace.directory.view import DirectoryView
from router.costs import FleetCosts
from router.fleet import Fleet
from router.ledger import Ledger
from router.policy.views import ClusterView, Plan, Pool, WorkerView

MODEL = "simulated"


class SimulatedRouter:
    def __init__(
        self, name: str, records: Sequence[WorkerRecord], clock: Clock, assumed_ttl_s: float, *, locals_: bool
    ) -> None:
        """`locals_`: decode workers may compute prompts themselves."""
        self.name = name
        self.view = DirectoryView(clock, router_id=name, assumed_ttl_s=assumed_ttl_s)
        self.ledger = Ledger(clock)
        self.costs = FleetCosts(clock)
        for record in records:
            self.view.admit(record)
            self.view.load(record.worker_id, record.incarnation, BlockSnapshot(1, {}))
        self._fleet = Fleet(self.view, MODEL, self.ledger)
        self._locals = locals_

    def cluster(self, hashes: Sequence[bytes]) -> ClusterView:
        """As this router sees it for a prompt of these blocks."""
        matches = self.view.match(hashes)
        cluster = self._fleet.cluster(matches, self.costs, frozenset(), frozenset())
        assert cluster is not None
        if len(cluster.prefill) and not self._locals:
            return replace(cluster, decode=_decoding_only(cluster.decode))
        return cluster

    def assume(self, plan: Plan, hashes: Sequence[bytes]) -> None:
        for worker in (*plan.prefill[:1], plan.decode):
            self.view.assume(worker.worker_id, worker.incarnation, hashes)

    def hear(self, event: DirectoryEvent, snapshot: Callable[[], BlockSnapshot], age_s: float) -> None:
        """With a gap before it, the worker's whole set is read."""
        self.view.report_age_s = age_s
        if not self.view.apply(event):
            self.view.load(event.worker_id, event.incarnation, snapshot())


def _decoding_only(pool: Pool) -> Pool:
    """Workers that compute no prompts: they would take for ever."""

    def make(number: int) -> WorkerView:
        return replace(pool[number], queue_s=float("inf"))

    columns = pool.columns
    columns.queue_s = np.full(len(pool), np.inf)
    return Pool(columns, make)
