"""Ray: which machine runs which process. Ray places and restarts; it carries no request.

A worker is an actor in a placement group of its own: one bundle per tensor-parallel rank, packed on one machine. It
comes back under its name, with a new incarnation, when its process dies.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
import structlog
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.cluster.hosted import HostedProcess
from headrace.cluster.process import ProcessSpec, build, prepare
from headrace.errors import DeadlineExceeded, HeadraceError, Unavailable

log = structlog.get_logger()

_PLACEMENT_TIMEOUT_S = 30.0
_POLL_S = 0.1
_MAX_RESTARTS = (
    1000  # of one worker; a worker that can not start ends `wait_until_serving`, it does not restart for ever
)
_STOP_MARGIN_S = 10.0

Resources = dict[str, float]


class ProcessActor:
    """A process of ours inside a Ray actor. The constructor starts it, so a restart by Ray does too."""

    def __init__(self, spec: ProcessSpec) -> None:
        prepare(spec)
        # Ray starts it again when it is no more.
        self._process = HostedProcess(lambda report: build(spec, report), on_failure=lambda: os._exit(1))

    def stage(self) -> str:
        return self._process.stage

    def address(self) -> str | None:
        """The address once it serves, None before. Raises what its start raised."""
        try:
            return self._process.address(timeout_s=0)
        except DeadlineExceeded:
            return None

    def http_address(self) -> str:
        """Once it serves: the URL of its HTTP API, "" for none."""
        return self._process.http_address

    def stop(self, timeout_s: float) -> bool:
        return self._process.stop(timeout_s)


@dataclass(frozen=True, slots=True)
class PlacedProcess:
    spec: ProcessSpec
    actor: Any
    group: PlacementGroup


def place(spec: ProcessSpec, bundles: list[Resources]) -> PlacedProcess:
    """Start a process where `bundles` fit. Returns at once; the process is then starting.

    Raises Unavailable naming the resource that is missing.
    """
    _check_feasible(spec.name, bundles)
    group = placement_group(bundles, strategy="STRICT_PACK")
    if not group.wait(_PLACEMENT_TIMEOUT_S):
        remove_placement_group(group)
        raise Unavailable(
            f"{spec.name} found no place within {_PLACEMENT_TIMEOUT_S:g} s: needs {_sum(bundles)},"
            f" and only {_known(ray.available_resources(), bundles)} is free"
        )
    actor = (
        ray.remote(ProcessActor)
        .options(
            name=None,
            num_cpus=0,  # the bundle is the reservation; the process sets its own thread counts
            max_restarts=_MAX_RESTARTS,
            max_concurrency=4,  # `stage` and `stop` while the start goes on
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )
        .remote(spec)
    )
    return PlacedProcess(spec, actor, group)


def wait_until_serving(
    placed: list[PlacedProcess], timeout_s: float, on_stage: Callable[[str, str], None]
) -> list[str]:
    """Addresses, in order, once all serve. `on_stage(name, stage)` is told each change.

    Raises what a start raised, or DeadlineExceeded naming who is late and in which stage.
    """
    deadline = time.monotonic() + timeout_s
    addresses: dict[str, str] = {}
    stages: dict[str, str] = {}
    while len(addresses) < len(placed):
        for process in placed:
            name = process.spec.name
            if name in addresses:
                continue
            stage, address = _ask(process, deadline)
            if stages.get(name) != stage:
                stages[name] = stage
                on_stage(name, stage)
            if address is not None:
                addresses[name] = address
        if time.monotonic() > deadline:
            late = ", ".join(f"{n} ({s})" for n, s in stages.items() if n not in addresses)
            raise DeadlineExceeded(f"not serving after {timeout_s:g} s: {late}")
        time.sleep(_POLL_S)
    return [addresses[process.spec.name] for process in placed]


def http_address(process: PlacedProcess) -> str:
    """Of a process that serves: the URL of its HTTP API, "" for none."""
    return ray.get(process.actor.http_address.remote(), timeout=_PLACEMENT_TIMEOUT_S)


def stop(placed: list[PlacedProcess], drain_timeout_s: float) -> None:
    """Drain all side by side, then give their places back. A process that is already gone is no error."""
    refs = [process.actor.stop.remote(drain_timeout_s + _STOP_MARGIN_S) for process in placed]
    ray.wait(refs, num_returns=len(refs), timeout=drain_timeout_s + 2 * _STOP_MARGIN_S)
    for process in placed:
        ray.kill(process.actor, no_restart=True)
        remove_placement_group(process.group)


def _ask(process: PlacedProcess, deadline: float) -> tuple[str, str | None]:
    calls = [process.actor.stage.remote(), process.actor.address.remote()]
    try:
        return tuple(ray.get(calls, timeout=max(1.0, deadline - time.monotonic())))
    except GetTimeoutError:
        return "starting its process", None
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, HeadraceError):
            raise cause from None
        raise Unavailable(
            f"{process.spec.name} could not start: {cause}; log: {process.spec.log_file}"
        ) from None
    except RayActorError as error:
        raise Unavailable(
            f"{process.spec.name} died while it started: {error}; log: {process.spec.log_file}"
        ) from None


def _check_feasible(name: str, bundles: list[Resources]) -> None:
    """All bundles of a worker lie on one machine: some machine must have all of it, used or not."""
    needed = _sum(bundles)
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for resource, amount in needed.items():
        most = max((machine.get(resource, 0.0) for machine in machines), default=0.0)
        if most < amount:
            raise Unavailable(
                f"{name} can not be placed: it needs {amount:g} {resource}, the largest machine has {most:g}"
            )


def _sum(bundles: list[Resources]) -> Resources:
    total: Resources = {}
    for bundle in bundles:
        for resource, amount in bundle.items():
            total[resource] = total.get(resource, 0.0) + amount
    return total


def _known(available: Mapping[str, float], bundles: list[Resources]) -> Resources:
    return {resource: available.get(resource, 0.0) for resource in _sum(bundles)}
