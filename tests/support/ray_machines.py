"""Machines of a Ray cluster, each `ray start` as an operator runs it, all on this one; and `headrace up` on them."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.processes import HEADRACE, eventually, free_port

_RAY = Path(sys.executable).parent / "ray"
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 15.0
ENVIRONMENT = {
    **os.environ,
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}


class Machine:
    """What `ray start` started, its workers included."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.popen = popen
        self.log = log

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Those whose command line holds `name`, eldest first."""
        found = []
        for process in psutil.Process(self.popen.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if name in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def kill(self) -> None:
        """As if the plug was pulled: all at once."""
        with suppress(psutil.NoSuchProcess):
            for process in (psutil.Process(self.popen.pid), *self.processes()):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.popen.wait()


class RayMachines:
    """A context manager. The first machine added is the head."""

    def __init__(self) -> None:
        # Ray's sockets lie in it, and their paths may have 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="hr-"))
        self._port = free_port()
        self.client_port = free_port()
        self.machines: list[Machine] = []

    def __enter__(self) -> RayMachines:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for machine in reversed(self.machines):
            with suppress(psutil.NoSuchProcess):
                children = machine.processes()
                machine.popen.send_signal(signal.SIGTERM)
                psutil.wait_procs([psutil.Process(machine.popen.pid), *children], _STOP_TIMEOUT_S)
            machine.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def address(self) -> str:
        """As machines and drivers know it."""
        return f"{self.ip}:{self._port}"

    @property
    def ip(self) -> str:
        text = self.machines[0].log.read_text()
        return text.partition("Local node IP: ")[2].split()[0]

    def logged(self, words: str) -> list[str]:
        """Lines with these words in what the actors wrote, of all machines."""
        files = self._folder.glob("session_latest/logs/worker-*")
        return [
            line for file in files for line in file.read_text(errors="replace").splitlines() if words in line
        ]

    def add(self, num_cpus: float, resources: str = "{}") -> Machine:
        """Returns once it takes part. `resources`: more of them, as JSON."""
        if self.machines:
            role = [f"--address={self.address}"]
        else:
            role = ["--head", f"--port={self._port}", f"--ray-client-server-port={self.client_port}"]
            role += ["--include-dashboard=false", f"--temp-dir={self._folder}"]
        log = self._folder / f"machine-{len(self.machines)}.log"
        options = [
            *role,
            "--block",
            "--disable-usage-stats",
            f"--num-cpus={num_cpus}",
            f"--resources={resources}",
            f"--object-store-memory={80 << 20}",
            f"--dashboard-agent-listen-port={free_port()}",
            "--min-worker-port=0",  # any free ones
            "--max-worker-port=0",
        ]
        with log.open("wb") as output:
            popen = subprocess.Popen(
                [str(_RAY), "start", *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=ENVIRONMENT,
                start_new_session=True,
            )
        machine = Machine(popen, log)
        self.machines.append(machine)
        eventually(lambda: self._runs(machine), f"Ray runs: {log.read_text()}", _START_TIMEOUT_S)
        return machine

    def _runs(self, machine: Machine) -> bool:
        assert machine.popen.poll() is None, machine.log.read_text()
        return "Ray runtime started" in machine.log.read_text()


class Launcher:
    """`headrace up …` in a process of its own."""

    def __init__(self, folder: Path, *arguments: str, environment: dict[str, str] = ENVIRONMENT) -> None:
        self.log = folder / f"up-{secrets.token_hex(2)}.log"
        ports = ("--port", str(free_port()), "--http-port", str(free_port()))
        with self.log.open("wb") as output:
            self.popen = subprocess.Popen(
                [str(HEADRACE), "up", *ports, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until_serving(self) -> str:
        """Returns the router's address."""
        eventually(self._serves, f"headrace up serves: {self.text[-3000:]}", timeout_s=180)
        return self.text.partition("router     ")[2].split()[0]

    def _serves(self) -> bool:
        assert self.popen.poll() is None, self.text
        return "Ctrl-C stops it" in self.text

    def wait(self, timeout_s: float = 60.0) -> int:
        """Until it ends by itself. Returns its exit status."""
        return self.popen.wait(timeout_s)

    def end(self, signum: signal.Signals = signal.SIGTERM) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(signum)
        try:
            return self.popen.wait(60)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            raise
