"""What one process is to be, and how to build it: the same for the command line, Ray actors and tests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog

from headrace.cluster.exposure import check_exposure
from headrace.cluster.hosted import Report, Runnable
from headrace.config import Settings
from headrace.rpc.tls import Part
from headrace.telemetry import configure_logging

log = structlog.get_logger()

Kind = Literal["router", "prefill", "decode", "both"]


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """`cores` empty: wherever the operating system puts it. `log_file` None: standard error."""

    name: str  # worker id, or "router"
    kind: Kind
    settings: Settings
    cores: tuple[int, ...] = ()
    log_file: Path | None = None


def check(spec: ProcessSpec) -> list[str]:
    """What of it is not protected. Raises InvalidRequest where that is not allowed."""
    part = Part.ROUTER if spec.kind == "router" else Part.WORKER
    return check_exposure(spec.settings, part, spec.name)


def prepare(spec: ProcessSpec) -> None:
    """Once per process, before `build`: logging, cores, what UCX reads from the environment. Raises as `check`."""
    configure_logging(spec.settings.log_level, spec.name, spec.log_file)
    if missing := check(spec):
        log.warning("insecure", missing=missing, see="docs/security.md")
    log.info("settings in force", cores=list(spec.cores), **spec.settings.describe())
    _bind(spec.cores)
    if spec.kind != "router":
        from kv_transfer.nixl_transport import ucx_environment

        for name, value in ucx_environment().items():
            os.environ.setdefault(name, value)


def build(spec: ProcessSpec, report: Report) -> Runnable:
    """The process, not yet started. Imports torch only for a worker."""
    if spec.kind == "router":
        from router.app import Router

        return Router(spec.settings)
    report("importing torch")
    from headrace.cluster.worker_process import WorkerProcess
    from headrace.directory.records import Role

    return WorkerProcess(spec.settings, Role(spec.kind), spec.name, report, log_file=spec.log_file)


def _bind(cores: Sequence[int]) -> None:
    """Keep all threads of this process, those to come included, on `cores`: an OpenMP team that shares a core with
    another process waits a whole scheduler slice at each barrier.
    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:  # ended meanwhile
            continue
