"""What is asked of Ray, and what is refused before it is asked."""

import pickle

import pytest

from headrace.cluster.placement import bundles, check_feasible, reachable
from headrace.cluster.process import fleet, next_worker
from headrace.cluster.ray_cluster import RayCluster, connect
from headrace.config import Settings
from headrace.directory.records import Role
from headrace.errors import InvalidRequest, Unavailable

WANTED = {"prefill": {"GPU": 1, "prefill": 1}, "decode": {"GPU": 2, "decode": 0.5}, "router": {"CPU": 0.5}}


def specs(num_prefill, num_decode, **ray):
    return fleet(Settings.model_validate({"ray": {**WANTED, **ray}}), num_prefill, num_decode, 0, 0)


def test_each_kind_asks_for_its_own():
    router, prefill, decode = specs(1, 1)
    assert bundles(router) == [{"CPU": 0.5}]
    assert bundles(prefill) == [{"GPU": 1, "prefill": 1}]
    assert bundles(decode) == [{"GPU": 2, "decode": 0.5}]


MACHINES = [{"CPU": 2, "memory": 1e9, "node:10.0.0.1": 1}, {"GPU": 2, "prefill": 1}, {"GPU": 4, "decode": 1}]


@pytest.mark.parametrize(
    ("sizes", "ray", "words"),
    [
        ((1, 2), {}, ""),
        ((2, 1), {}, "they need 2 prefill, the cluster has 1$"),
        ((0, 3), {}, "they need 1.5 decode, the cluster has 1"),
        ((0, 4), {}, "they need 8 GPU, the cluster has 6; they need 2 decode, the cluster has 1$"),
        ((1, 0), {"prefill": {"GPU": 3, "prefill": 1}}, "no machine has all of 3 GPU, 1 prefill"),
        ((1, 0), {"prefill": {"TPU": 1}}, r"it needs 1 TPU, .* has 0 \(machines: 2 CPU; 2 GPU, 1 prefill; "),
    ],
)
def test_what_can_never_be_placed_is_named(sizes, ray, words):
    if not words:
        check_feasible(specs(*sizes, **ray), MACHINES)
        return
    with pytest.raises(Unavailable, match=words):
        check_feasible(specs(*sizes, **ray), MACHINES)


def test_without_machines_everything_is_missing():
    with pytest.raises(Unavailable, match=r"the largest machine has 0 \(machines: none\)"):
        check_feasible(specs(0, 1), [])


@pytest.mark.parametrize(
    ("rpc", "host", "advertised"),
    [
        ({}, "10.0.0.7", ""),
        ({"host": "localhost"}, "10.0.0.7", ""),
        ({"host": "0.0.0.0"}, "0.0.0.0", "10.0.0.7"),
        ({"host": "0.0.0.0", "advertise_host": "name"}, "0.0.0.0", "name"),
        ({"host": "10.1.0.7"}, "10.1.0.7", ""),
    ],
)
def test_a_process_is_reached_at_its_own_machine(rpc, host, advertised):
    settings = reachable(Settings.model_validate({"rpc": rpc}), "10.0.0.7")
    assert (settings.rpc.host, settings.rpc.advertise_host) == (host, advertised)


def test_settings_cross_processes_whole(tmp_path):
    settings = Settings.model_validate(
        {
            "directory": {"url": "redis://:secret@host:1/0", "password_file": str(tmp_path)},
            "router": {
                "tenants": {"a": {"weight": 2}},
                "classes": {"c": {"ttft_target_s": 1, "itl_target_s": 1}},
            },
            "ray": WANTED,
        }
    )
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_a_redis_at_home_is_none_for_two_machines():
    cluster = RayCluster(Settings(), "auto", num_prefill=1, num_decode=1)
    with pytest.raises(InvalidRequest, match=r"directory.url: 'redis://127.0.0.1:6379/0' .* 2 machines"):
        cluster._check_directory({"10.0.0.1", "10.0.0.2"})


@pytest.mark.parametrize("wanted", [{}, {"CPU": 0}, {"CPU": -1}, {"CPU": float("inf")}])
def test_nonsense_is_no_resource(wanted):
    with pytest.raises(ValueError, match="decode"):
        Settings.model_validate({"ray": {"decode": wanted}})


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_where_no_ray_listens_that_is_said_at_once(address):
    with pytest.raises(Unavailable, match=f"no Ray at {address}: .*refused"):
        connect(address)


@pytest.mark.parametrize("address", ["nonsense", "host:", ":6379", "host:port", "ray://host"])
def test_an_address_has_a_host_and_a_port(address):
    with pytest.raises(InvalidRequest, match=r"--address: .* auto, HOST:PORT or ray://HOST:PORT"):
        connect(address)


def test_one_more_worker_gets_the_first_free_name():
    for role, names, expected in (
        (Role.DECODE, set(), "decode-0"),
        (Role.DECODE, {"decode-0", "decode-2", "prefill-1"}, "decode-1"),
        (Role.PREFILL, {"prefill-0"}, "prefill-1"),
    ):
        spec = next_worker(Settings(), role, names)
        assert (spec.name, spec.kind) == (expected, role)
