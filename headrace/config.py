"""Settings of one process: typed, frozen, in small sections; built once at the composition root and passed down.

Order of precedence, later wins: defaults here, a YAML file (`--config`), `HEADRACE_SECTION__FIELD` in the environment,
`--set section.field=value`. Unknown keys are errors. Units are in the names. The only module that reads the
environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace.errors import InvalidRequest
from headrace.priority import MAX_PRIORITY, MIN_PRIORITY

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_CACHE_DIR = Path("~/.cache/headrace")

_ENV_PREFIX = "HEADRACE_"

_Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _check_together(section: _Section, *names: str) -> None:
    """Raises ValueError when some of the fields are set and others are not."""
    missing = [name for name in names if not getattr(section, name)]
    if missing and len(missing) < len(names):
        raise ValueError(f"{', '.join(missing)} must be set, too")


class ModelSettings(_Section):
    """Which model is served, under which name."""

    ref: str = Field(
        default=DEFAULT_MODEL, description="catalogue name, GGUF file, Hugging Face folder, or hub name"
    )
    cache_dir: Path = Field(
        default=DEFAULT_CACHE_DIR, description="where fetched models are kept; ~ is the user's home"
    )
    served_name: str = Field(default="", description="name that clients use; empty: the model's own name")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="auto: bfloat16 with the native kernels or where the processor multiplies it, else float32",
    )
    quantization: Literal["auto", "none", "int8", "int4"] = Field(
        default="auto",
        description="weights in memory. auto: quantized where the file has them so and the native kernels compute;"
        " none: all in dtype; int8, int4: rounded to it",
    )
    max_model_tokens: int = Field(
        default=0, ge=0, description="prompt and answer together; 0: what the model declares"
    )


class EngineSettings(_Section):
    """Memory and scheduling of one worker's engine."""

    block_size_tokens: Positive = 32
    num_blocks: int = Field(
        default=0, ge=0, description="KV blocks in the pool; 0: as many as kv_memory_bytes holds"
    )
    kv_memory_bytes: Positive = 1 << 30
    host_memory_bytes: int = Field(
        default=0, ge=0, description="host memory for cached blocks that the pool evicts; 0: none"
    )
    disk_cache_dir: str = Field(
        default="",
        description="directory for cached blocks that memory evicts, kept over restarts; empty: none",
    )
    disk_cache_bytes: Positive = Field(default=10 << 30, description="how much of the disk they may take")
    max_step_tokens: Positive = Field(
        default=512, description="token budget of one step: decodes first, prefill chunks fill it"
    )
    max_sequences: Positive = Field(default=64, description="sequences that run at once; others wait")
    max_waiting: Positive = Field(default=1024, description="sequences that may wait; more are refused")
    tensor_parallel_size: Positive = Field(
        default=1,
        description="ranks: processes on one machine that compute each step together, each with its share of weights"
        " and KV; kv_memory_bytes and host_memory_bytes are of all together",
    )
    rank_timeout_s: Seconds = Field(
        default=30.0,
        description="a rank that is silent for this long in the middle of a step ends its worker",
    )
    num_threads: int = Field(
        default=0,
        ge=0,
        description="compute threads of a rank; 0: one per core of this process, shared out over its ranks",
    )
    backend: Literal["auto", "cpu", "torch", "reference"] = Field(
        default="auto",
        description="cpu: native kernels; torch: operator by operator; reference: as torch, attention written out",
    )
    kv_quantization: Literal["none", "int8", "fp8"] = Field(
        default="none", description="8 bits for each number of the KV cache; none: the model's dtype"
    )
    grammar_timeout_s: Seconds = Field(
        default=5.0, description="a grammar that takes longer to compile is refused"
    )
    stall_warning_s: Seconds = Field(
        default=10.0,
        description="work waiting and nothing scheduled for this long is logged; a step that takes as long makes the"
        " worker not ready",
    )


class KvSettings(_Section):
    """Exchange of KV blocks between workers."""

    transport: Literal["nixl", "local"] = "nixl"
    lease_ttl_s: Seconds = Field(
        default=10.0, description="a hand-off's blocks stay held this long after the reader's last word"
    )
    connect_timeout_s: Seconds = 5.0
    transfer_timeout_s: Seconds = Field(
        default=10.0, description="longest time for one READ of announced blocks"
    )
    progress_timeout_s: Seconds = Field(
        default=15.0,
        description="a prefill that has started and shows no progress for this long is abandoned",
    )
    min_remote_tokens: int = Field(
        default=64,
        ge=0,
        description="a prompt with fewer uncached tokens is prefilled by the decode worker itself",
    )
    checksum: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="fraction of hand-offs and prefix fetches whose blocks are checksummed at both ends",
    )
    require_rdma: bool = Field(
        default=False,
        description="do not start without an active RDMA device, and refuse peers on other hosts that it can not reach",
    )


class DirectorySettings(_Section):
    """Redis or Valkey: who is alive, and which worker holds which blocks."""

    url: str = Field(default="redis://127.0.0.1:6379/0", repr=False)  # it can hold a password
    cluster: str = Field(default="default", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    username: str = Field(default="", description="with password_file; empty: the default user")
    password_file: Path | None = Field(default=None, description="read anew for each connection")
    ca_file: Path | None = Field(
        default=None, description="with rediss://: whom to trust; none: this machine's authorities"
    )
    cert_file: Path | None = Field(default=None, description="with rediss://: this process's certificate")
    key_file: Path | None = Field(default=None, description="of cert_file")
    worker_ttl_s: Seconds = Field(
        default=5.0, description="a worker that does not refresh its record this long is gone"
    )
    publish_interval_s: Seconds = 0.05


class TlsSettings(_Section):
    """Mutual TLS between the processes of a cluster: all three files or none. They are read again when they change."""

    ca_file: Path | None = Field(
        default=None, description="the cluster's authority: only certificates of it are accepted"
    )
    cert_file: Path | None = Field(
        default=None, description="this process's certificate; says its cluster and role (docs/security.md)"
    )
    key_file: Path | None = Field(default=None, description="of cert_file")

    @property
    def enabled(self) -> bool:
        return self.ca_file is not None

    @model_validator(mode="after")
    def _all_or_none(self) -> TlsSettings:
        _check_together(self, "ca_file", "cert_file", "key_file")
        return self


class RpcSettings(_Section):
    """The process's own server and the channels it opens."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="0: any free port")
    advertise_host: str = Field(
        default="",
        description="name or address that others reach this process by; empty: host, and where that is every address,"
        " the one from which this process reaches the directory",
    )
    max_message_bytes: Positive = 64 << 20
    keepalive_s: Seconds = Field(default=5.0, description="a silent connection is probed this often")
    keepalive_timeout_s: Seconds = Field(
        default=5.0, description="a probe unanswered this long breaks the connection"
    )
    drain_timeout_s: Seconds = Field(default=30.0, description="on SIGTERM: time for running requests to end")
    tls: TlsSettings = TlsSettings()


class JwtSettings(_Section):
    """Tokens of an identity provider. The key set's address switches them on."""

    jwks: str = Field(default="", description="https:// address or file of the key set (JWKS)")
    issuer: str = Field(default="", description="what `iss` has to be")
    audience: str = Field(default="", description="what `aud` has to be or to hold")
    tenant_claim: str = Field(default="tenant", min_length=1, description="claim that names the tenant")
    leeway_s: float = Field(default=30.0, ge=0, le=300, description="how far clocks may differ")

    @model_validator(mode="after")
    def _all_or_none(self) -> JwtSettings:
        _check_together(self, "jwks", "issuer", "audience")
        return self


class SecuritySettings(_Section):
    """The front door: who may ask, and what clients see of it. Files are read again when they change."""

    api_keys_file: Path | None = Field(
        default=None, description="hashes of API keys; `headrace keys new` writes it"
    )
    jwt: JwtSettings = JwtSettings()
    front_cert_file: Path | None = Field(
        default=None, description="the certificate that clients see; none: that of rpc.tls"
    )
    front_key_file: Path | None = Field(default=None, description="of front_cert_file")
    client_ca_file: Path | None = Field(
        default=None, description="clients must show a certificate of this authority; none: they need not"
    )
    cache_secret_file: Path | None = Field(
        default=None,
        description="secret behind the names of cached blocks, the same for all routers of a cluster;"
        " none: whoever reads the directory can find out by trying what a tenant has asked",
    )
    allow_insecure: bool = Field(
        default=False,
        description="listen on other addresses than loopback even without TLS or without credentials",
    )

    @property
    def asks_for_credentials(self) -> bool:
        return self.api_keys_file is not None or bool(self.jwt.jwks)

    @model_validator(mode="after")
    def _all_or_none(self) -> SecuritySettings:
        _check_together(self, "front_cert_file", "front_key_file")
        return self


_Resources = Annotated[dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)]


class RaySettings(_Section):
    """What `headrace up` reserves, by Ray's names of resources: CPU, GPU, accelerator_type:H100, or one of your own."""

    prefill: _Resources = Field(default={"CPU": 1.0}, description="for each rank of a prefill worker")
    decode: _Resources = Field(default={"CPU": 1.0}, description="for each rank of a decode worker")
    router: _Resources = Field(
        default={"CPU": 0.01}, description="for a router; by default it shares what is idle"
    )
    place_timeout_s: Seconds = Field(
        default=120.0, description="a process waits this long for others to free its place"
    )
    start_timeout_s: Seconds = Field(
        default=600.0, description="from its place to serving: fetching and loading the model, too"
    )


class TelemetrySettings(_Section):
    """What a process tells about itself."""

    metrics_port: int = Field(
        default=0, ge=0, le=65535, description="Prometheus scrapes it under /metrics; 0: any free port"
    )
    otlp_endpoint: str = Field(
        default="",
        description="OpenTelemetry collector that takes traces over gRPC, http://host:4317; empty: no traces",
    )
    trace_ratio: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="fraction of requests that are traced, of those whose client has not decided that",
    )


class TenantSettings(_Section):
    """One tenant's part of the router's queue. A cap that is left out is that of all tenants together."""

    weight: float = Field(
        default=1.0,
        ge=0.01,
        le=100.0,
        description="its share of predicted work while others wait, too: twice the weight, twice the work",
    )
    max_queued_requests: _Count | None = Field(default=None, description="more of its requests are refused")
    max_queued_tokens: _Count | None = Field(
        default=None, description="prompt tokens of its waiting requests; more are refused"
    )
    max_running: Positive | None = Field(
        default=None, description="its requests that run at once; others wait"
    )


class ServiceClassSettings(_Section):
    """What requests of a class want, by which the router places them."""

    ttft_target_s: Seconds = Field(description="time to the first token")
    itl_target_s: Seconds = Field(description="time from one token to the next")
    priority: int = Field(
        default=0,
        ge=MIN_PRIORITY,
        le=MAX_PRIORITY,
        description="of requests that name none; lower goes first",
    )


class RouterSettings(_Section):
    """Front door and routing."""

    policy: str = Field(
        default="predicted_time", description="how workers are chosen; router/policy lists the names"
    )
    ttft_target_s: Seconds = Field(
        default=2.0,
        description="time to first token that answers should keep; weighed when not all targets can be kept",
    )
    itl_target_s: Seconds = Field(
        default=0.1,
        description="inter-token latency: a worker that would exceed it gets no more sequences than it must",
    )
    max_prompt_bytes: Positive = 16 << 20
    max_inflight_requests: Positive = Field(
        default=1024, description="requests that run at once; more wait in the queue"
    )
    max_queued_requests: _Count = Field(
        default=1024, description="requests that may wait; more are refused. 0: none waits"
    )
    max_queued_tokens: _Count = Field(
        default=4 << 20, description="prompt tokens of all waiting requests; more are refused"
    )
    tenants: dict[str, TenantSettings] = Field(
        default={}, description='by name; "*": each tenant that has no entry of its own'
    )
    classes: dict[str, ServiceClassSettings] = Field(
        default={}, description="service classes that requests can name"
    )
    default_timeout_s: Seconds = Field(
        default=600.0, description="deadline of a request whose client set none"
    )
    max_index_entries: Positive = Field(
        default=1 << 22,
        description="different blocks that the prefix index holds, 29 to 58 bytes each; more are passed over",
    )
    assumed_ttl_s: Seconds = Field(
        default=5.0,
        description="a prompt counts as cached where it was sent this long, or twice, before its worker says so",
    )
    placement_timeout_s: Seconds = Field(
        default=5.0, description="a request waits this long for a decode worker when none is alive"
    )
    self_test_interval_s: Seconds = Field(
        default=30.0,
        description="when no worker has sent a token for this long, the router asks for two, to know that it is ready",
    )
    max_unread_tokens: Positive = Field(
        default=4096, description="a stream whose client leaves more than this unread is ended"
    )


class HttpSettings(_Section):
    """The router's OpenAI-compatible HTTP API."""

    enabled: bool = True
    host: str = Field(default="", description="empty: that of gRPC, rpc.host")
    port: int = Field(default=0, ge=0, le=65535, description="0: any free port")
    max_body_bytes: Positive = Field(default=32 << 20, description="of one request; more is refused unread")
    max_connections: Positive = Field(default=2048, description="open at once; more are refused")
    max_prompts: Positive = Field(default=128, description="in one request's list of prompts")
    read_timeout_s: Seconds = Field(
        default=30.0, description="time for a request's head, and for its body, to arrive"
    )
    write_timeout_s: Seconds = Field(
        default=30.0, description="a client that takes nothing of its answer this long is cut off"
    )


class PlannerSettings(_Section):
    """`headrace planner`: how many workers prefill and how many decode. Its targets are those of the router."""

    actuator: Literal["none", "kubernetes"] = Field(
        default="none",
        description="who adds and removes workers; none: roles change and nothing else."
        " `headrace up --planner` has its own",
    )
    dry_run: bool = Field(default=False, description="say what would be done and why, and do nothing")
    interval_s: Seconds = Field(default=5.0, description="between two looks at the fleet")
    short_intervals: Positive = Field(
        default=3, description="a pool has to be short so many intervals in a row"
    )
    spare_intervals: Positive = Field(
        default=24, description="a pool has to have a worker to spare so many intervals in a row"
    )
    band: float = Field(
        default=0.1, gt=0, lt=1, description="pressures between 1 - band and 1 + band change nothing"
    )
    hold_s: Seconds = Field(
        default=60.0, description="between two changes; thrice that between a change and its opposite"
    )
    payback_s: Seconds = Field(
        default=300.0, description="a change has to give more worker time in this time than it costs"
    )
    start_timeout_s: Seconds = Field(
        default=600.0, description="a worker that was added and is not there by then is not waited for"
    )
    max_prefill_busy: float = Field(
        default=0.85, gt=0, le=1, description="share of the time that prefill workers may compute"
    )
    max_kv_use: float = Field(
        default=0.9, gt=0, le=1, description="share of a decode worker's KV blocks that may be in use"
    )
    min_prefill: Positive = 1
    max_prefill: Positive = 64
    min_decode: Positive = 1
    max_decode: Positive = 64
    prefill_set: str = Field(
        default="headrace-prefill", description="Kubernetes StatefulSet of prefill workers"
    )
    decode_set: str = Field(default="headrace-decode", description="Kubernetes StatefulSet of decode workers")

    @model_validator(mode="after")
    def _in_order(self) -> PlannerSettings:
        if self.min_prefill > self.max_prefill or self.min_decode > self.max_decode:
            raise ValueError("min_prefill and min_decode must not be above max_prefill and max_decode")
        return self


class ClientSettings(_Section):
    """`headrace generate`, `chat` and `explain` as clients of a router."""

    tls: bool = False
    ca_file: Path | None = Field(default=None, description="whom to trust; none: public authorities")
    cert_file: Path | None = Field(default=None, description="the client's own certificate")
    key_file: Path | None = Field(default=None, description="of cert_file")
    api_key_file: Path | None = Field(default=None, description="holds an API key or a token")


class Settings(_Section):
    """All sections. Each process reads the ones it needs."""

    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    kv: KvSettings = KvSettings()
    directory: DirectorySettings = DirectorySettings()
    rpc: RpcSettings = RpcSettings()
    security: SecuritySettings = SecuritySettings()
    client: ClientSettings = ClientSettings()
    router: RouterSettings = RouterSettings()
    http: HttpSettings = HttpSettings()
    planner: PlannerSettings = PlannerSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    ray: RaySettings = RaySettings()
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def describe(self) -> dict[str, Any]:
        """Effective settings as plain data for the start-up log, with the password in the directory's URL masked."""
        shown = self.model_dump(mode="json")
        shown["directory"]["url"] = _masked(self.directory.url)
        return shown


def load(
    config_file: Path | None = None,
    assignments: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Settings from all sources. Raises InvalidRequest naming the key, its value and what is allowed."""
    merged = _from_file(config_file) if config_file is not None else {}
    for key, value in _from_environment(os.environ if environment is None else environment):
        _assign(merged, key, value)
    for assignment in assignments or ():
        key, separator, value = assignment.partition("=")
        if not separator:
            raise InvalidRequest("--set", assignment, "write section.field=value")
        if key == "directory.url" and _masked(value) != value:
            raise InvalidRequest(
                "--set directory.url",
                _masked(value),
                "others see a process's arguments: put the password into directory.password_file,"
                " the environment or the --config file",
            )
        _assign(merged, key, value)
    return _validated(merged)


def _masked(url: str) -> str:
    # Before the host (user:password@), where the password may hold colons, or as a parameter behind it.
    url = re.sub(r"(//[^/:@]*:)[^/]*@", r"\1***@", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", url)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidRequest("--config", str(path), f"can not be read: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidRequest("--config", str(path), "the file must hold sections with fields")
    return content


def _from_environment(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Pairs of dotted key and text. Other names with our prefix are left alone.

    Kubernetes sets HEADRACE_ROUTER_PORT and the like for a service called headrace-router.
    """
    pairs: list[tuple[str, str]] = []
    for name, value in environment.items():
        key = name.removeprefix(_ENV_PREFIX).lower()
        if name.startswith(_ENV_PREFIX) and ("__" in key or key in Settings.model_fields):
            pairs.append((key.replace("__", "."), value))
    return pairs


def _assign(tree: dict[str, Any], key: str, value: str) -> None:
    """Set one dotted key. Text becomes a number or a truth value in validation, by the field's type."""
    *sections, field = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise InvalidRequest(section, tree, "this is a section: its fields have values")
    tree[field] = value


def _validated(merged: dict[str, Any]) -> Settings:
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if (
            first["type"] == "extra_forbidden"
        ):  # the value stays out of it: a misspelt key can hold a password
            raise InvalidRequest("setting", key, "there is no such setting") from None
        raise InvalidRequest(key, first.get("input"), first["msg"]) from None
