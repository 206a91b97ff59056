"""Ray: which machine runs which process. Ray places; it carries no request.

A process is an actor in a placement group of its own: one bundle per tensor-parallel rank, packed on one machine.
Several processes spread over the machines as far as there is room. Who starts a process anew when it dies is
`headrace.cluster.keeper`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import structlog
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.cluster.exposure import is_loopback
from headrace.cluster.hosted import HostedProcess
from headrace.cluster.process import ProcessSpec, build, prepare
from headrace.config import Settings
from headrace.errors import DeadlineExceeded, HeadraceError, Unavailable

log = structlog.get_logger()

_STOP_MARGIN_S = 10.0
_PLACED_TIMEOUT_S = 0.05  # for Ray to say whether a group has its place; with 0 it never does
_WILDCARDS = ("", "0.0.0.0", "::", "[::]")

WAITING = "waits for a place"

Resources = dict[str, float]


class ProcessActor:
    """A process of ours inside a Ray actor. The constructor starts it."""

    def __init__(self, spec: ProcessSpec) -> None:
        if spec.beyond_loopback:
            spec = replace(spec, settings=reachable(spec.settings, ray.util.get_node_ip_address()))
        spec = prepare(spec)
        # What has ended by itself gets a new life in a new actor.
        self._process = HostedProcess(lambda report: build(spec, report), on_failure=lambda: os._exit(1))

    def status(self) -> tuple[str, str | None, str]:
        """Stage; once it serves its address and the URL of its HTTP API. Raises what ended it."""
        process = self._process
        try:
            address = process.address(timeout_s=0)
        except DeadlineExceeded:
            return process.stage, None, ""
        if process.has_ended:
            raise Unavailable("it ended by itself")
        return process.stage, address, process.http_address

    def stop(self, timeout_s: float) -> bool:
        return self._process.stop(timeout_s)


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    stage: str
    address: str | None = None  # None: it does not serve yet
    http_address: str = ""


class PlacedProcess:
    """An actor and its placement group. Made by `place`; not to be used by two threads at once."""

    def __init__(self, spec: ProcessSpec, actor: Any, group: PlacementGroup, machine: str) -> None:
        """`machine`: the id of the node where it was meant to go."""
        self.spec = spec
        self.machine = machine
        self._actor = actor
        self._group = group
        self._asked: Any = None  # the call that has not come back yet
        self._last = ProcessStatus(WAITING)

    def status(self, timeout_s: float) -> ProcessStatus:
        """Raises what its start raised, or Unavailable when it has died."""
        if self._asked is None:
            self._asked = self._actor.status.remote()
        asked = self._asked
        try:
            status = ProcessStatus(*ray.get(asked, timeout=timeout_s))
        except GetTimeoutError:
            if self._last.stage == WAITING and self._group.wait(_PLACED_TIMEOUT_S):
                self._last = ProcessStatus("starting its process")
            return self._last
        except ActorUnavailableError:  # perhaps not for long; Ray says when it is
            status = ProcessStatus("out of reach")
        except RayTaskError as error:
            raise self._cause(error) from None
        except RayActorError as error:
            raise Unavailable(f"{self.spec.name} died: {_brief(error)}; {self._log}") from None
        self._asked, self._last = None, status
        return status

    def missing_room(self) -> str:
        """While it waits for its place: what it needs and what is free, in words."""
        needed = _sum(bundles(self.spec))
        free = ray.available_resources()
        return f"needs {_shown(needed)}, free {_shown({name: free.get(name, 0.0) for name in needed})}"

    def begin_stop(self, timeout_s: float) -> Any:
        """Let it drain and end. Returns what `ray.wait` waits for."""
        return self._actor.stop.remote(timeout_s)

    def remove(self) -> None:
        """Give its place back, whatever state it is in."""
        try:
            ray.kill(self._actor, no_restart=True)
            remove_placement_group(self._group)
        except RayError as error:  # Ray itself is going, and takes both along
            log.warning("place not given back", process=self.spec.name, error=str(error))

    @property
    def _log(self) -> str:
        log_file = self.spec.log_file
        return f"log: {log_file}" if log_file else "its log is among Ray's (`ray logs cluster`)"

    def _cause(self, error: RayTaskError) -> HeadraceError:
        if isinstance(error.cause, HeadraceError):
            return error.cause
        return Unavailable(f"{self.spec.name} could not start: {error.cause}; {self._log}")


def reachable(settings: Settings, node_ip: str) -> Settings:
    """Settings with which a process on this node can be reached from others: it listens at the node's own address,
    unless another one is set.
    """
    rpc = settings.rpc
    host = node_ip if is_loopback(rpc.host) else rpc.host
    advertised = rpc.advertise_host or (node_ip if host in _WILDCARDS else "")
    return settings.model_copy(
        update={"rpc": rpc.model_copy(update={"host": host, "advertise_host": advertised})}
    )


def bundles(spec: ProcessSpec) -> list[Resources]:
    """What Ray reserves for it: one bundle a rank."""
    wanted = spec.settings.ray
    by_kind = {"router": wanted.router, "prefill": wanted.prefill}
    num_ranks = 1 if spec.kind == "router" else spec.settings.engine.tensor_parallel_size
    return [dict(by_kind.get(spec.kind, wanted.decode)) for _ in range(num_ranks)]


def machines() -> list[dict[str, Any]]:
    """Ray's nodes that are alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def capacities() -> list[Resources]:
    """What each of them has, used or not."""
    return [node["Resources"] for node in machines()]


def check_feasible(specs: Sequence[ProcessSpec], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raises Unavailable naming the resource that is missing, if machines with these resources could not hold all
    even when idle.
    """
    together: Resources = {}
    for spec in specs:
        needed = _sum(bundles(spec))
        _check_alone(spec.name, needed, nodes)
        together = _sum([together, needed])
    there = _sum(nodes)
    missing = [
        f"they need {amount:g} {resource}, the cluster has {there.get(resource, 0.0):g}"
        for resource, amount in together.items()
        if there.get(resource, 0.0) < amount
    ]
    if missing:
        raise Unavailable(f"{len(specs)} processes can not be placed: together {'; '.join(missing)}")


def _check_alone(name: str, needed: Resources, nodes: Sequence[Mapping[str, float]]) -> None:
    """All bundles of a process lie on one machine: some machine must have all of it, used or not."""
    if any(_fits(needed, node) for node in nodes):
        return
    has = "; ".join(_shown(node) for node in nodes) or "none"
    for resource, amount in needed.items():
        most = max((node.get(resource, 0.0) for node in nodes), default=0.0)
        if most < amount:
            raise Unavailable(
                f"{name} can not be placed: it needs {amount:g} {resource}, the largest machine has {most:g}"
                f" (machines: {has})"
            )
    raise Unavailable(f"{name} can not be placed: no machine has all of {_shown(needed)} (machines: {has})")


def place(spec: ProcessSpec, others: Iterable[PlacedProcess] = ()) -> PlacedProcess:
    """Start a process where its bundles fit, rather not where `others` are. Returns at once: it waits for its place,
    then starts.
    """
    wanted = bundles(spec)
    machine = _least_used(_sum(wanted), others)
    group = placement_group(
        wanted,
        strategy="STRICT_PACK",
        _soft_target_node_id=machine or None,  # Ray's only way to spread groups without pinning them
    )
    actor = (
        ray.remote(ProcessActor)
        .options(
            # The bundle is the reservation. The process sets its own thread counts; of GPUs Ray shows it its own.
            num_cpus=0,
            num_gpus=wanted[0].get("GPU", 0),
            max_restarts=0,
            max_concurrency=4,  # `status` and `stop` while the start goes on
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )
        .remote(spec)
    )
    return PlacedProcess(spec, actor, group, machine)


def drain(placed: Sequence[PlacedProcess], drain_timeout_s: float) -> None:
    """Let all end side by side. A process that is already gone is no error."""
    refs = [process.begin_stop(drain_timeout_s + _STOP_MARGIN_S) for process in placed]
    ray.wait(refs, num_returns=len(refs), timeout=drain_timeout_s + 2 * _STOP_MARGIN_S)


def _least_used(needed: Resources, others: Iterable[PlacedProcess]) -> str:
    """The machine that could hold it and was chosen for fewest others; "" for none."""
    used = Counter(process.machine for process in others)
    fitting = [node["NodeID"] for node in machines() if _fits(needed, node["Resources"])]
    return min(fitting, key=lambda node_id: used[node_id], default="")


def _brief(error: RayActorError) -> str:
    """In one line, without Ray's advice."""
    return " ".join(str(error).partition("Some common causes")[0].split())


def _fits(needed: Mapping[str, float], available: Mapping[str, float]) -> bool:
    return all(available.get(resource, 0.0) >= amount for resource, amount in needed.items())


def _sum(parts: Iterable[Mapping[str, float]]) -> Resources:
    total: Resources = {}
    for part in parts:
        for resource, amount in part.items():
            total[resource] = round(total.get(resource, 0.0) + amount, 4)  # as fine as Ray counts
    return total


def _shown(resources: Mapping[str, float]) -> str:
    """Without what Ray counts for itself, memory included."""
    hidden = ("node:", "memory", "object_store_memory")
    return (
        ", ".join(f"{v:g} {k}" for k, v in sorted(resources.items()) if not k.startswith(hidden)) or "nothing"
    )
