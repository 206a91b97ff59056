"""Who reaches which port of whom, by the policies that the chart makes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chart import OPEN, Chart, Object, pods

NAMESPACE = {"kubernetes.io/metadata.name": "serving"}
STRANGER = {"app": "something-else"}
ANY_PORT = "of UCX"


@pytest.fixture
def objects(chart: Chart) -> list[Object]:
    monitoring = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    gateways = [{"podSelector": {"matchLabels": {"app": "gateway"}}}]
    return chart.render(OPEN, {"networkPolicy": {"monitoring": monitoring, "clients": gateways}})


def labels(objects: list[Object], component: str) -> dict[str, str]:
    return pods(objects)[component]["metadata"]["labels"]


def lets_in(
    objects: list[Object],
    to: dict[str, str],
    port: str,
    sender: dict[str, str],
    namespace: dict[str, str] = NAMESPACE,
) -> bool:
    """As Kubernetes decides: no policy for a pod lets all in, several add up."""
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    policies = [each for each in policies if matches(each["podSelector"], to)]
    rules = [rule for policy in policies for rule in policy["ingress"]]
    return not policies or any(allows(rule, port, sender, namespace) for rule in rules)


def allows(rule: Object, port: str, sender: dict[str, str], namespace: dict[str, str]) -> bool:
    ports = [each["port"] for each in rule.get("ports", [])]
    peers = rule.get("from", [])
    return (not ports or port in ports) and (
        not peers or any(is_peer(each, sender, namespace) for each in peers)
    )


def is_peer(peer: Object, sender: dict[str, str], namespace: dict[str, str]) -> bool:
    in_namespace = (
        matches(peer["namespaceSelector"], namespace)
        if "namespaceSelector" in peer
        else namespace == NAMESPACE
    )
    return in_namespace and matches(peer.get("podSelector", {}), sender)


def matches(selector: Object, found: dict[str, str]) -> bool:
    by_label = all(found.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return by_label and all(
        found.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    )


def test_workers_are_for_routers_and_one_another(objects: list[Object]) -> None:
    router, prefill, decode = (labels(objects, name) for name in ("router", "prefill", "decode"))
    for worker in (prefill, decode):
        assert lets_in(objects, worker, "grpc", router)
        assert not lets_in(objects, worker, ANY_PORT, router)
        for other in (prefill, decode):
            assert lets_in(objects, worker, ANY_PORT, other)
            assert lets_in(objects, worker, "grpc", other)
        for sender in (STRANGER, labels(objects, "redis")):
            assert not lets_in(objects, worker, "grpc", sender)
            assert not lets_in(objects, worker, ANY_PORT, sender)


def test_redis_is_for_routers_and_workers(objects: list[Object]) -> None:
    redis = labels(objects, "redis")
    for name in ("router", "prefill", "decode"):
        assert lets_in(objects, redis, "redis", labels(objects, name))
        assert not lets_in(objects, redis, "redis", labels(objects, name), {"other": "namespace"})
    assert not lets_in(objects, redis, "redis", STRANGER)


def test_routers_are_for_the_clients_that_are_named_or_for_all(chart: Chart, objects: list[Object]) -> None:
    router = labels(objects, "router")
    for port in ("grpc", "http"):
        assert lets_in(objects, router, port, {"app": "gateway"})
        assert not lets_in(objects, router, port, STRANGER)
    to_all = chart.render(OPEN)
    assert lets_in(to_all, router, "http", STRANGER, {"other": "namespace"})


def test_metrics_are_for_those_who_watch(objects: list[Object]) -> None:
    prometheus: dict[str, Any] = {"app": "prometheus"}
    for name in ("router", "prefill", "decode"):
        to = labels(objects, name)
        assert lets_in(objects, to, "metrics", prometheus, {"kubernetes.io/metadata.name": "monitoring"})
        assert not lets_in(objects, to, "metrics", STRANGER)


def test_without_policies_nothing_is_held_back(chart: Chart) -> None:
    objects = chart.render(OPEN, {"networkPolicy": {"enabled": False}})
    assert lets_in(objects, labels(objects, "decode"), ANY_PORT, STRANGER)
