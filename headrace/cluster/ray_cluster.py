"""A cluster on machines that Ray has already. They share a Redis that is there, too.

start: connect ─▶ look at the machines ─▶ router and workers side by side ─▶ addresses
stop:  drain ─▶ give the places back ─▶ disconnect

What it started ends with it: the processes belong to this Ray job.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import ray
import structlog
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headrace.cluster.exposure import check_hosts, is_loopback
from headrace.cluster.keeper import Keeper, OnStage
from headrace.cluster.placement import capacities, check_feasible, machines, reachable
from headrace.cluster.process import fleet, next_worker
from headrace.config import DirectorySettings, Settings
from headrace.directory.records import Role
from headrace.directory.redis_directory import RedisDirectory, shown_url
from headrace.errors import HeadraceError, InvalidRequest, Unavailable

log = structlog.get_logger()

_CONNECT_TIMEOUT_S = 5.0
_LOOK_TIMEOUT_S = 30.0
# Ray never sends a token to an address that it was told, unless that is asked for; it then says nothing of tokens.
_TOKEN_HINT = (
    "; if it asks for a token, as Ray does by default: set RAY_AUTH_MODE=token, and see `ray get-auth-token`"
)
_MAX_LOOKED_AT = 64  # machines; the others are like them


class RayCluster:
    """Use as a context manager. `address`: as `ray.init` takes it: auto, HOST:PORT or ray://HOST:PORT."""

    def __init__(
        self,
        settings: Settings,
        address: str,
        *,
        num_prefill: int,
        num_decode: int,
        ports: tuple[int, int] = (0, 0),
        on_stage: OnStage = lambda name, stage: None,
    ) -> None:
        """`ports`: of the gRPC and the HTTP API, on the machine that the router gets; 0 for any free one."""
        self._settings = settings
        self._address = address
        self._specs = [
            replace(spec, beyond_loopback=True) for spec in fleet(settings, num_prefill, num_decode, *ports)
        ]
        self._on_stage = on_stage
        self._keeper = Keeper(self._specs, settings, on_stage)
        self._cleanup = ExitStack()
        self.directory_url = settings.directory.url

    def __enter__(self) -> RayCluster:
        try:
            self._start()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._cleanup.close()

    @property
    def router_address(self) -> str:
        return self._keeper.status("router").address or ""

    @property
    def http_address(self) -> str:
        """A URL; "": it serves no HTTP."""
        return self._keeper.status("router").http_address

    @property
    def logs(self) -> str:
        return "with Ray's, on each machine: ray logs cluster"

    def worker_names(self) -> set[str]:
        return self._keeper.names() - {"router"}

    def add_worker(self, role: Role) -> str:
        """Place one more. Returns its name while it starts. Raises Unavailable."""
        spec = replace(next_worker(self._settings, role, self.worker_names()), beyond_loopback=True)
        self._keeper.add(spec)
        return spec.name

    def remove_worker(self, name: str) -> None:
        """Drain it, end it, and give its place back."""
        self._keeper.remove(name)

    def restart(self) -> None:
        """Every worker, one after the other, while the others serve. Raises as the start does."""
        self._keeper.restart()

    def _start(self) -> None:
        self._on_stage("ray", f"connecting to {self._address}")
        self._cleanup.callback(ray.shutdown)
        connect(self._address)
        self._on_stage("ray", "serving")
        check_feasible(self._specs, capacities())
        node_ips = {node["NodeManagerAddress"] for node in machines()}
        self._check_exposure(node_ips)
        self._check_directory(node_ips)
        self._cleanup.callback(self._keeper.stop)
        self._keeper.start()

    def _check_exposure(self, node_ips: set[str]) -> None:
        """Before anything is placed; each process looks at its certificate itself, on its machine."""
        for spec in self._specs:
            for node_ip in node_ips:
                check_hosts(reachable(spec.settings, node_ip), spec.part)

    def _check_directory(self, node_ips: set[str]) -> None:
        """That all machines reach it, and nobody has our names there."""
        directory = self._settings.directory
        host = urlsplit(directory.url).hostname or ""
        if is_loopback(host) and len(node_ips) > 1:
            raise InvalidRequest(
                "directory.url",
                shown_url(directory.url),
                f"each of the cluster's {len(node_ips)} machines would look for it at home;"
                " give the address of a Redis that all of them reach",
            )
        self._on_stage("directory", "asking all machines whether they reach it")
        taken = _look_around(directory) & {spec.name for spec in self._specs}
        if taken:
            raise InvalidRequest(
                "directory.cluster",
                directory.cluster,
                f"a cluster of this name runs already ({', '.join(sorted(taken))} at {shown_url(directory.url)});"
                " stop it or take another name",
            )
        self._on_stage("directory", "serving")


def connect(address: str) -> None:
    """To a Ray that runs. Raises Unavailable within seconds when there is none."""
    _check_listens(address)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    logging.getLogger("ray").setLevel(logging.WARNING)
    try:
        ray.init(address=address, namespace="headrace", log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray raises plain ones here
        raise Unavailable(
            f"no Ray at {address}: {error}{_TOKEN_HINT if 'RAY_AUTH_MODE' not in os.environ else ''}"
        ) from error


def _check_listens(address: str) -> None:
    """Ray itself would try for half a minute."""
    if address in ("auto", "local"):
        return
    target = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = target.hostname, target.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise InvalidRequest("--address", address, "auto, HOST:PORT or ray://HOST:PORT")
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise Unavailable(f"no Ray at {address}: {error}") from None


def _look_around(directory: DirectorySettings) -> set[str]:
    """Ids of the workers in the directory. Raises Unavailable naming the machine that can not take part."""
    asked: dict[str, Any] = {}
    for node in machines()[:_MAX_LOOKED_AT]:
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        look = ray.remote(_look).options(num_cpus=0, max_retries=0, scheduling_strategy=here)
        asked[node["NodeManagerAddress"]] = look.remote(directory)
    ids: set[str] = set()
    for node_ip, answer in asked.items():
        try:
            their_version, workers = ray.get(answer, timeout=_LOOK_TIMEOUT_S)
        except RayTaskError as error:
            cause = error.cause
            said = cause if isinstance(cause, HeadraceError) else f"it can not run headrace: {cause}"
            raise Unavailable(f"machine {node_ip}: {said}") from None
        except RayError as error:
            raise Unavailable(f"machine {node_ip}: it can not run headrace: {error}") from None
        if their_version != version("headrace"):
            raise Unavailable(
                f"machine {node_ip} has headrace {their_version}, this one has {version('headrace')}"
            )
        ids |= workers
    return ids


def _look(directory: DirectorySettings) -> tuple[str, set[str]]:
    """On a machine of the cluster: our version there, and who is in the directory as seen from there."""

    async def ids() -> set[str]:
        client = RedisDirectory(directory)
        try:
            return {record.worker_id for record in await client.workers()}
        finally:
            await client.close()

    return version("headrace"), asyncio.run(ids())
