"""`headrace planner`: the planner in the foreground, until Ctrl-C."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
from rich.markup import escape

from headrace.cli.progress import output
from headrace.cluster.foreground import run_until_signal
from headrace.cluster.hosted import HostedProcess
from headrace.cluster.planner.actuators import Actuator, NoActuator
from headrace.cluster.planner.process import Planner
from headrace.cluster.planner.ray_actuator import RayActuator, Workers
from headrace.config import Settings
from headrace.telemetry import configure_logging

log = structlog.get_logger()

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 30.0


def run_planner(settings: Settings, *, as_json: bool) -> None:
    """Raises HeadraceError when it can not start."""
    configure_logging(settings.log_level, "planner")
    show = _Lines().show
    run_until_signal(lambda: Planner(settings, actuator_of(settings), _print_json if as_json else show))


@contextmanager
def planner_of(settings: Settings, workers: Workers, log_file: Path | None) -> Generator[None]:
    """Within the block a planner runs beside, on a thread of its own, and adds and removes those workers."""
    configure_logging(settings.log_level, "planner", log_file)
    hosted = HostedProcess(lambda report: Planner(settings, RayActuator(workers)))
    try:
        hosted.address(_START_TIMEOUT_S)
        yield
    finally:
        if not hosted.stop(_STOP_TIMEOUT_S):
            log.warning("planner did not end in time")


def actuator_of(settings: Settings) -> Actuator:
    planner = settings.planner
    if planner.actuator == "none":
        return NoActuator()
    from headrace.cluster.planner.kubernetes import Api, KubernetesActuator

    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    return KubernetesActuator(Api.of_pod(host, port), planner.prefill_set, planner.decode_set)


def _print_json(decision: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(decision) + "\n")
    sys.stdout.flush()


class _Lines:
    """For people: a line when something is new."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, decision: dict[str, Any]) -> None:
        pressures: dict[str, float | None] = decision["pressure"]
        fleet = ", ".join(
            f"{size} {role} at {_shown(pressures[role])}" for role, size in decision["workers"].items()
        )
        verb = "would" if decision["dry_run"] else "will"
        actions = "; ".join(
            f"[bold]{verb} {action['kind']} {action['worker_id'] or 'a worker'} ({action['role']})[/]"
            for action in decision["actions"]
        )
        line = f"{actions or 'no change'}: {escape(decision['why'])}"
        if line != self._last:
            self._last = line
            output.print(f"[dim]{fleet}[/]  {line}", highlight=False, soft_wrap=True)


def _shown(pressure: float | None) -> str:
    return "?" if pressure is None else f"{pressure:.2f}"
