from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import InvalidRequest
from kv_transfer.carrier import Carrier, Host, RdmaDevice, carrier_between

MLX0, MLX1 = RdmaDevice("mlx5_0", "InfiniBand"), RdmaDevice("mlx5_1", "Ethernet")
HOST = Host("boot-a", "pid:[1]", shared_memory=True, rdma_devices=(MLX0,), tcp_device="eth0")
OTHER = replace(HOST, boot_id="boot-b")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with two RDMA devices of which the second port of the second is down."""
    files = {
        "proc/sys/kernel/random/boot_id": "boot-a\n",
        "proc/net/route": "Iface\tDestination\tGateway\neth1\t0000000A\t0\neth0\t00000000\t1\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
        "sys/class/infiniband/mlx5_1/ports/1/link_layer": "Ethernet\n",
        "sys/class/infiniband/mlx5_1/ports/2/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_1/ports/2/link_layer": "Ethernet\n",
        "sys/class/net/eth0/address": "x",
        "sys/class/net/eth1/address": "x",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[1]")
    return tmp_path


def test_a_host_is_found(root):
    assert Host.find({}, root) == replace(HOST, rdma_devices=(MLX0, MLX1))


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({"UCX_TLS": "tcp,self"}, ()),
        ({"UCX_TLS": "rc_x,self"}, (MLX0, MLX1)),
        ({"UCX_TLS": "ib,cuda"}, (MLX0, MLX1)),
        ({"UCX_TLS": "ud,self"}, ()),
        ({"UCX_TLS": "^ib"}, ()),
        ({"UCX_TLS": "^rc,dc"}, ()),
        ({"UCX_TLS": "^tcp"}, (MLX0, MLX1)),
        ({"UCX_NET_DEVICES": "mlx5_0:1,eth0"}, (MLX0,)),
        ({"UCX_NET_DEVICES": "mlx5_1:1"}, ()),
        ({"UCX_NET_DEVICES": "mlx5_1:2"}, (MLX1,)),
        ({"UCX_NET_DEVICES": "mlx5_1"}, (MLX1,)),
        ({"UCX_NET_DEVICES": "^mlx5_0:1"}, (MLX1,)),
        ({"UCX_NET_DEVICES": "eth0"}, ()),
    ],
)
def test_what_ucx_may_not_use_does_not_count(root, environment, devices):
    assert Host.find(environment, root).rdma_devices == devices


@pytest.mark.parametrize(("devices", "found"), [("eth1", "eth1"), ("mlx5_0:1,eth1", "eth1"), ("^eth0", "")])
def test_the_device_for_tcp_is_the_one_that_ucx_may_use(root, devices, found):
    assert Host.find({"UCX_NET_DEVICES": devices}, root).tcp_device == found


@pytest.mark.parametrize(
    ("tls", "allowed"), [("all", True), ("tcp,self", False), ("tcp,cma", True), ("^cma,sm,shm", False)]
)
def test_shared_memory_is_what_ucx_may_use(root, tls, allowed):
    assert Host.find({"UCX_TLS": tls}, root).shared_memory == allowed


def test_a_host_without_anything_is_found_too(tmp_path):
    assert Host.find({}, tmp_path) == Host(shared_memory=True)


def test_the_message_has_the_same_values():
    host = replace(HOST, rdma_devices=(MLX0, MLX1))
    assert Host.from_proto(host.to_proto()) == host


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (HOST, HOST, Carrier("shm", "cma")),
        (HOST, OTHER, Carrier("rdma", "mlx5_0")),
        (HOST, replace(HOST, pid_namespace="pid:[2]"), Carrier("rdma", "mlx5_0")),
        (HOST, replace(HOST, shared_memory=False), Carrier("rdma", "mlx5_0")),
        (HOST, replace(OTHER, rdma_devices=()), Carrier("tcp", "eth0")),
        (HOST, replace(OTHER, rdma_devices=(MLX1,)), Carrier("tcp", "eth0")),
        (replace(HOST, rdma_devices=(MLX1, MLX0)), OTHER, Carrier("rdma", "mlx5_0")),
        (Host(shared_memory=True), Host(shared_memory=True), Carrier("tcp", "")),
    ],
)
def test_what_carries_the_bytes(ours, theirs, expected):
    assert carrier_between(ours, theirs, "nixl") == expected


def test_a_carrier_is_shown_in_two_words():
    assert str(carrier_between(HOST, OTHER, "nixl")) == "rdma mlx5_0"


def test_a_worker_that_requires_rdma_says_what_it_looked_for():
    HOST.require_rdma()
    with pytest.raises(
        InvalidRequest, match=r"kv.require_rdma.*/sys/class/infiniband/\*/ports/\*/state is ACTIVE.*UCX_TLS"
    ):
        replace(HOST, rdma_devices=()).require_rdma()
