"""From the directory's view and the ledger to what a policy sees, without looking at each worker for each request.

records ── when one changes ──▶ Fleet: who can work with whom, and where in the tables
+ matches, ledger, costs ── each request, by column ──▶ ClusterView; the view of a worker when it is asked for
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

import numpy as np
from numpy.typing import NDArray

from headrace.directory.prefix_index import Matches
from headrace.directory.records import Role, WorkerRecord
from headrace.directory.view import DirectoryView
from router.costs import FleetCosts, WorkerCosts
from router.ledger import Figures, Ledger
from router.policy.views import MAX_SOURCES, ClusterView, Columns, Floats, Pool, WorkerView, cost_row

_Indices = NDArray[np.int64]

_MAX_HOLDERS = 1 + MAX_SOURCES  # the one that prefills may be among them


class Fleet:
    """Workers of one model that can exchange blocks: of all layouts the one that most have. Good for one `version` of
    the view.
    """

    def __init__(self, view: DirectoryView, model_fingerprint: str, ledger: Ledger) -> None:
        self.version = view.version
        self.records = [r for r in view.workers.values() if r.model_fingerprint == model_fingerprint]
        layouts = Counter(_layout(record) for record in self.records if not record.draining)
        layout = layouts.most_common(1)[0][0] if layouts else None
        self.peers = [record for record in self.records if _layout(record) == layout]
        self.places = np.array([view.index.place(record.worker_id) for record in self.peers], np.int64)
        self.capacities = np.array([r.num_blocks * r.block_size_tokens for r in self.peers], np.float64)
        kinds = {record.kind: record for record in self.peers}
        numbers = {kind: number for number, kind in enumerate(kinds)}
        self.kinds = list(kinds.values())
        self.kind_of = np.array([numbers[record.kind] for record in self.peers], np.int64)
        self.decodes = np.array([record.role != Role.PREFILL for record in self.peers], np.bool_)
        self._view = view
        self._ledger = ledger
        self._rows = ledger.rows(record.incarnation for record in self.peers)
        self._token_bytes = max((r.block_bytes / r.block_size_tokens for r in self.peers), default=0.0)
        self._prefill = self._serving(Role.PREFILL)
        self._decode = self._serving(Role.DECODE, Role.BOTH)

    def cluster(
        self, matches: Matches, costs: FleetCosts, set_aside: Set[str], failed: Set[str]
    ) -> ClusterView | None:
        """None if there is no decode worker. `set_aside`, by incarnation: no candidates. Those that have `failed` this
        request do not decode while there is another.
        """
        decode = self._without(self._decode, set_aside)
        if not len(decode):
            return None
        preferred = self._without(decode, failed)
        others = self._view.loads_of_others(self.places)
        moment = _Moment(self, matches, self._ledger.figures(self._rows), others, costs)
        return ClusterView(
            prefill=moment.pool(self._without(self._prefill, set_aside)),
            decode=moment.pool(preferred if len(preferred) else decode),
            holders=moment.holders(),
            token_bytes=self._token_bytes,
            transfer=costs.transfer,
        )

    def smallest_capacity_tokens(self, set_aside: Set[str]) -> int:
        """0: there is no decode worker."""
        decode = self._without(self._decode, set_aside)
        if not len(decode):
            return 0
        serving = np.concatenate((decode, self._without(self._prefill, set_aside)))
        return int(self.capacities[serving].min())

    def _serving(self, *roles: Role) -> _Indices:
        indices = [n for n, r in enumerate(self.peers) if r.role in roles and not r.draining]
        return np.array(indices, np.int64)

    def _without(self, indices: _Indices, incarnations: Set[str]) -> _Indices:
        if not incarnations:
            return indices
        return np.array([n for n in indices if self.peers[n].incarnation not in incarnations], np.int64)


class _Moment:
    """All workers of a fleet as they are for one request."""

    def __init__(
        self,
        fleet: Fleet,
        matches: Matches,
        own: Figures,
        others: NDArray[np.int64],
        costs: FleetCosts,
    ) -> None:
        """`others`: sequences, tokens and pending tokens of other routers."""
        block_size = fleet.peers[0].block_size_tokens
        sequences, tokens, pending = others
        self._fleet = fleet
        self._costs: list[WorkerCosts] = [costs.of(record) for record in fleet.kinds]
        self._cost_rows = np.array([cost_row(each) for each in self._costs]).T
        self._reported = matches.num_reported_blocks.take(fleet.places) * block_size
        self._table = np.array(
            (
                matches.num_blocks.take(fleet.places) * block_size,
                own.queue_s + self._queue_s(sequences, pending),
                own.active_sequences + sequences,
                own.active_tokens + tokens,
                fleet.capacities,
                self._reported,
                own.pending_prefill_tokens + pending,
                own.num_requests + sequences,
            ),
            np.float64,
        )

    def _queue_s(self, num_sequences: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> Floats:
        """Of prompts of which only the sum is known. One, as far as that tells, where there are decodes among them."""
        if not num_tokens.any():
            return np.zeros(len(num_tokens))
        base_s, token_s, attention_s = self._cost_rows[:3].take(self._fleet.kind_of, axis=1)
        num_prompts = np.maximum(1, np.where(self._fleet.decodes, 1, num_sequences))
        each_s = token_s * num_tokens + attention_s * num_tokens * num_tokens / (2 * num_prompts)
        return np.where(num_tokens > 0, base_s * num_prompts + each_s, 0.0)

    def pool(self, indices: _Indices) -> Pool:
        costs = self._cost_rows
        if len(self._costs) > 1:
            costs = costs.take(self._fleet.kind_of.take(indices), axis=1)
        columns = Columns(self._table[: Columns.NUM_LOADS].take(indices, axis=1), costs)
        return Pool(columns, lambda number: self._view(int(indices[number])))

    def holders(self) -> tuple[WorkerView, ...]:
        """Draining ones are among them: their blocks are to be had until they end."""
        (held,) = self._reported.nonzero()
        if len(held) > _MAX_HOLDERS:
            held = held[np.argpartition(self._reported[held], -_MAX_HOLDERS)[-_MAX_HOLDERS:]]
        views = [self._view(index) for index in held.tolist()]
        return tuple(sorted(views, key=lambda view: view.reported_tokens, reverse=True))

    def _view(self, index: int) -> WorkerView:
        record = self._fleet.peers[index]
        cached, queue_s, sequences, tokens, capacity, reported, pending, requests = self._table[
            :, index
        ].tolist()
        return WorkerView(
            worker_id=record.worker_id,
            incarnation=record.incarnation,
            address=record.address,
            cached_tokens=int(cached),
            assumed_tokens=int(cached - reported),
            block_size_tokens=record.block_size_tokens,
            capacity_tokens=int(capacity),
            queue_s=queue_s,
            pending_prefill_tokens=int(pending),
            num_requests=int(requests),
            active_sequences=int(sequences),
            active_tokens=int(tokens),
            costs=self._costs[self._fleet.kind_of[index]],
        )


def _layout(record: WorkerRecord) -> tuple[int, str, str]:
    """What has to be equal for two workers to exchange blocks, as far as records tell."""
    return record.block_size_tokens, record.kv_dtype, record.transport
