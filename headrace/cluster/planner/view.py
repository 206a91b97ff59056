"""What the planner sees of the fleet: plain data, made of the records that workers publish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from headrace.directory.records import Role, WorkerLoad, WorkerRecord
from router.costs import RecursiveFit, prior_costs


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker at a moment."""

    worker_id: str
    role: Role
    draining: bool = False
    draining_s: float = 0.0  # for how long
    busy: float | None = None  # of the time since the last look, how much it computed: 0..1; None: not known
    waiting_tokens: int = 0  # of prompts, to be computed
    prefill_tokens_per_s: float = 0.0  # 0: not known
    running: int = 0
    decode_step_s: float = 0.0  # 0: not known
    fixed_step_s: float = 0.0  # of it, what does not depend on the batch
    kv_use: float = 0.0  # blocks in use by their total
    cached_tokens: int = 0  # what is lost with the worker
    removable: bool = False  # whoever runs it can take this very one away


@dataclass(frozen=True, slots=True)
class FleetView:
    """Workers of one model that can exchange blocks, at a time of the planner's clock. Draining ones are in it."""

    at_s: float
    workers: tuple[WorkerFigures, ...]

    def pool(self, role: Role) -> tuple[WorkerFigures, ...]:
        """Those that take work of this kind. A worker of both roles decodes: routers send it no prompts of others."""
        return tuple(
            worker
            for worker in self.workers
            if not worker.draining and (worker.role == Role.PREFILL) == (role == Role.PREFILL)
        )


class Observer:
    """Makes views; keeps what each worker said before, to tell how busy it was since."""

    def __init__(self) -> None:
        self._before: dict[str, WorkerLoad] = {}  # by incarnation
        self._busy: dict[str, float] = {}
        self._draining_since: dict[str, float] = {}
        self._steps: dict[str, RecursiveFit] = {}  # by kind of worker: what a step takes, as in router.costs

    def view(self, records: Iterable[WorkerRecord], now_s: float, removable: Iterable[str] = ()) -> FleetView:
        """Of the model and layout that most workers have. `removable`: ids."""
        fleet = sorted(_largest(list(records)), key=lambda record: record.worker_id)
        names = set(removable)
        self._draining_since = {
            record.incarnation: self._draining_since.get(record.incarnation, now_s)
            for record in fleet
            if record.draining
        }
        workers = tuple(self._figures(record, now_s, removable=record.worker_id in names) for record in fleet)
        alive = {record.incarnation for record in fleet}
        self._before = {name: load for name, load in self._before.items() if name in alive}
        self._busy = {name: busy for name, busy in self._busy.items() if name in alive}
        return FleetView(now_s, workers)

    def _figures(self, record: WorkerRecord, now_s: float, *, removable: bool) -> WorkerFigures:
        load = record.load
        is_news = load.at_s > self._before.setdefault(record.incarnation, load).at_s
        return WorkerFigures(
            worker_id=record.worker_id,
            role=record.role,
            draining=record.draining,
            draining_s=now_s - self._draining_since.get(record.incarnation, now_s),
            busy=self._busy_since(record.incarnation, load),
            waiting_tokens=load.waiting_tokens,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            running=load.running,
            decode_step_s=load.decode_step_s,
            fixed_step_s=self._fixed_step_s(record, learn=is_news),
            kv_use=record.used_blocks / record.num_blocks if record.num_blocks else 0.0,
            cached_tokens=load.cached_blocks * record.block_size_tokens,
            removable=removable,
        )

    def _fixed_step_s(self, record: WorkerRecord, *, learn: bool) -> float:
        """Of the measured step, by what workers of this kind have shown; before that, by what is assumed of all."""
        load = record.load
        if not (load.running and load.decode_step_s):
            return 0.0
        prior = prior_costs(load.prefill_tokens_per_s).decode
        fit = self._steps.setdefault(record.kind, RecursiveFit(astuple(prior)))
        batch = (1.0, float(load.running), float(sum(share.num_tokens for share in load.shares)))
        if learn:
            fit.observe(batch, load.decode_step_s)
        predicted_s = sum(part * each for part, each in zip(fit.coefficients, batch, strict=True))
        return load.decode_step_s * fit.coefficients[0] / predicted_s if predicted_s else load.decode_step_s

    def _busy_since(self, incarnation: str, load: WorkerLoad) -> float | None:
        """By the worker's own clock: its record can be older than this look, and the same as at the last one."""
        before = self._before[incarnation]
        if load.at_s > before.at_s:
            share = (load.busy_s - before.busy_s) / (load.at_s - before.at_s)
            self._busy[incarnation] = min(1.0, max(0.0, share))
            self._before[incarnation] = load
        return self._busy.get(incarnation)


def _largest(records: list[WorkerRecord]) -> list[WorkerRecord]:
    def kind(record: WorkerRecord) -> tuple[object, ...]:
        return record.model_fingerprint, *record.layout

    counts = Counter(kind(record) for record in records)
    if not counts:
        return []
    most = max(counts, key=lambda each: (counts[each], each))
    return [record for record in records if kind(record) == most]
