"""What one process is to be, and how to build it: the same for the command line, Ray actors and tests."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import structlog

from headrace.cluster.exposure import check_exposure
from headrace.cluster.hosted import Report, Runnable
from headrace.cluster.reachability import with_advertised_host
from headrace.config import Settings
from headrace.directory.records import Role
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
    beyond_loopback: bool = False  # others are on other machines: it listens at its own machine's address

    @property
    def part(self) -> Part:
        return Part.ROUTER if self.kind == "router" else Part.WORKER


def fleet(
    settings: Settings, num_prefill: int, num_decode: int, port: int, http_port: int
) -> list[ProcessSpec]:
    """A router, which serves at these ports (0: any free one), and workers."""
    ports = {
        "rpc": settings.rpc.model_copy(update={"port": port}),
        "http": settings.http.model_copy(update={"port": http_port}),
    }
    return [
        ProcessSpec("router", "router", settings.model_copy(update=ports)),
        *(ProcessSpec(f"prefill-{n}", "prefill", settings) for n in range(num_prefill)),
        *(ProcessSpec(f"decode-{n}", "decode", settings) for n in range(num_decode)),
    ]


def next_worker(settings: Settings, role: Role, names: Collection[str]) -> ProcessSpec:
    """One more, with the first number that none of `names` has."""
    numbered = (f"{role}-{number}" for number in itertools.count())
    return ProcessSpec(next(name for name in numbered if name not in names), role.value, settings)


def check(spec: ProcessSpec) -> list[str]:
    """What of it is not protected. Raises InvalidRequest where that is not allowed."""
    return check_exposure(spec.settings, spec.part, spec.name)


def prepare(spec: ProcessSpec) -> ProcessSpec:
    """Once per process, before `build`: logging, cores, what UCX reads from the environment. Returns what to build,
    with the settings that follow from where this process runs. Raises as `check` and `with_advertised_host`.
    """
    configure_logging(spec.settings.log_level, spec.name, spec.log_file)
    if missing := check(spec):
        log.warning("insecure", missing=missing, see="docs/security.md")
    spec = replace(spec, settings=with_advertised_host(spec.settings))
    log.info("settings in force", cores=list(spec.cores), **spec.settings.describe())
    _bind(spec.cores)
    if spec.kind != "router":
        from kv_transfer.nixl_transport import ucx_environment

        for name, value in ucx_environment().items():
            os.environ.setdefault(name, value)
    return spec


def build(spec: ProcessSpec, report: Report) -> Runnable:
    """The process, not yet started. Imports torch only for a worker."""
    if spec.kind == "router":
        from router.app import Router

        return Router(spec.settings)
    report("importing torch")
    from headrace.cluster.worker_process import WorkerProcess

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
