"""What the tests here make is gone afterwards, however they end."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.nodes import network, run


def test_nothing_is_left_of_a_network_whose_test_failed():
    names = []
    with pytest.raises(ZeroDivisionError), network() as net:
        node = net.add_node()
        names += [net.name, node.name]
        subprocess.run([*node.prefix, "true"], check=True)
        assert node.name in run("ip", "netns", "list")
        assert net.name in run("ip", "-brief", "link")
        raise ZeroDivisionError
    assert names
    assert not any(name in run("ip", "netns", "list") for name in names)
    assert not any(name in run("ip", "-brief", "link") for name in names)
