"""What carries the bytes between two workers, as far as their hosts tell: RDMA, shared memory or TCP.

UCX chooses by itself and does not say what; this is its order of preference, over the devices that exist and that its
settings (UCX_TLS, UCX_NET_DEVICES) allow. Each worker tells the other about its own host at the handshake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import InvalidRequest
from headrace.rpc.v1 import kv_pb2

_RDMA_FAMILIES = ("rc", "dc")  # of "ib"; the third, ud, has no one-sided READs
# Of these, only CMA notices that a peer is lost, so it is the one in use.
_SHARED_MEMORY = ("sm", "shm", "cma")
_PORT_STATES = "sys/class/infiniband/*/ports/*/state"


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    name: str
    link_layer: str  # "InfiniBand" or "Ethernet"; the two do not talk to each other


@dataclass(frozen=True, slots=True)
class Host:
    """Where a worker runs."""

    boot_id: str = ""
    pid_namespace: str = ""
    shared_memory: bool = False
    rdma_devices: tuple[RdmaDevice, ...] = ()
    tcp_device: str = ""

    @classmethod
    def find(cls, environment: Mapping[str, str], root: Path = Path("/")) -> Host:
        """This host, for UCX with that environment."""
        tls, devices = environment.get("UCX_TLS", "all"), environment.get("UCX_NET_DEVICES", "all")
        rdma = _find_rdma_devices(root, devices) if _allows_rdma(tls) else ()
        return cls(
            boot_id=_text(root / "proc/sys/kernel/random/boot_id"),
            pid_namespace=_target(root / "proc/self/ns/pid"),
            shared_memory=any(_allows(tls, name) for name in _SHARED_MEMORY),
            rdma_devices=rdma,
            tcp_device=_find_tcp_device(root, devices),
        )

    def described(self) -> list[str]:
        """The RDMA devices, for people."""
        return [f"{device.name} ({device.link_layer})" for device in self.rdma_devices]

    def require_rdma(self) -> None:
        """Raises InvalidRequest."""
        if not self.rdma_devices:
            raise InvalidRequest(
                "kv.require_rdma",
                True,  # noqa: FBT003 - the value of the setting
                f"no RDMA device was found: none in /{_PORT_STATES} is ACTIVE"
                " and allowed by UCX_TLS and UCX_NET_DEVICES",
            )

    def to_proto(self) -> kv_pb2.Host:
        return kv_pb2.Host(
            boot_id=self.boot_id,
            pid_namespace=self.pid_namespace,
            shared_memory=self.shared_memory,
            rdma_devices=[kv_pb2.RdmaDevice(name=d.name, link_layer=d.link_layer) for d in self.rdma_devices],
            tcp_device=self.tcp_device,
        )

    @classmethod
    def from_proto(cls, message: kv_pb2.Host) -> Host:
        return cls(
            boot_id=message.boot_id,
            pid_namespace=message.pid_namespace,
            shared_memory=message.shared_memory,
            rdma_devices=tuple(RdmaDevice(d.name, d.link_layer) for d in message.rdma_devices),
            tcp_device=message.tcp_device,
        )


@dataclass(frozen=True, slots=True)
class Carrier:
    """`transport` is "rdma", "shm", "tcp" or "local"; `device` is ours."""

    transport: str
    device: str

    def __str__(self) -> str:
        return f"{self.transport} {self.device}".strip()


def carrier_between(ours: Host, theirs: Host, transport: str) -> Carrier:
    """`transport` is the name that the layout has."""
    if transport != "nixl":
        return Carrier(transport, "memory")
    same_host = ours.boot_id != "" and (ours.boot_id, ours.pid_namespace) == (
        theirs.boot_id,
        theirs.pid_namespace,
    )
    if same_host and ours.shared_memory and theirs.shared_memory:
        return Carrier("shm", "cma")
    layers = {device.link_layer for device in theirs.rdma_devices}
    for device in ours.rdma_devices:
        if device.link_layer in layers:
            return Carrier("rdma", device.name)
    return Carrier("tcp", ours.tcp_device)


def _allows(choice: str, name: str) -> bool:
    """Whether a list of UCX's ("a,b", "all", or "^a,b" for all but these) takes the name."""
    names = {each.strip() for each in choice.removeprefix("^").split(",")}
    if choice.startswith("^"):
        return name not in names
    return name in names or "all" in names


def _allows_rdma(tls: str) -> bool:
    if tls.startswith("^"):
        return _allows(tls, "ib") and any(_allows(tls, family) for family in _RDMA_FAMILIES)
    names = [each.strip() for each in tls.split(",")]
    return any(name in ("all", "ib") or name.partition("_")[0] in _RDMA_FAMILIES for name in names)


def _find_rdma_devices(root: Path, devices: str) -> tuple[RdmaDevice, ...]:
    found: dict[str, RdmaDevice] = {}
    for state in sorted(root.glob(_PORT_STATES)):
        port, name = state.parent.name, state.parents[2].name
        allows_port = _allows(devices, f"{name}:{port}")
        allowed = (
            allows_port and _allows(devices, name)
            if devices.startswith("^")
            else (allows_port or _allows(devices, name))
        )
        if allowed and "ACTIVE" in _text(state).split():
            found.setdefault(name, RdmaDevice(name, _text(state.with_name("link_layer"))))
    return tuple(found.values())


def _find_tcp_device(root: Path, devices: str) -> str:
    """The first allowed one, where named; else the one with the default route. Empty if there is none."""
    known = {path.name for path in root.glob("sys/class/net/*")}
    if not devices.startswith("^"):
        for name in devices.split(","):
            if name.strip() in known:
                return name.strip()
    for line in _text(root / "proc/net/route").splitlines()[1:]:
        name, destination, *_ = line.split()
        if destination == "00000000" and _allows(devices, name):
            return name
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""
