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
from pathlib import Path

import ray
import structlog

from headrace.cluster import placement
from headrace.cluster.placement import PlacedProcess
from headrace.cluster.process import Kind, ProcessSpec, check
from headrace.cluster.reaper import Reaper
from headrace.cluster.redis_server import RedisServer
from headrace.config import Settings
from headrace.errors import Unavailable

log = structlog.get_logger()

_START_TIMEOUT_S = 180.0
_OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes; nothing of ours goes through it

OnStage = Callable[[str, str], None]


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
        self._num_ranks = settings.engine.tensor_parallel_size
        prefill: list[Kind] = ["prefill"] * num_prefill
        decode: list[Kind] = ["decode"] * num_decode
        self._kinds = prefill + decode
        self._ports = port, http_port
        self._on_stage = on_stage
        self._cleanup = ExitStack()
        self.placed: dict[str, PlacedProcess] = {}
        self.worker_addresses: dict[str, str] = {}
        self.router_address = ""
        self.http_address = ""  # a URL
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
        reaper = Reaper(str(self.folder))
        self._cleanup.callback(reaper.close)
        self._on_stage("directory", "starting")
        server = self._cleanup.enter_context(RedisServer(secrets.token_urlsafe(24)))
        self.directory_url = server.url
        self._on_stage("directory", "serving")
        self._start_ray(reaper)
        specs = self._specs()
        for spec in specs:
            check(spec)
        for spec in specs:
            # The router shares whatever is idle; each rank of a worker has a core's worth reserved.
            bundles = [{"CPU": 0.01}] if spec.kind == "router" else [{"CPU": 1.0}] * self._num_ranks
            self.placed[spec.name] = placement.place(spec, bundles)
        placed = list(self.placed.values())
        self._cleanup.callback(placement.stop, placed, self._settings.rpc.drain_timeout_s)
        reaper.watch_children()
        addresses = placement.wait_until_serving(placed, _START_TIMEOUT_S, self._on_stage)
        reaper.watch_children()
        self.worker_addresses = dict(zip(self.placed, addresses, strict=True))
        self.router_address = self.worker_addresses.pop("router")
        self.http_address = placement.http_address(self.placed["router"])

    def _start_ray(self, reaper: Reaper) -> None:
        self._on_stage("ray", "starting")
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        logging.getLogger("ray").setLevel(logging.WARNING)
        self._cleanup.callback(ray.shutdown)
        # More workers than cores share them.
        start_ray(
            len(self._kinds) * self._num_ranks + 1, self.folder / "ray", before_retry=reaper.watch_children
        )
        self._on_stage("ray", "serving")

    def _specs(self) -> list[ProcessSpec]:
        logs = self.folder / "logs"
        logs.mkdir()
        directory = self._settings.directory.model_copy(update={"url": self.directory_url})
        settings = self._settings.model_copy(update={"directory": directory})
        port, http_port = self._ports
        ports = {
            "rpc": settings.rpc.model_copy(update={"port": port}),
            "http": settings.http.model_copy(update={"port": http_port}),
        }
        specs = [ProcessSpec("router", "router", settings.model_copy(update=ports), (), logs / "router.log")]
        shares = core_shares(sorted(os.sched_getaffinity(0)), len(self._kinds))
        counts: dict[Kind, int] = {}
        for kind, cores in zip(self._kinds, shares, strict=True):
            name = f"{kind}-{counts.get(kind, 0)}"
            counts[kind] = counts.get(kind, 0) + 1
            specs.append(ProcessSpec(name, kind, settings, cores, logs / f"{name}.log"))
        return specs


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
