"""A worker process whose transport can fail: python -m tests.support.worker_main ROLE WORKER_ID SETTINGS FAULTS (JSON).

Without faults it is what `headrace prefill` and `headrace decode` run.
"""

from __future__ import annotations

import sys

import headrace.cluster.foreground as foreground
from headrace.cluster.process import ProcessSpec
from headrace.cluster.worker_process import WorkerProcess
from headrace.config import Settings
from headrace.directory.records import Role
from kv_transfer.faulty_transport import Faults, FaultyTransport
from kv_transfer.registry import create_transport


def main(role: str, worker_id: str, settings_json: str, faults_json: str) -> None:
    settings = Settings.model_validate_json(settings_json)
    faults = Faults()

    def build(spec: ProcessSpec, report) -> WorkerProcess:
        return WorkerProcess(settings, Role(role), worker_id, report, make_transport=transport)

    def transport(name, incarnation, region):
        return FaultyTransport(create_transport(name, incarnation, region), faults, region)

    foreground.build = build
    foreground.run_in_foreground(ProcessSpec(worker_id, role, settings))


if __name__ == "__main__":
    main(*sys.argv[1:])
