"""The chart of Helm: what it renders is valid, and what its pods run is Headrace as it is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cluster.exposure import unprotected
from headrace.rpc.tls import Identity, Part
from tests.support.chart import CHART, OPEN, Chart, Object, Refused, check_valid, of_kind, pods, settings_of
from tests.support.command_line import parsed_arguments

TRIAL = CHART / "values-trial.yaml"
TLS = {"tls": {"mode": "secrets", "secrets": {"router": "router-tls", "worker": "worker-tls"}}}
PROTECTED = {**TLS, "auth": {"apiKeys": {"name": "keys"}, "cacheSecret": {"name": "cache"}}}
PINNED = {
    "nodeSelector": {"pool": "serving"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "priorityClassName": "serving",
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
                ]
            }
        }
    },
    "topologySpread": [
        {"topologyKey": "topology.kubernetes.io/zone", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "podAnnotations": {"team": "serving"},
    "podLabels": {"team": "serving"},
    "runtimeClassName": "nvidia",
    "env": [
        {"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
    ],
    "extraArgs": ["--set", "log_level=debug"],
    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}],
    "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
}
GPU = {
    "accelerator": {"resource": "nvidia.com/gpu", "count": 1},
    "rdma": {"resource": "rdma/hca_shared_devices_a"},
    "hostNetwork": True,
    "image": {"repository": "headrace-worker", "tag": "0.1.0-cuda"},
}

VALUE_SETS: dict[str, dict[str, Any]] = {
    "open": OPEN,
    "protected": PROTECTED,
    "cert manager": {
        "tls": {
            "mode": "certManager",
            "certManager": {"issuerName": "ca"},
            "frontSecret": "public",
            "extraDnsNames": ["llm.example.org"],
        },
        "auth": {"apiKeys": {"name": "keys", "key": "k"}, "clientCa": {"name": "clients"}},
    },
    "tokens": {
        **TLS,
        "settings": {
            "security": {
                "jwt": {
                    "jwks": "https://id.example.org/jwks",
                    "issuer": "https://id.example.org",
                    "audience": "headrace",
                }
            }
        },
    },
    "gpu": {
        **PROTECTED,
        "poolDefaults": GPU,
        "pools": {"decode": {"ports": {"grpc": 8571, "metrics": 9101}}},
    },
    "pinned": {**OPEN, "router": PINNED, "poolDefaults": PINNED},
    "several pools": {
        **OPEN,
        "pools": {
            "prefill": {"replicas": 3},
            "decode": {"replicas": 2},
            "decode-large": {
                "role": "decode",
                "replicas": 1,
                **GPU,
                "ports": {"grpc": 8571, "metrics": 9101},
            },
        },
    },
    "decode only": {**OPEN, "pools": {"prefill": None}},
    "autoscaled": {**OPEN, "router": {"autoscaling": {"enabled": True}, "rollout": {"maxSurge": "25%"}}},
    "external redis": {
        **OPEN,
        "redis": {
            "external": {
                "url": "rediss://cache.example.org:6380/1",
                "username": "headrace",
                "password": {"name": "redis", "key": "pw"},
                "ca": {"name": "redis-ca"},
            }
        },
    },
    "redis with a secret": {**OPEN, "redis": {"password": {"name": "mine", "key": "pw"}}},
    "claims": {
        **OPEN,
        "modelCache": {"type": "perPod", "storageClass": "fast"},
        "poolDefaults": {"diskCache": {"enabled": True}},
    },
    "shared claim": {**OPEN, "modelCache": {"type": "shared"}},
    "existing claim": {**OPEN, "modelCache": {"type": "shared", "existingClaim": "models"}},
    "load balancer": {
        **OPEN,
        "router": {
            "service": {
                "type": "LoadBalancer",
                "annotations": {"a": "b"},
                "loadBalancerSourceRanges": ["10.0.0.0/8"],
            }
        },
    },
    "model": {
        **OPEN,
        "settings": {
            "model": {"ref": "Qwen/Qwen3-0.6B", "served_name": "qwen", "dtype": "bfloat16"},
            "engine": {"block_size_tokens": 64, "kv_quantization": "int8", "kv_memory_bytes": 17179869184},
            "security": {"allow_insecure": True},
        },
        "router": {
            "settings": {"router": {"max_inflight_requests": 4096, "tenants": {"acme": {"weight": 2.5}}}}
        },
        "pools": {"prefill": {"settings": {"engine": {"max_step_tokens": 8192}}}},
    },
    "watched": {
        **OPEN,
        "metrics": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "dashboard": {"enabled": True},
            "alerts": {"enabled": True, "labels": {"release": "prometheus"}},
        },
    },
    "names": {
        **OPEN,
        "fullnameOverride": "llm",
        "commonLabels": {"team": "x"},
        "imagePullSecrets": ["registry"],
        "serviceAccount": {"name": "mine", "create": False},
    },
}


def rendered(chart: Chart, name: str) -> list[Object]:
    return chart.render(VALUE_SETS[name])


@pytest.mark.parametrize("name", VALUE_SETS)
def test_each_set_of_values_renders_to_valid_objects_whose_commands_headrace_takes(
    chart: Chart, name: str, tmp_path: Path
) -> None:
    objects = rendered(chart, name)
    check_valid(objects)
    for component, pod in pods(objects).items():
        if component == "redis":
            continue
        settings = settings_of(objects, component, tmp_path)
        check_ports(pod["spec"]["containers"][0], settings)
        check_missing_files(pod["spec"], settings)
        part = Part.ROUTER if component == "router" else Part.WORKER
        assert settings.security.allow_insecure or not unprotected(settings, part)


def check_ports(container: Object, settings: Any) -> None:
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports["grpc"] == settings.rpc.port
    assert ports["metrics"] == settings.telemetry.metrics_port
    if "http" in ports:
        assert ports["http"] == settings.http.port and settings.http.enabled
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == "metrics"


def check_missing_files(spec: Object, settings: Any) -> None:
    """Each file that the settings name lies in a volume that is mounted."""
    container = spec["containers"][0]
    volumes = {each["name"]: each for each in spec["volumes"]}
    there: set[str] = set()
    for mount in container["volumeMounts"]:
        for item in volumes.get(mount["name"], {}).get("secret", {}).get("items", []):
            there.add(f"{mount['mountPath']}/{item['path']}")
    sections = (settings.directory, settings.rpc.tls, settings.security)
    named = {str(v) for s in sections for k, v in s if k.endswith("_file") and v is not None}
    assert named <= there
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(settings.model.cache_dir) in mounts
    if settings.engine.disk_cache_dir:
        assert settings.engine.disk_cache_dir in mounts


def test_lint(chart: Chart) -> None:
    for values in (TRIAL, OPEN, PROTECTED, VALUE_SETS["gpu"]):
        assert "0 chart(s) failed" in chart.lint(values)
    with pytest.raises(Refused, match="nonsense"):
        chart.lint({**OPEN, "nonsense": 1})


def test_the_values_for_a_trial_need_no_accelerator_no_certificates_and_no_disk(
    chart: Chart, tmp_path: Path
) -> None:
    objects = chart.render(TRIAL)
    check_valid(objects)
    kinds = {each["kind"] for each in objects}
    assert "PersistentVolumeClaim" not in kinds
    requested = [pod["spec"]["containers"][0]["resources"]["requests"] for pod in pods(objects).values()]
    assert sum(_cpus(each["cpu"]) for each in requested) <= 2, "kind's usual node"
    assert all("/" not in resource for each in requested for resource in each)
    assert settings_of(objects, "decode", tmp_path).security.allow_insecure


def _cpus(text: str) -> float:
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def test_the_generated_files_are_up_to_date() -> None:
    command = [sys.executable, "tools/generate_chart.py", "--check"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=CHART.parents[2], timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout


def test_pods_run_without_rights_and_write_only_where_they_must(chart: Chart) -> None:
    objects = rendered(chart, "protected")
    for component, pod in pods(objects).items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True, component
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
    assert not {each["kind"] for each in objects} & {
        "Role",
        "ClusterRole",
        "RoleBinding",
        "ClusterRoleBinding",
    }


def test_rdma_locks_memory_and_is_demanded(chart: Chart, tmp_path: Path) -> None:
    objects = rendered(chart, "gpu")
    container = pods(objects)["decode"]["spec"]["containers"][0]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    limits = container["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["rdma/hca_shared_devices_a"]) == (1, 1)
    assert settings_of(objects, "decode", tmp_path).kv.require_rdma
    assert not settings_of(objects, "router", tmp_path).kv.require_rdma


def test_settings_reach_all_whom_they_are_for(chart: Chart, tmp_path: Path) -> None:
    objects = rendered(chart, "model")
    router, prefill, decode = (
        settings_of(objects, name, tmp_path) for name in ("router", "prefill", "decode")
    )
    for settings in (router, prefill, decode):
        assert settings.model.ref == "Qwen/Qwen3-0.6B"
        assert settings.engine.block_size_tokens == 64
        assert settings.engine.kv_quantization == "int8"
        assert settings.engine.kv_memory_bytes == 16 << 30
    assert (prefill.engine.max_step_tokens, decode.engine.max_step_tokens) == (8192, 512)
    assert router.router.max_inflight_requests == 4096
    assert router.router.tenants["acme"].weight == 2.5


def test_a_worker_has_a_thread_for_each_processor_that_its_pod_asks_for(chart: Chart, tmp_path: Path) -> None:
    def threads(**pool: Any) -> int:
        return settings_of(
            chart.render(OPEN, {"pools": {"decode": pool}}), "decode", tmp_path
        ).engine.num_threads

    assert threads(resources={"requests": {"cpu": "6"}}) == 6
    assert threads(resources={"requests": {"cpu": "1500m"}}) == 2
    assert threads(settings={"engine": {"num_threads": 3}}) == 3


def test_a_change_of_settings_rolls_the_pods_that_it_is_for(chart: Chart) -> None:
    before = pods(chart.render(OPEN))
    after = pods(chart.render(OPEN, {"pools": {"decode": {"settings": {"engine": {"max_sequences": 8}}}}}))

    def checksum(of: dict[str, Object], component: str) -> str:
        return of[component]["metadata"]["annotations"]["checksum/settings"]

    assert checksum(before, "decode") != checksum(after, "decode")
    assert checksum(before, "prefill") == checksum(after, "prefill")


def test_what_the_chart_derives_can_not_be_set_beside_it(chart: Chart) -> None:
    for key in ("rpc.port", "rpc.host", "directory.url", "telemetry.metrics_port", "model.cache_dir"):
        with pytest.raises(Refused, match=key.rsplit(".", 1)[1]):
            chart.render(OPEN, sets=[f"settings.{key}=1"])
    for argument in ("rpc.port=1", "kv.transport=local", "directory.url=redis://x"):
        with pytest.raises(Refused, match=r"pools\.decode\.extraArgs"):
            chart.render(OPEN, {"pools": {"decode": {"extraArgs": ["--set", argument]}}})
    with pytest.raises(Refused, match=r"poolDefaults|pools\.decode\.env"):
        chart.render(OPEN, {"poolDefaults": {"env": [{"name": "HEADRACE_MODEL__REF", "value": "x"}]}})


def test_selectors_find_the_pods_of_their_component_only(chart: Chart) -> None:
    objects = rendered(chart, "several pools")
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(objects).items()}
    for each in objects:
        if each["kind"] not in ("Service", "Deployment", "StatefulSet"):
            continue
        selector = each["spec"]["selector"]
        selector = selector.get("matchLabels", selector)
        found = [name for name, of in labels.items() if selector.items() <= of.items()]
        assert found == [each["metadata"]["labels"]["app.kubernetes.io/component"]], each["metadata"]["name"]


def test_the_schema_is_valid_json_schema() -> None:
    import jsonschema

    jsonschema.Draft202012Validator.check_schema(json.loads((CHART / "values.schema.json").read_text()))
    assert yaml.safe_load((CHART / "values.yaml").read_text())["redis"]["external"]["url"] == ""


def test_names_of_objects_fit_their_references(chart: Chart) -> None:
    """Each Secret, ConfigMap and claim that a pod names is made by the chart, or was named by the values."""
    for name in VALUE_SETS:
        objects = rendered(chart, name)
        made = {(each["kind"], each["metadata"]["name"]) for each in objects}
        values = json.dumps(VALUE_SETS[name])
        for pod in pods(objects).values():
            for volume in pod["spec"]["volumes"]:
                for kind, source, key in (
                    ("Secret", "secret", "secretName"),
                    ("ConfigMap", "configMap", "name"),
                    ("PersistentVolumeClaim", "persistentVolumeClaim", "claimName"),
                ):
                    if source in volume:
                        wanted = volume[source][key]
                        assert (kind, wanted) in made or f'"{wanted}"' in values or "-tls" in wanted, wanted
        assert of_kind(objects, "Deployment", "router")


def test_the_notes_name_commands_that_are_there_and_what_is_open(chart: Chart) -> None:
    notes = chart.notes(TRIAL)
    assert "port-forward service/trial-headrace-router" in notes
    assert "allow_insecure is true" in notes and "emptyDir" in notes
    (command,) = re.findall(r"-- headrace (.*)", notes)
    parsed_arguments(command.split())
    protected = chart.notes(PROTECTED)
    assert "https://localhost" in protected and "authorization: Bearer" in protected
    assert "allow_insecure" not in protected
    assert "No pool that decodes has replicas" in chart.notes(OPEN, {"pools": {"decode": {"replicas": 0}}})


def test_certificates_have_the_names_that_processes_ask_for(chart: Chart) -> None:
    values = {**VALUE_SETS["cert manager"], "settings": {"directory": {"cluster": "blue"}}}
    objects = chart.render(values)
    for part in Part.ROUTER, Part.WORKER:
        certificate = of_kind(objects, "Certificate", f"{part}-tls")["spec"]
        (uri,) = certificate["uris"]
        assert Identity.from_uri(uri) == Identity("blue", part)
        assert {"server auth", "client auth"} <= set(certificate["usages"])
        component = "router" if part == Part.ROUTER else "decode"
        volumes = pods(objects)[component]["spec"]["volumes"]
        (tls,) = [each for each in volumes if each["name"] == "tls"]
        assert tls["secret"]["secretName"] == certificate["secretName"]
    worker = of_kind(objects, "Certificate", "worker-tls")["spec"]["dnsNames"]
    assert worker == ["worker.blue.headrace.internal"]
    router = of_kind(objects, "Certificate", "router-tls")["spec"]["dnsNames"]
    service = of_kind(objects, "Service", "-router")["metadata"]["name"]
    assert {service, f"{service}.serving.svc", "llm.example.org"} <= set(router)


def test_all_pods_of_headrace_are_scraped(chart: Chart, tmp_path: Path) -> None:
    objects = chart.render(VALUE_SETS["watched"])
    monitor, service = (of_kind(objects, kind, "-metrics") for kind in ("ServiceMonitor", "Service"))
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (port,) = service["spec"]["ports"]
    assert monitor["spec"]["endpoints"][0]["port"] == port["name"]
    scraped: set[str] = set()
    for name, pod in pods(objects).items():
        if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items():
            (found,) = [
                each for each in pod["spec"]["containers"][0]["ports"] if each["name"] == port["targetPort"]
            ]
            assert found["containerPort"] == settings_of(objects, name, tmp_path).telemetry.metrics_port
            scraped.add(name)
    assert scraped == {"router", "prefill", "decode"}


def test_dashboard_and_alerts_are_those_of_the_repository(chart: Chart) -> None:
    objects = chart.render(VALUE_SETS["watched"])
    grafana = CHART.parents[1] / "grafana"
    dashboard = of_kind(objects, "ConfigMap", "-dashboard")["data"]["dashboard.json"]
    assert json.loads(dashboard) == json.loads((grafana / "dashboard.json").read_text())
    assert of_kind(objects, "PrometheusRule", "-alerts")["spec"] == yaml.safe_load(
        (grafana / "alerts.yaml").read_text()
    )


def test_the_values_of_the_readme_render(chart: Chart, tmp_path: Path) -> None:
    (values,) = re.findall(r"```yaml\n(.*?)```", (CHART / "README.md").read_text(), re.DOTALL)
    objects = chart.render(yaml.safe_load(values))
    check_valid(objects)
    assert settings_of(objects, "prefill", tmp_path).engine.max_step_tokens == 8192
    assert of_kind(objects, "StatefulSet", "-decode")["spec"]["replicas"] == 8
