"""Several hosts on one machine: network namespaces on a bridge, and a pid namespace for each process.

    root namespace   bridge 198.18.N.1: Redis, router, client
        node A       198.18.N.11
        node B       198.18.N.12

What UCX and Headrace take one host for another by (network, processes) differs between nodes, so blocks move over TCP.
All of it is gone at the end: processes first, then links and namespaces.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from headrace.cluster.redis_server import find_binary
from tests.support.processes import eventually, free_port

_COMMAND_TIMEOUT_S = 20.0
_WITH_US = ("setpriv", "--pdeathsig", "KILL")  # ends when we do, even if we are killed
# Fork: the child is process 1 of its namespace. It ends with `unshare`, and with it all that it has started.
_OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_NEEDED = ("ip", "tc", "iptables", "unshare", "setpriv")


def run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


class Node:
    """One host: a namespace with one link to the bridge."""

    def __init__(self, name: str, address: str, bridge: str, gateway: str) -> None:
        self.name = name
        self._gateway = gateway
        self.address = address
        self.device = "eth0"
        self._bridge = bridge
        self._port = f"{name}p"  # the bridge's end of the link
        self._inside = ("ip", "netns", "exec", name)

    @property
    def prefix(self) -> list[str]:
        """Runs a command on this host."""
        return [*self._inside, *_WITH_US, *_OWN_PROCESSES]

    def set_up(self) -> None:
        run("ip", "netns", "add", self.name)
        run(
            *("ip", "link", "add", self._port, "type", "veth"),
            *("peer", "name", self.device, "netns", self.name),
        )
        run("ip", "link", "set", self._port, "master", self._bridge, "up")
        run("ip", "-n", self.name, "addr", "add", f"{self.address}/24", "dev", self.device)
        for device in ("lo", self.device):
            run("ip", "-n", self.name, "link", "set", device, "up")
        run("ip", "-n", self.name, "route", "add", "default", "via", self._gateway)
        self._add_bridge_of_its_own()

    def _add_bridge_of_its_own(self) -> None:
        """As a container engine makes it: on each host the same address, which leads nowhere."""
        self.inside("ip", "link", "add", "docker0", "type", "bridge")
        self.inside("ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        self.inside("ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
        self.inside("ip", "link", "set", "veth0", "master", "docker0", "up")
        for device in ("veth1", "docker0"):
            self.inside("ip", "link", "set", device, "up")

    def tear_down(self) -> None:
        for command in (("link", "del", self._port), ("netns", "del", self.name)):
            subprocess.run(["ip", *command], check=False, capture_output=True, timeout=_COMMAND_TIMEOUT_S)

    def inside(self, *command: str) -> str:
        return run(*self._inside, *command)

    def drop_from(self, *addresses: str) -> None:
        """What these send does not arrive, and nobody is told."""
        for address in addresses:
            self.inside("iptables", "-A", "INPUT", "-s", address, "-j", "DROP")

    def drop_to(self, *addresses: str) -> None:
        for address in addresses:
            self.inside("iptables", "-A", "OUTPUT", "-d", address, "-j", "DROP")

    def heal(self) -> None:
        self.inside("iptables", "-F")

    def limit(self, rate: str) -> None:
        """Of what it sends, as `tc` writes it: "4mbit"."""
        self.inside(
            *("tc", "qdisc", "replace", "dev", self.device, "root", "tbf"),
            *("rate", rate, "burst", "16kb", "latency", "2s"),
        )

    def lift_limit(self) -> None:
        self.inside("tc", "qdisc", "del", "dev", self.device, "root")

    def restore(self) -> None:
        """As it was set up, after whatever was done to it."""
        self.set_link(up=True)
        self.heal()
        _quietly(*self._inside, "tc", "qdisc", "del", "dev", self.device, "root")

    def set_link(self, *, up: bool) -> None:
        run("ip", "link", "set", self._port, "up" if up else "down")

    @property
    def sent_bytes(self) -> int:
        """Over its link, so far."""
        return int(Path(f"/sys/class/net/{self._port}/statistics/rx_bytes").read_text())


class Network:
    """The bridge and what is on it. `address` is of the host that router, Redis and client run on."""

    def __init__(self, number: int) -> None:
        self.name = f"hr{number}"
        self.subnet = f"198.18.{number}"
        self.address = f"{self.subnet}.1"
        self.nodes: list[Node] = []

    def add_node(self) -> Node:
        name = f"{self.name}{chr(ord('a') + len(self.nodes))}"
        node = Node(name, f"{self.subnet}.{11 + len(self.nodes)}", self.name, self.address)
        self.nodes.append(node)
        node.set_up()
        return node


@contextmanager
def network() -> Iterator[Network]:
    """A bridge without nodes. Skips where the machine does not allow that."""
    _skip_if_not_allowed()
    with ExitStack() as stack:
        number = _claim_subnet()
        stack.callback(_quietly, "ip", "link", "del", f"hr{number}")
        run("ip", "addr", "add", f"198.18.{number}.1/24", "dev", f"hr{number}")
        run("ip", "link", "set", f"hr{number}", "up")
        net = Network(number)
        stack.callback(lambda: [node.tear_down() for node in net.nodes])
        yield net


@contextmanager
def redis_at(host: str) -> Iterator[str]:
    """One that other hosts reach; that of local clusters is for loopback only. Gives its URL."""
    port = free_port()
    options = {"port": port, "bind": host, "protected-mode": "no", "save": "", "appendonly": "no"}
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    server = subprocess.Popen([*_WITH_US, find_binary(), *arguments], stdout=subprocess.DEVNULL)

    def answers() -> bool:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except OSError:
            return False
        return True

    try:
        eventually(answers, "Redis answers", timeout_s=20)
        yield f"redis://{host}:{port}/0"
    finally:
        server.kill()
        server.wait()


def _claim_subnet() -> int:
    """Making the bridge claims its number: others may run the same tests beside us."""
    for attempt in range(250):
        number = 1 + (os.getpid() + attempt) % 250
        command = ["ip", "link", "add", f"hr{number}", "type", "bridge"]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S
        )
        if done.returncode == 0:
            return number
        if "File exists" not in done.stderr:
            pytest.skip(f"no bridge can be made here: {done.stderr.strip()}")
    raise AssertionError("all subnets are taken")


def _skip_if_not_allowed() -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    missing = [program for program in _NEEDED if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    probe = ["unshare", "--net", *_OWN_PROCESSES[1:], "iptables", "-L", "-n"]
    done = subprocess.run(probe, check=False, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    if done.returncode:
        pytest.skip(f"no namespaces with iptables can be made here: {done.stderr.strip()}")


def _quietly(*command: str) -> None:
    subprocess.run(command, check=False, capture_output=True, timeout=_COMMAND_TIMEOUT_S)
