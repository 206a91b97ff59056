"""HE-01: odd values of the chart. Each renders to valid objects with the value in place, or is refused by a
message that names the key.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.chart import OPEN, Chart, Object, Refused, check_valid, of_kind, pods, settings_of


def refused(chart: Chart, *values: dict[str, Any], sets: tuple[str, ...] = ()) -> str:
    with pytest.raises(Refused) as info:
        chart.render(OPEN, *values, sets=sets)
    return str(info.value)


@pytest.mark.parametrize("replicas", [0, 2])
def test_he01_replicas_are_kept_zero_included(chart: Chart, replicas: int) -> None:
    objects = chart.render(
        OPEN, {"router": {"replicas": replicas}, "pools": {"decode": {"replicas": replicas}}}
    )
    check_valid(objects)
    assert of_kind(objects, "Deployment", "-router")["spec"]["replicas"] == replicas
    assert of_kind(objects, "StatefulSet", "-decode")["spec"]["replicas"] == replicas
    assert of_kind(objects, "StatefulSet", "-prefill")["spec"]["replicas"] == 1


@pytest.mark.parametrize("key", ["router", "poolDefaults", "pools.decode"])
@pytest.mark.parametrize("replicas", ['"2"', "-1", "1.5"])
def test_he01_replicas_that_are_no_count_are_refused(chart: Chart, key: str, replicas: str) -> None:
    values: dict[str, Any] = {"replicas": json.loads(replicas)}
    for part in reversed(key.split(".")):
        values = {part: values}
    assert "/".join([*key.split("."), "replicas"]) in refused(chart, values)


def test_he01_no_pools_are_refused(chart: Chart) -> None:
    assert "pools" in refused(chart, {"pools": {"prefill": None, "decode": None}})


def test_he01_pools_that_only_prefill_are_refused(chart: Chart) -> None:
    message = refused(chart, {"pools": {"decode": None}})
    assert "pools: at least one pool needs role decode" in message


@pytest.mark.parametrize("mode", ["ReadWriteOnce", "ReadWriteOncePod"])
def test_he01_a_volume_of_one_writer_for_several_pods_is_refused(chart: Chart, mode: str) -> None:
    cache = {"modelCache": {"type": "shared", "accessMode": mode}}
    message = refused(chart, cache, {"pools": {"decode": {"replicas": 2}}})
    assert "modelCache.accessMode" in message and "perPod" in message
    assert "modelCache.accessMode" in refused(
        chart, {"modelCache": {**cache["modelCache"], "existingClaim": "models"}}
    )


def test_he01_a_claim_for_each_pod_has_one_writer(chart: Chart) -> None:
    objects = chart.render(OPEN, {"modelCache": {"type": "perPod"}, "pools": {"decode": {"replicas": 2}}})
    check_valid(objects)
    (claim,) = of_kind(objects, "StatefulSet", "-decode")["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    volumes = pods(objects)["router"]["spec"]["volumes"]
    (cache,) = [each for each in volumes if each["name"] == "model-cache"]
    assert "ephemeral" in cache, "a Deployment's pods can not share one claim, so each has its own"


def test_he01_without_an_accelerator_no_device_is_asked_for(chart: Chart) -> None:
    objects = chart.render(OPEN)
    for pod in pods(objects).values():
        for container in pod["spec"]["containers"]:
            for amounts in container["resources"].values():
                assert all("/" not in resource for resource in amounts)


def test_he01_pods_go_where_they_are_told(chart: Chart) -> None:
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    placed = {"nodeSelector": {"disk": "fast"}, "tolerations": [toleration], "priorityClassName": "high"}
    objects = chart.render(OPEN, {"poolDefaults": placed, "router": placed, "redis": placed})
    check_valid(objects)
    assert set(pods(objects)) == {"router", "prefill", "decode", "redis"}
    for pod in pods(objects).values():
        for key, value in placed.items():
            assert pod["spec"][key] == value


def test_he01_probes_can_be_set_and_a_start_has_its_own(chart: Chart) -> None:
    probes = {
        "startup": {"periodSeconds": 7, "failureThreshold": 100},
        "liveness": {"periodSeconds": 11, "timeoutSeconds": 9, "failureThreshold": 3},
        "readiness": {"periodSeconds": 13, "failureThreshold": 4},
    }
    objects = chart.render(OPEN, {"router": {"probes": probes}, "poolDefaults": {"probes": probes}})
    check_valid(objects)
    for name in ("router", "prefill", "decode"):
        container = pods(objects)[name]["spec"]["containers"][0]
        for probe, wanted in probes.items():
            assert wanted.items() <= container[f"{probe}Probe"].items()
        # A start that takes long is no reason to kill; a process that is alive but not ready is neither.
        assert container["livenessProbe"]["httpGet"]["path"] != container["readinessProbe"]["httpGet"]["path"]


def test_he01_a_default_start_may_take_half_an_hour(chart: Chart) -> None:
    for name in ("router", "prefill", "decode"):
        probe = pods(chart.render(OPEN))[name]["spec"]["containers"][0]["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800


def test_he01_pre_stop_and_grace_period_can_be_set(chart: Chart) -> None:
    values = {"terminationGracePeriodSeconds": 300, "preStopSeconds": 20}
    objects = chart.render(OPEN, {"router": values, "poolDefaults": values})
    check_valid(objects)
    for name in ("router", "prefill", "decode"):
        spec = pods(objects)[name]["spec"]
        assert spec["terminationGracePeriodSeconds"] == 300
        assert spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "20"]


def test_he01_the_grace_period_is_longer_than_drain_and_drain_than_lease(
    chart: Chart, tmp_path: Path
) -> None:
    objects = chart.render(OPEN, sets=("settings.rpc.drain_timeout_s=200",))
    for name in ("prefill", "decode"):
        settings = settings_of(objects, name, tmp_path)
        grace = pods(objects)[name]["spec"]["terminationGracePeriodSeconds"]
        assert grace > settings.rpc.drain_timeout_s == 200 > settings.kv.lease_ttl_s


@pytest.mark.parametrize(
    ("sets", "names"),
    [
        (
            ("pools.decode.terminationGracePeriodSeconds=60",),
            ("pools.decode.terminationGracePeriodSeconds (60)", "rpc.drain_timeout_s (60)"),
        ),
        (
            ("router.terminationGracePeriodSeconds=124",),
            ("router.terminationGracePeriodSeconds (124)", "router.preStopSeconds (5)"),
        ),
        (
            ("settings.kv.lease_ttl_s=60",),
            ("settings.rpc.drain_timeout_s (60)", "settings.kv.lease_ttl_s (60)"),
        ),
        (
            ("pools.prefill.settings.rpc.drain_timeout_s=10",),
            ("pools.prefill: settings.rpc.drain_timeout_s (10)", "settings.kv.lease_ttl_s (10)"),
        ),
    ],
)
def test_he01_times_that_cut_a_drain_short_are_refused(
    chart: Chart, sets: tuple[str, ...], names: tuple[str, ...]
) -> None:
    message = refused(chart, sets=sets)
    for name in names:
        assert name in message


def test_he01_long_release_names_fit_and_stay_apart(chart: Chart) -> None:
    long = "a-release-with-a-name-of-fifty-three-characters-indee"
    assert len(long) == 53
    pool = {"pools": {"a-pool-of-20-letters": {"role": "decode"}}}
    metrics = {"metrics": {name: {"enabled": True} for name in ("serviceMonitor", "dashboard", "alerts")}}
    objects = chart.render(OPEN, pool, metrics, release=long)
    check_valid(objects)
    for each in objects:
        # Kubernetes makes labels of it: name and a hash of 10 digits; name and a number.
        assert len(each["metadata"]["name"]) <= 52, each["metadata"]["name"]
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", each["metadata"]["name"])
    others = chart.render(OPEN, pool, release=long[:-1] + "x")
    assert not _names(objects) & _names(others)


def _names(objects: list[Object]) -> set[str]:
    return {each["metadata"]["name"] for each in objects}


def test_he01_a_block_size_for_one_pool_is_refused(chart: Chart) -> None:
    for key in ("blockSizeTokens", "block_size_tokens"):
        assert key in refused(chart, {"pools": {"prefill": {key: 64}}})
    message = refused(chart, {"pools": {"prefill": {"settings": {"engine": {"block_size_tokens": 64}}}}})
    assert "block_size_tokens" in message and "pools/prefill/settings/engine" in message
    by_argument = {"pools": {"prefill": {"extraArgs": ["--set", "engine.block_size_tokens=64"]}}}
    assert "pools.prefill.extraArgs" in refused(chart, by_argument)
    by_env = {"pools": {"prefill": {"env": [{"name": "HEADRACE_ENGINE__BLOCK_SIZE_TOKENS", "value": "64"}]}}}
    assert "pools.prefill.env" in refused(chart, by_env)


def test_he01_pools_share_block_size_model_and_transport(chart: Chart, tmp_path: Path) -> None:
    shared = {
        "settings": {
            "engine": {"block_size_tokens": 64},
            "kv": {"transport": "local"},
            "model": {"ref": "some/model"},
        }
    }
    objects = chart.render(OPEN, shared)
    check_valid(objects)
    seen = {
        (settings.engine.block_size_tokens, settings.kv.transport, settings.model.ref)
        for settings in (settings_of(objects, name, tmp_path) for name in ("prefill", "decode"))
    }
    assert seen == {(64, "local", "some/model")}
    for section, field in (("model", "ref"), ("kv", "transport")):
        assert section in refused(chart, {"pools": {"decode": {"settings": {section: {field: "local"}}}}})


REDIS = {"redis": {"external": {"url": "redis://cache:6379/0", "password": {"name": "redis", "key": "pw"}}}}


def test_he01_an_external_redis_has_its_password_from_a_secret(chart: Chart, tmp_path: Path) -> None:
    objects = chart.render(OPEN, REDIS)
    check_valid(objects)
    assert not [each for each in objects if each["metadata"]["name"].endswith("redis")], "none of its own"
    for name in ("router", "prefill", "decode"):
        settings = settings_of(objects, name, tmp_path)
        assert settings.directory.url == "redis://cache:6379/0"
        spec = pods(objects)[name]["spec"]
        (mount,) = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "redis"]
        (volume,) = [each for each in spec["volumes"] if each["name"] == "redis"]
        assert str(settings.directory.password_file) == f"{mount['mountPath']}/password"
        assert volume["secret"]["secretName"] == "redis"
        assert volume["secret"]["items"] == [{"key": "pw", "path": "password"}]


def test_he01_a_password_in_the_address_is_refused(chart: Chart) -> None:
    message = refused(chart, {"redis": {"external": {"url": "redis://:hunter2@cache:6379/0"}}})
    assert "redis/external/url" in message


def test_he01_no_secret_is_in_an_argument_a_variable_or_a_file_of_settings(chart: Chart) -> None:
    objects = chart.render(OPEN)
    secret = of_kind(objects, "Secret", "-redis")["data"]["password"]
    assert len(secret) > 40
    for each in objects:
        if each["kind"] != "Secret":
            assert secret not in json.dumps(each)
    for pod in pods(objects).values():
        for container in pod["spec"]["containers"]:
            for variable in container.get("env", []):
                assert not re.search("pass|secret|token|key", variable["name"], re.IGNORECASE)
            text = json.dumps([container["args"], container.get("command")])
            assert "$(REDIS" not in text, "Kubernetes would put it into the arguments"


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        ("nonsense=1", "nonsense"),
        ("router.replicaCount=1", "replicaCount"),
        ("pools.decode.repliacs=1", "repliacs"),
        ("poolDefaults.accelerator.counts=1", "counts"),
        ("settings.engine.blocksize=1", "blocksize"),
        ("router.settings.router.polcy=x", "polcy"),
        ("redis.external.pasword.name=x", "pasword"),
        ("networkPolicy.enable=true", "enable"),
    ],
)
def test_he01_unknown_keys_are_refused_by_name(chart: Chart, sets: str, key: str) -> None:
    assert f"'{key}'" in refused(chart, sets=(sets,))
