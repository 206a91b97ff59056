"""Watches the router once a second: rates, who came and who went. Makes `FleetState` when somebody wants it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from headrace.directory.records import WorkerRecord
from headrace.directory.view import DirectoryView
from headrace.directory.watcher import Watcher
from headrace.errors import Overloaded
from router.breakers import Breakers
from router.console.figures import RATE_S, Figures, by_worker, of_all
from router.console.state import Condition, FleetState, History, RouterState, WorkerState, state_to_json
from router.front_door import FrontDoor
from router.recent import WINDOW_S

INTERVAL_S = 1.0
MAX_LISTENERS = 32
_HISTORY = 120
_RATE_SAMPLES = 5
_GONE_S = 60.0  # how long a worker that is gone is still shown
_MAX_GONE = 64
_SILENCE_S = 10.0  # a listener leaves when nothing was observed for so long


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    output_tokens: int
    requests: int
    inflight: int
    queued: int
    kv_used: float


@dataclass(frozen=True, slots=True)
class _Known:
    """A worker that is in the view, or was."""

    record: WorkerRecord
    since_s: float
    gone_at_s: float | None = None


class Observer:
    """`run` as long as the router serves. Used on its event loop only."""

    def __init__(
        self,
        view: DirectoryView,
        watcher: Watcher,
        door: FrontDoor,
        breakers: Breakers,
        model_name: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._watcher = watcher
        self._door = door
        self._breakers = breakers
        self._model_name = model_name
        self._now = now
        self._started_s = now()
        self._known: dict[str, _Known] = {}  # by worker id
        self._samples: deque[_Sample] = deque(maxlen=_HISTORY + _RATE_SAMPLES)
        self._json = b""
        self._json_at_s = 0.0
        self._observed = asyncio.Event()  # set and replaced each time
        self._num_listeners = 0
        self._ended = False
        self.observe()

    async def run(self) -> None:
        """Until cancelled, which ends all listeners."""
        try:
            while True:
                self.observe()
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._ended = True
            self._observed.set()

    async def follow(self) -> AsyncGenerator[bytes]:
        """`FleetState` as JSON, now and each time it was observed anew. Raises Overloaded when too many listen."""
        if self._num_listeners >= MAX_LISTENERS:
            raise Overloaded(f"{MAX_LISTENERS} listeners follow already, which is the limit", 5.0)
        self._num_listeners += 1
        try:
            while not self._ended:
                yield self.json()
                async with asyncio.timeout(_SILENCE_S):
                    await self._observed.wait()
        except TimeoutError:
            return
        finally:
            self._num_listeners -= 1

    def json(self) -> bytes:
        """Made at most twice a second, however many ask."""
        if not self._json or self._now() - self._json_at_s > INTERVAL_S / 2:
            self._json = state_to_json(self.state())
            self._json_at_s = self._now()
        return self._json

    def observe(self) -> None:
        self._note_workers()
        admission, door = self._door.dispatcher.admission, self._door
        total = sum(record.num_blocks for record in self._view.workers.values())
        used = sum(record.used_blocks for record in self._view.workers.values())
        sample = _Sample(
            at_s=self._now(),
            output_tokens=door.recent.num_output_tokens,
            requests=door.tally.requests.total(),
            inflight=admission.num_running,
            queued=admission.num_queued,
            kv_used=used / total if total else 0.0,
        )
        self._samples.append(sample)
        observed, self._observed = self._observed, asyncio.Event()
        observed.set()

    def state(self) -> FleetState:
        self._note_workers()
        answers = self._door.recent.answers()
        figures = by_worker(answers, self._now())
        return FleetState(
            window_s=WINDOW_S,
            rate_s=RATE_S,
            router=self._router(of_all(answers)),
            workers=[
                self._worker(known, figures[worker_id]) for worker_id, known in sorted(self._known.items())
            ],
            history=self._history(),
        )

    def _note_workers(self) -> None:
        now_s = self._now()
        for worker_id, record in self._view.workers.items():
            known = self._known.get(worker_id)
            same = known is not None and known.record.incarnation == record.incarnation
            since_s = known.since_s if known is not None and same else now_s
            self._known[worker_id] = _Known(record, since_s)
        for worker_id, known in self._known.items():
            if worker_id not in self._view.workers and known.gone_at_s is None:
                self._known[worker_id] = replace(known, gone_at_s=now_s)
        self._forget_gone(now_s)

    def _forget_gone(self, now_s: float) -> None:
        gone = sorted(
            ((known.gone_at_s, worker_id) for worker_id, known in self._known.items() if known.gone_at_s),
            reverse=True,
        )
        for number, (at_s, worker_id) in enumerate(gone):
            if number >= _MAX_GONE or now_s - at_s > _GONE_S:
                del self._known[worker_id]

    def _worker(self, known: _Known, figures: Figures) -> WorkerState:
        record, now_s = known.record, self._now()
        load, ledger = record.load, self._door.dispatcher.ledger
        account = ledger.of(record.incarnation)
        return WorkerState(
            worker_id=record.worker_id,
            role=record.role,
            address=record.address,
            incarnation=record.incarnation,
            condition=self._condition(known),
            seen_s=now_s - known.since_s,
            gone_s=None if known.gone_at_s is None else now_s - known.gone_at_s,
            breaker=self._breakers.state(record.incarnation),
            kind=record.kind,
            transport=record.transport,
            num_blocks=record.num_blocks,
            used_blocks=record.used_blocks,
            cached_blocks=load.cached_blocks,
            block_bytes=record.block_bytes,
            running=load.running,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            queue_s=account.queue_s(ledger.clock.now()),
            pending_prefill_tokens=account.pending_prefill_tokens,
            active_sequences=account.active_sequences,
            active_tokens=account.active_tokens,
            ttft=figures.ttft,
            itl=figures.itl,
            hits=figures.hits,
            transfers=figures.transfers,
        )

    def _condition(self, known: _Known) -> Condition:
        if known.gone_at_s is not None:
            return Condition.GONE
        if self._breakers.state(known.record.incarnation) == "open":
            return Condition.SET_ASIDE
        return Condition.DRAINING if known.record.draining else Condition.SERVING

    def _router(self, figures: Figures) -> RouterState:
        admission, door, index = self._door.dispatcher.admission, self._door, self._view.index
        tokens_per_s, requests_per_s = self._rates(len(self._samples) - 1)
        return RouterState(
            model=self._model_name,
            up_s=self._now() - self._started_s,
            inflight=admission.num_running,
            queued=admission.num_queued,
            queued_tokens=admission.num_queued_tokens,
            tokens_per_s=tokens_per_s,
            requests_per_s=requests_per_s,
            requests=dict(door.tally.requests),
            output_tokens=door.recent.num_output_tokens,
            refused={reason.value: count for reason, count in admission.refused.items()},
            ttft=figures.ttft,
            itl=figures.itl,
            hits=figures.hits,
            event_lag_s=self._watcher.event_lag_s,
            directory_silence_s=self._watcher.silence_s(),
            event_gaps=self._view.num_gaps,
            index_blocks=len(index),
            index_entries=index.num_entries,
            index_bytes=index.num_bytes,
            index_dropped_blocks=index.num_dropped,
            assumed_blocks=self._view.num_assumed_blocks,
        )

    def _history(self) -> History:
        numbers = range(len(self._samples))[-_HISTORY:]
        rates = [self._rates(number) for number in numbers]
        shown = [self._samples[number] for number in numbers]
        return History(
            interval_s=INTERVAL_S,
            tokens_per_s=[round(tokens, 3) for tokens, _ in rates],
            requests_per_s=[round(requests, 3) for _, requests in rates],
            inflight=[sample.inflight for sample in shown],
            queued=[sample.queued for sample in shown],
            kv_used=[round(sample.kv_used, 4) for sample in shown],
        )

    def _rates(self, number: int) -> tuple[float, float]:
        """Tokens and requests per second up to that sample, over up to `_RATE_SAMPLES` intervals."""
        last, first = self._samples[number], self._samples[max(0, number - _RATE_SAMPLES)]
        seconds = last.at_s - first.at_s
        if seconds <= 0:
            return 0.0, 0.0
        return (
            (last.output_tokens - first.output_tokens) / seconds,
            (last.requests - first.requests) / seconds,
        )
