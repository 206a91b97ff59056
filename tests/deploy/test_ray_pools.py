"""The pools as pods of KubeRay, in which `headrace up` places the workers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from headrace import config
from headrace.config import Settings
from headrace.rpc.tls import Identity, Part
from tests.support.chart import OPEN, Chart, Object, Refused, check_valid, of_kind, pods
from tests.support.command_line import assignments, parsed_arguments

RAY: dict[str, Any] = {"rayCluster": {"enabled": True}}
POOLS = {
    "prefill": {"replicas": 3},
    "decode": {"replicas": 2},
    "decode-large": {"role": "decode", "replicas": 4},
}


@pytest.fixture
def objects(chart: Chart) -> list[Object]:
    gpu = {"accelerator": {"resource": "nvidia.com/gpu"}}
    return chart.render(OPEN, RAY, {"pools": {**POOLS, "decode-large": {**POOLS["decode-large"], **gpu}}})


def launcher(objects: list[Object], folder: Path) -> tuple[dict[str, Any], Settings]:
    """Arguments of its command, and the settings that it loads."""
    pod = pods(objects)["launcher"]["spec"]
    (container,) = pod["containers"]
    parsed = parsed_arguments(container["args"])
    (volume,) = [each for each in pod["volumes"] if each["name"] == "settings"]
    path = folder / "headrace.yaml"
    path.write_text(of_kind(objects, "ConfigMap", volume["configMap"]["name"])["data"]["headrace.yaml"])
    return parsed, config.load(path, assignments(parsed), {})


def test_it_is_valid_and_takes_the_place_of_statefulsets(objects: list[Object]) -> None:
    check_valid(objects)
    assert "StatefulSet" not in {each["kind"] for each in objects}
    assert set(pods(objects)) == {"router", "redis", "launcher", "ray-head", *POOLS}


def test_each_worker_has_a_place_in_a_pod_of_its_pool(objects: list[Object], tmp_path: Path) -> None:
    parsed, settings = launcher(objects, tmp_path)
    assert (parsed["prefill"], parsed["decode"]) == (3, 2 + 4)
    cluster = of_kind(objects, "RayCluster")
    assert parsed["ray_address"] == f"ray://{cluster['metadata']['name']}-head-svc:10001"
    groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    for role in ("prefill", "decode"):
        wanted = getattr(settings.ray, role)
        found = [group for group in groups.values() if resources(group) == wanted]
        assert sum(group["replicas"] for group in found) == parsed[role]
    assert resources(cluster["spec"]["headGroupSpec"]) == settings.ray.router
    limits = groups["decode-large"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == 1


def resources(group: Object) -> dict[str, float]:
    """What Ray is told through a shell."""
    (text,) = shlex.split(group["rayStartParams"]["resources"])
    return json.loads(text)


def test_ports_are_those_of_the_settings(objects: list[Object], tmp_path: Path) -> None:
    parsed, settings = launcher(objects, tmp_path)
    for name, grpc in (("ray-head", parsed["port"]), ("decode", settings.rpc.port)):
        ports = {
            each["name"]: each["containerPort"]
            for each in pods(objects)[name]["spec"]["containers"][0]["ports"]
        }
        assert (ports["grpc"], ports["metrics"]) == (grpc, settings.telemetry.metrics_port)


def test_all_find_their_files_and_the_launcher_can_be_both(chart: Chart, tmp_path: Path) -> None:
    protected = {
        **RAY,
        "tls": {"mode": "certManager", "certManager": {"issuerName": "ca"}},
        "auth": {"apiKeys": {"name": "keys"}},
    }
    objects = chart.render(protected)
    check_valid(objects)
    _, settings = launcher(objects, tmp_path)
    needed = {str(settings.rpc.tls.ca_file), str(settings.directory.password_file)}
    for name in ("launcher", "ray-head", "decode"):
        files = needed | ({str(settings.security.api_keys_file)} if name != "decode" else set[str]())
        assert files <= mounted(pods(objects)[name]["spec"]), name
    uris = of_kind(objects, "Certificate", "launcher-tls")["spec"]["uris"]
    parts = {identity.part for uri in uris if (identity := Identity.from_uri(uri))}
    assert parts == {Part.ROUTER, Part.WORKER}
    with pytest.raises(Refused, match=r"tls\.secrets\.launcher"):
        chart.render({**protected, "tls": {"mode": "secrets", "secrets": {"router": "a", "worker": "b"}}})


def mounted(spec: Object) -> set[str]:
    volumes = {each["name"]: each.get("secret", {}).get("items", []) for each in spec["volumes"]}
    return {
        f"{mount['mountPath']}/{item['path']}"
        for mount in spec["containers"][0]["volumeMounts"]
        for item in volumes[mount["name"]]
    }


def test_the_token_of_ray_is_the_operators(objects: list[Object]) -> None:
    cluster = of_kind(objects, "RayCluster")
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    environment = {each["name"]: each for each in pods(objects)["launcher"]["spec"]["containers"][0]["env"]}
    secret = environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": cluster["metadata"]["name"], "key": "auth_token"}


@pytest.mark.parametrize(
    "pool",
    [
        {"settings": {"engine": {"max_sequences": 8}}},
        {"extraArgs": ["--set", "log_level=debug"]},
        {"diskCache": {"enabled": True}},
        {"hostNetwork": True},
    ],
    ids=lambda pool: next(iter(pool)),
)
def test_what_pods_of_ray_can_not_have_is_refused(chart: Chart, pool: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=rf"pools\.decode.*{next(iter(pool))}"):
        chart.render(OPEN, RAY, {"pools": {"decode": pool}})


def test_the_operator_cuts_no_name(chart: Chart) -> None:
    objects = chart.render(OPEN, RAY, release="a-release-with-a-name-of-fifty-three-characters-indee")
    check_valid(objects)
    name = of_kind(objects, "RayCluster")["metadata"]["name"]
    assert len(f"{name}-head-svc") <= 50
