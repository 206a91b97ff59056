"""The values of the Helm chart: names, types, defaults and what they mean. `tools/generate_chart.py` makes of it
values.yaml, values.schema.json and the table in the chart's README.

What is a setting of Headrace stays one, under its own name (`settings`): the chart invents no second name for it.
Settings that the chart derives from other values (addresses, ports, files) can not be set, and what the pools must
agree on can be set for all at once only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from headrace.config import Settings

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
Object = dict[str, Any]
Quantity = Annotated[str, Field(pattern=r"^[0-9.]+([EPTGMk]i?|m)?$")]

# Sections and fields of headrace.config that a file of values may hold. Of all processes:
SHARED: Mapping[str, tuple[str, ...]] = {
    "model": ("ref", "served_name", "dtype", "quantization", "max_model_tokens"),
    "engine": ("*", "-disk_cache_dir"),
    "kv": ("*",),
    "directory": ("cluster", "worker_ttl_s", "publish_interval_s"),
    "rpc": ("*", "-host", "-port", "-advertise_host", "-tls"),
    "security": ("allow_insecure", "jwt"),
    "telemetry": ("*", "-metrics_port"),
    "log_level": (),
}
ROUTER: Mapping[str, tuple[str, ...]] = {
    "router": ("*",),
    "http": ("*", "-enabled", "-host", "-port"),
    "rpc": SHARED["rpc"],
    "telemetry": SHARED["telemetry"],
    "log_level": (),
}
# Model, block size, kind of KV, transport and lease are for all pools: a hand-off between different ones is refused.
POOL: Mapping[str, tuple[str, ...]] = {
    "engine": (*SHARED["engine"], "-block_size_tokens", "-kv_quantization"),
    "kv": ("*", "-transport", "-lease_ttl_s"),
    "rpc": SHARED["rpc"],
    "telemetry": SHARED["telemetry"],
    "log_level": (),
}


def settings_schema(scope: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """JSON schema of the settings in `scope`; what is not in it is refused by its name."""
    whole = _resolved(Settings.model_json_schema(), Settings.model_json_schema()["$defs"])["properties"]
    chosen: dict[str, Any] = {}
    for section, fields in scope.items():
        part = whole[section]
        if fields:
            removed = {field[1:] for field in fields if field.startswith("-")}
            kept = {
                name: field
                for name, field in part["properties"].items()
                if name not in removed and ("*" in fields or name in fields)
            }
            part = {"type": "object", "additionalProperties": False, "properties": kept}
        chosen[section] = part
    return {"type": "object", "additionalProperties": False, "properties": chosen}


def _resolved(schema: Any, definitions: dict[str, Any]) -> Any:
    """Without references, titles and defaults."""
    if isinstance(schema, list):
        return [_resolved(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _resolved(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
    dropped = {"default", "$defs", "format"} | ({"title"} if isinstance(schema.get("title"), str) else set())
    return {key: _resolved(value, definitions) for key, value in schema.items() if key not in dropped}


class _Values(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)


class SecretRef(_Values):
    """A key of a Secret. Empty name: none."""

    name: str = ""
    key: str = ""


def _secret(key: str, text: str) -> Any:
    return Field(default=SecretRef(key=key), description=text)


class Image(_Values):
    repository: str
    tag: str = Field(default="", description="empty: the chart's appVersion")
    digest: str = Field(default="", pattern=r"^(sha256:[0-9a-f]{64})?$", description="in place of the tag")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"


class Resources(_Values):
    model_config = ConfigDict(extra="allow", frozen=True)

    requests: Object = {}
    limits: Object = {}


class Probe(_Values):
    period_seconds: Positive
    timeout_seconds: Positive = 3
    failure_threshold: Positive


class Probes(_Values):
    """Ports and paths are the chart's own business."""

    startup: Probe = Field(
        default=Probe(period_seconds=5, failure_threshold=360),
        description="how long a start may take, the model's download included: period times threshold",
    )
    liveness: Probe = Field(
        default=Probe(period_seconds=10, timeout_seconds=5, failure_threshold=6),
        description="the event loop turns; a pod that fails this is restarted",
    )
    readiness: Probe = Field(
        default=Probe(period_seconds=5, failure_threshold=2),
        description="the process would answer a request now",
    )


class Spread(_Values):
    """As Kubernetes has it; the chart adds the selector."""

    topology_key: str = "kubernetes.io/hostname"
    max_skew: Positive = 1
    when_unsatisfiable: Literal["ScheduleAnyway", "DoNotSchedule"] = "ScheduleAnyway"


class EnvVar(_Values):
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel)

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: str | None = None
    value_from: Object | None = None


class Budget(_Values):
    enabled: bool = True
    max_unavailable: int | Annotated[str, Field(pattern=r"^[0-9]{1,3}%$")] = 1


class Pods(_Values):
    """What routers and workers have in common."""

    env: list[EnvVar] = Field(
        default=[], description="more environment variables; secrets by valueFrom.secretKeyRef"
    )
    extra_args: list[str] = Field(default=[], description="more arguments of the command")
    node_selector: dict[str, str] = {}
    tolerations: list[Object] = []
    affinity: Object = {}
    topology_spread: list[Spread] = Field(
        default=[Spread()], description="spread over nodes, zones; the chart adds the selector"
    )
    priority_class_name: str = ""
    runtime_class_name: str = ""
    termination_grace_period_seconds: Positive | None = Field(
        default=None, description="null: drain time, preStopSeconds and 30; must be longer than the first two"
    )
    pre_stop_seconds: Count = Field(
        default=0, description="pause before SIGTERM, for load balancers to look elsewhere"
    )
    probes: Probes = Probes()
    pod_annotations: dict[str, str] = {}
    pod_labels: dict[str, str] = {}
    pod_security_context: Object = {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    security_context: Object = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    volumes: list[Object] = Field(default=[], description="more volumes of the pod")
    volume_mounts: list[Object] = Field(default=[], description="where they are mounted")
    pod_disruption_budget: Budget = Budget()


class RouterService(_Values):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    grpc_port: Port = 8470
    http_port: Port = 8000
    annotations: dict[str, str] = {}
    load_balancer_source_ranges: list[str] = []


class Autoscaling(_Values):
    enabled: bool = False
    min_replicas: Positive = 2
    max_replicas: Positive = 8
    target_cpu_percent: Positive = Field(default=70, alias="targetCPUPercent", description="of the requests")


class Rollout(_Values):
    max_surge: int | str = 1
    max_unavailable: int | str = 0


class Router(Pods):
    image: Image = Image(repository="headrace-router")
    replicas: Count = 2
    autoscaling: Autoscaling = Autoscaling()
    rollout: Rollout = Field(
        default=Rollout(), description="without room for one more pod: maxSurge 0, maxUnavailable 1"
    )
    service: RouterService = RouterService()
    resources: Resources = Resources(requests={"cpu": "1", "memory": "1Gi"}, limits={"memory": "4Gi"})
    pre_stop_seconds: Count = Field(
        default=5, description="pause before SIGTERM, for load balancers to look elsewhere"
    )
    settings: Object = Field(
        default={"rpc": {"drain_timeout_s": 120}},
        description="settings of routers: router, http, rpc, telemetry, log_level",
        json_schema_extra={"scope": "router"},
    )


class Accelerator(_Values):
    resource: str = Field(default="", description="such as nvidia.com/gpu; empty: none")
    count: Positive = Field(default=1, description="in each pod")


class Rdma(_Values):
    resource: str = Field(default="", description="of the device plugin, such as rdma/hca; empty: none")
    count: Positive = 1
    require: bool = Field(default=True, description="with a resource: refuse to start, and peers, without it")


class WorkerPorts(_Values):
    grpc: Port = 8471
    metrics: Port = 9100


class UpdateStrategy(_Values):
    """Of a StatefulSet: old pods go first, so no spare accelerator is needed."""

    type: Literal["RollingUpdate", "OnDelete"] = "RollingUpdate"


class DiskCache(_Values):
    enabled: bool = Field(default=False, description="evicted KV blocks go to a volume of each pod")
    size: Quantity = "20Gi"
    storage_class: str = ""


class Pool(Pods):
    role: Literal["prefill", "decode"] = "decode"
    replicas: Count = 1
    image: Image = Image(repository="headrace-worker")
    accelerator: Accelerator = Accelerator()
    resources: Resources = Resources(requests={"cpu": "2", "memory": "6Gi"}, limits={"memory": "8Gi"})
    rdma: Rdma = Rdma()
    host_network: bool = Field(default=False, description="NetworkPolicy does not hold then")
    ports: WorkerPorts = Field(
        default=WorkerPorts(), description="with hostNetwork, different ones for pools on the same nodes"
    )
    shared_memory: Quantity = Field(default="1Gi", description="/dev/shm, counted as the pod's memory")
    update_strategy: UpdateStrategy = UpdateStrategy()
    disk_cache: DiskCache = DiskCache()
    settings: Object = Field(
        default={},
        description="settings of this pool: engine, kv, rpc, telemetry, log_level",
        json_schema_extra={"scope": "pool"},
    )


class CertManager(_Values):
    issuer_name: str = ""
    issuer_kind: str = "Issuer"
    issuer_group: str = "cert-manager.io"
    duration: str = "2160h"
    renew_before: str = "720h"


class TlsSecrets(_Values):
    """Each with tls.crt, tls.key and ca.crt. The names in the certificates: docs/security.md."""

    router: str = ""
    worker: str = ""
    launcher: str = Field(default="", description="with rayCluster: has both of these names")


class Tls(_Values):
    mode: Literal["none", "secrets", "certManager"] = "none"
    secrets: TlsSecrets = TlsSecrets()
    cert_manager: CertManager = CertManager()
    front_secret: str = Field(
        default="", description="another certificate that clients see: Secret with tls.crt, tls.key"
    )
    extra_dns_names: list[str] = Field(default=[], description="certManager: more names of the router")


class Auth(_Values):
    api_keys: SecretRef = _secret("keys.yaml", "file that `headrace keys new` writes")
    cache_secret: SecretRef = _secret("cache.secret", "32 random bytes: names of tenants' blocks")
    client_ca: SecretRef = _secret("ca.crt", "clients must show a certificate of this authority")


class ExternalRedis(_Values):
    url: str = Field(
        default="",
        pattern=r"^$|^rediss?://[^@\s]+$",
        description="redis:// or rediss://, without user and password; empty: the chart starts one",
    )
    username: str = ""
    password: SecretRef = _secret("password", "its password")
    ca: SecretRef = _secret("ca.crt", "rediss: whom to trust; none: the image's authorities")


class Redis(_Values):
    """Soft state: who is alive, which worker has which blocks. Nothing of it needs a disk."""

    external: ExternalRedis = ExternalRedis()
    image: Image = Image(repository="docker.io/valkey/valkey", tag="8.1-alpine")
    password: SecretRef = _secret("password", "of the chart's own; empty: made at the first installation")
    resources: Resources = Resources(requests={"cpu": "250m", "memory": "512Mi"}, limits={"memory": "2Gi"})
    node_selector: dict[str, str] = {}
    tolerations: list[Object] = []
    priority_class_name: str = ""


class ModelCache(_Values):
    type: Literal["emptyDir", "perPod", "shared"] = Field(
        default="emptyDir", description="perPod: a claim for each pod; shared: one claim for all"
    )
    size: Quantity = "50Gi"
    storage_class: str = ""
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"] = Field(
        default="ReadWriteMany", description="of a shared claim; more than one pod needs ReadWriteMany"
    )
    existing_claim: str = Field(default="", description="shared: this claim, and the chart makes none")


class NetworkPolicy(_Values):
    enabled: bool = True
    clients: list[Object] = Field(default=[], description="peers that may reach routers; empty: all")
    monitoring: list[Object] = Field(default=[], description="peers that may scrape metrics; empty: all")


class ServiceAccount(_Values):
    create: bool = True
    name: str = ""
    annotations: dict[str, str] = {}


class Monitor(_Values):
    enabled: bool = False
    interval: str = "15s"
    labels: dict[str, str] = {}


class Dashboard(_Values):
    enabled: bool = False
    labels: dict[str, str] = {"grafana_dashboard": "1"}


class Alerts(_Values):
    enabled: bool = False
    labels: dict[str, str] = {}


class Metrics(_Values):
    service_monitor: Monitor = Field(default=Monitor(), description="for the Prometheus operator")
    dashboard: Dashboard = Field(default=Dashboard(), description="ConfigMap for Grafana's sidecar")
    alerts: Alerts = Field(default=Alerts(), description="PrometheusRule")


class RayPods(_Values):
    resources: Resources = Resources(requests={"cpu": "1", "memory": "2Gi"}, limits={"memory": "4Gi"})
    node_selector: dict[str, str] = {}
    tolerations: list[Object] = []


class RayCluster(_Values):
    """Pools as pods of KubeRay (1.5.1 or newer), not StatefulSets; `headrace up` places the workers in them."""

    enabled: bool = False
    ray_version: str = "2.60.0"
    image: Image = Image(repository="headrace-ray")
    head: RayPods = RayPods()
    launcher: RayPods = RayPods()


class Values(_Values):
    name_override: str = ""
    fullname_override: str = ""
    common_labels: dict[str, str] = {}
    image_pull_secrets: list[str] = Field(default=[], description="names of Secrets")
    settings: Object = Field(
        default={
            "model": {"ref": "smollm2-135m-instruct"},
            "engine": {"block_size_tokens": 32},
            "kv": {"transport": "nixl", "lease_ttl_s": 10},
            "directory": {"cluster": "default"},
            "rpc": {"drain_timeout_s": 60},
            "security": {"allow_insecure": False},
        },
        description="Headrace's settings of all processes, under their own names",
        json_schema_extra={"scope": "shared"},
    )
    tls: Tls = Tls()
    auth: Auth = Auth()
    router: Router = Router()
    pool_defaults: Pool = Field(default=Pool(), description="of each pool, unless it says otherwise")
    pools: dict[Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$")], Object] = Field(
        default={"prefill": {"role": "prefill"}, "decode": {"role": "decode"}},
        description="by name, with the fields of poolDefaults; at least one that decodes",
        min_length=1,
    )
    ray_cluster: RayCluster = RayCluster()
    redis: Redis = Redis()
    model_cache: ModelCache = ModelCache()
    network_policy: NetworkPolicy = NetworkPolicy()
    service_account: ServiceAccount = Field(
        default=ServiceAccount(), description="it gets no rights, and its token is not mounted"
    )
    metrics: Metrics = Metrics()
