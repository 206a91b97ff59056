"""A worker process whose transport can fail: python -m tests.support.worker_main ROLE WORKER_ID SETTINGS FAULTS (JSON).

Without faults it is what `headrace prefill` and `headrace decode` run.
"""

from __future__ import annotations

import json
import random
import sys

import headrace.cluster.foreground as foreground
from headrace.cluster.process import ProcessSpec
from headrace.cluster.worker_process import WorkerProcess
from headrace.config import Settings
from headrace.directory.records import Role
from kv_transfer.faulty_transport import Chaos, Fault, Faults, FaultyTransport
from kv_transfer.registry import create_transport


def main(role: str, worker_id: str, settings_json: str, faults_json: str) -> None:
    settings = Settings.model_validate_json(settings_json)
    faults = Faults(chaos=_chaos(**json.loads(faults_json)))

    def build(spec: ProcessSpec, report) -> WorkerProcess:
        return WorkerProcess(settings, Role(role), worker_id, report, make_transport=transport)

    def transport(name, incarnation, regions):
        return FaultyTransport(create_transport(name, incarnation, regions), faults)

    foreground.build = build
    foreground.run_in_foreground(ProcessSpec(worker_id, role, settings))


def _chaos(seed: int = 0, probabilities: dict[str, float] | None = None) -> Chaos:
    drawn = {Fault(name): probability for name, probability in (probabilities or {}).items()}
    return Chaos(random.Random(seed), drawn)


if __name__ == "__main__":
    main(*sys.argv[1:])
