"""One measurement from warm-up to summary, and the folder that keeps it.

summary.json       what was asked, of whom, and what was found
requests.jsonl     a RequestRecord a line, as they end
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from headrace.bench.report import machine_facts
from headrace.bench.serve.content import Vocabulary
from headrace.bench.serve.endpoint import Endpoint
from headrace.bench.serve.records import RequestRecord
from headrace.bench.serve.runner import Runner
from headrace.bench.serve.slo import Objective
from headrace.bench.serve.summary import SCHEMA, Json, Price, summarise
from headrace.bench.serve.workload import Plan
from headrace.clock import Clock
from headrace.errors import InvalidRequest

_WARM_UP_PHASE = 0  # of the vocabulary: what was warmed up with is not asked again


@dataclass(frozen=True, slots=True)
class Measurer:
    """Runs plans on an endpoint."""

    endpoint: Endpoint
    clock: Clock
    objective: Objective
    vocab_size: int
    seed: int
    max_in_flight: int | None = None
    price: Price | None = None
    on_record: Callable[[RequestRecord], None] = field(default=lambda _: None)

    async def warm_up(self, plan: Plan) -> None:
        """One request after the other. Raises InvalidRequest where none gets an answer."""
        runner = self._runner(_WARM_UP_PHASE, self.on_record)
        await runner.run(replace(plan, concurrency=1))
        if runner.records and not any(record.is_ok for record in runner.records):
            raise InvalidRequest("--warmup", plan.num_requests, f"all failed: {runner.records[0].error}")

    async def measure(
        self, plan: Plan, facts: Mapping[str, Any], folder: Path | None, phase: int = 1
    ) -> Json:
        """`facts`: of the endpoint and the workload, for the summary. `phase`: equal plans of two phases ask for
        different texts. Raises InvalidRequest for the folder.
        """
        machine = machine_facts()
        with _Lines(folder) as lines:
            runner, cpu_s = await self._run(plan, phase, lines)
        found = summarise(
            plan, runner.records, self.objective, runner.stalls_s, seed=self.seed, price=self.price
        )
        found["client"]["cpu_load"] = cpu_s / found["duration"] if found["duration"] else None  # of one core
        summary: Json = {
            "schema": SCHEMA,
            "date": machine["started_at"],
            **facts,
            "seed": self.seed,
            "schedule_sha256": plan.digest(),
            "max_concurrency": plan.concurrency or self.max_in_flight,
            **found,
            "machine": machine,
        }
        if folder is not None:
            write_json(folder / "summary.json", summary)
        return summary

    async def _run(self, plan: Plan, phase: int, lines: _Lines) -> tuple[Runner, float]:
        """And the CPU seconds that it took here."""

        def on_record(record: RequestRecord) -> None:
            lines.add(record)
            self.on_record(record)

        runner = self._runner(phase, on_record)
        cpu_s = time.process_time()
        await runner.run(plan)
        return runner, time.process_time() - cpu_s

    def _runner(self, phase: int, on_record: Callable[[RequestRecord], None]) -> Runner:
        vocabulary = Vocabulary(self.seed, self.vocab_size, phase)
        run_id = f"bench-{self.seed}-{phase}"
        return Runner(self.endpoint, vocabulary, self.clock, run_id, self.max_in_flight, on_record)


def write_json(path: Path, content: Json) -> None:
    """Moved into its place, so that whoever reads it meanwhile finds it whole. Raises InvalidRequest."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        raise InvalidRequest("--out", str(path), f"it can not be written: {error.strerror}") from None


class _Lines:
    """requests.jsonl, where there is a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file: IO[str] | None = None

    def __enter__(self) -> _Lines:
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = (self._folder / "requests.jsonl").open("w")
            except OSError as error:
                raise InvalidRequest(
                    "--out", str(self._folder), f"can not be written: {error.strerror}"
                ) from None
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, record: RequestRecord) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record.json()) + "\n")
