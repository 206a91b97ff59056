"""A whole cluster on this machine: Redis or Valkey, Ray, a router, workers. Each is a process of its own.

start: model ─▶ directory server ─▶ Ray ─▶ router and workers side by side ─▶ address
stop:  the same backwards, whatever happened
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import ray
import structlog

from headrace.cluster.keeper import Keeper, OnStage
from headrace.cluster.process import ProcessSpec, check, fleet, next_worker
from headrace.cluster.reaper import Reaper
from headrace.cluster.redis_server import RedisServer
from headrace.config import Settings
from headrace.directory.records import Role
from headrace.errors import Unavailable

log = structlog.get_logger()

_SHARED_CPU = 0.01  # what Ray counts of a process that has none of its own
_OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes; nothing of ours goes through it


class LocalCluster:
    """Use as a context manager. The model has to be on this machine's disk already."""

    def __init__(
        self,
        settings: Settings,
        *,
        num_prefill: int,
        num_decode: int,
        port: int = 0,
        http_port: int = 0,
        on_stage: OnStage = lambda name, stage: None,
    ) -> None:
        """`port`, `http_port`: of the public APIs, 0 for any free one. `on_stage(name, stage)` is told the progress of
        the start.
        """
        self._settings = settings
        self._sizes = num_prefill, num_decode
        self._ports = port, http_port
        self._on_stage = on_stage
        self._cleanup = ExitStack()
        self.directory_url = ""
        self.folder = Path()

    def __enter__(self) -> LocalCluster:
        try:
            self._start()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._cleanup.close()

    def _start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-"))
        self._cleanup.callback(shutil.rmtree, self.folder, ignore_errors=True)
        reaper = self._reaper = Reaper(str(self.folder))
        self._cleanup.callback(reaper.close)
        self._on_stage("directory", "starting")
        server = self._cleanup.enter_context(RedisServer(secrets.token_urlsafe(24)))
        self.directory_url = server.url
        self._on_stage("directory", "serving")
        self._start_ray(reaper)
        specs = self._make_specs()
        for spec in specs:
            check(spec)
        self._keeper = Keeper(specs, self._settings, self._on_stage)
        self._cleanup.callback(self._keeper.stop)
        reaper.watch_children()
        self._keeper.start()
        reaper.watch_children()

    @property
    def router_address(self) -> str:
        return self._keeper.status("router").address or ""

    @property
    def http_address(self) -> str:
        """A URL; "": it serves no HTTP."""
        return self._keeper.status("router").http_address

    @property
    def logs(self) -> str:
        return str(self.folder / "logs")

    @property
    def worker_addresses(self) -> dict[str, str]:
        """Of those that serve now."""
        statuses = {name: self._keeper.status(name) for name in sorted(self.worker_names())}
        return {name: status.address for name, status in statuses.items() if status.address}

    def worker_names(self) -> set[str]:
        return self._keeper.names() - {"router"}

    def add_worker(self, role: Role) -> str:
        """Place one more; it shares cores with the others. Returns its name while it starts. Raises Unavailable."""
        spec = next_worker(self._worker_settings(), role, self.worker_names())
        shared = spec.settings.ray.model_copy(update={spec.kind: {"CPU": _SHARED_CPU}})
        settings = spec.settings.model_copy(update={"ray": shared})
        spec = replace(spec, settings=settings, log_file=self.folder / "logs" / f"{spec.name}.log")
        check(spec)
        self._keeper.add(spec)
        self._reaper.watch_children()
        return spec.name

    def remove_worker(self, name: str) -> None:
        """Drain it, end it, and give its place back."""
        self._keeper.remove(name)

    def restart(self) -> None:
        """Every worker, one after the other, while the others serve. Raises as the start does."""
        self._keeper.restart()

    def _start_ray(self, reaper: Reaper) -> None:
        self._on_stage("ray", "starting")
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        logging.getLogger("ray").setLevel(logging.WARNING)
        self._cleanup.callback(ray.shutdown)
        # More workers than cores share them; room for the router and for a stand-in.
        num_ranks = self._settings.engine.tensor_parallel_size
        num_places = (sum(self._sizes) + 1) * num_ranks + 1
        start_ray(num_places, self.folder / "ray", before_retry=reaper.watch_children)
        self._on_stage("ray", "serving")

    def _worker_settings(self) -> Settings:
        directory = self._settings.directory.model_copy(update={"url": self.directory_url})
        return self._settings.model_copy(update={"directory": directory})

    def _make_specs(self) -> list[ProcessSpec]:
        logs = self.folder / "logs"
        logs.mkdir()
        num_prefill, num_decode = self._sizes
        specs = fleet(self._worker_settings(), num_prefill, num_decode, *self._ports)
        shares = [(), *core_shares(sorted(os.sched_getaffinity(0)), len(specs) - 1)]
        return [
            replace(spec, cores=cores, log_file=logs / f"{spec.name}.log")
            for spec, cores in zip(specs, shares, strict=True)
        ]


def start_ray(num_cpus: int, folder: Path, before_retry: Callable[[], None] = lambda: None) -> None:
    """A Ray of its own on this machine. Tried twice: on a loaded machine its parts rarely miss one another's start."""
    for is_last in (False, True):
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=str(folder),
            )
            return
        except Exception as error:  # Ray raises plain ones here
            if is_last:
                raise Unavailable(f"Ray did not start: {error}") from error
            log.warning("ray did not start, trying once more", error=str(error))
            before_retry()
            ray.shutdown()


def core_shares(cores: list[int], num_workers: int) -> list[tuple[int, ...]]:
    """Disjoint cores for each worker where there are enough, else one core each, shared as evenly as possible."""
    if num_workers <= 0:
        return []
    each = max(1, len(cores) // num_workers)
    return [
        tuple(cores[(worker * each + i) % len(cores)] for i in range(each)) for worker in range(num_workers)
    ]
