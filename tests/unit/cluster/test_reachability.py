from __future__ import annotations

import pytest

from headrace.cluster.reachability import with_advertised_host
from headrace.config import Settings
from headrace.errors import InvalidRequest, Unavailable


def settings(host: str, url: str = "redis://127.0.0.1:6379/0", advertise_host: str = "") -> Settings:
    rpc = {"host": host, "advertise_host": advertise_host}
    return Settings.model_validate({"rpc": rpc, "directory": {"url": url}})


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::", "[::]"])
def test_who_listens_everywhere_is_reached_where_it_reaches_the_directory_from(everywhere):
    found = with_advertised_host(settings(everywhere, "redis://user:secret@127.0.0.1/0"))
    assert found.rpc.advertise_host == "127.0.0.1"
    assert found.rpc.host == everywhere


def test_an_address_of_ipv6_is_written_as_one_that_a_port_can_follow():
    try:
        found = with_advertised_host(settings("::", "redis://[::1]:6379/0"))
    except Unavailable:
        pytest.skip("this machine has no IPv6")
    assert found.rpc.advertise_host == "[::1]"


@pytest.mark.parametrize(
    "named", [settings("127.0.0.1"), settings("10.0.0.7"), settings("0.0.0.0", advertise_host="worker-1")]
)
def test_what_is_named_stays(named):
    assert with_advertised_host(named) is named


def test_a_directory_that_is_a_file_tells_nothing():
    with pytest.raises(InvalidRequest, match=r"rpc\.advertise_host"):
        with_advertised_host(settings("0.0.0.0", "unix:///run/redis.sock"))


def test_a_directory_whose_name_is_not_known_is_named():
    with pytest.raises(Unavailable, match=r"nowhere\.invalid"):
        with_advertised_host(settings("0.0.0.0", "redis://nowhere.invalid:6379/0"))
