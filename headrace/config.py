"""Settings of one process: typed, frozen, in small sections; built once at the composition root and passed down.

Order of precedence, later wins: defaults here, a YAML file (`--config`), `HEADRACE_SECTION__FIELD` in the environment,
`--set section.field=value`. Unknown keys are errors. Units are in the names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from headrace.errors import InvalidRequest

DEFAULT_MODEL = "smollm2-135m-instruct"

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(_Section):
    """Which model is served, under which name."""

    ref: str = Field(DEFAULT_MODEL, description="catalogue name, GGUF file, Hugging Face folder, or hub name")
    served_name: str = Field("", description="name that clients use; empty: the model's own name")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 where the processor multiplies it natively, else float32"
    )
    max_model_tokens: int = Field(0, ge=0, description="prompt and answer together; 0: what the model declares")


class EngineSettings(_Section):
    """Memory and scheduling of one worker's engine."""

    block_size_tokens: Positive = 32
    num_blocks: int = Field(0, ge=0, description="KV blocks in the pool; 0: as many as kv_memory_bytes holds")
    kv_memory_bytes: Positive = 1 << 30
    max_step_tokens: Positive = Field(512, description="token budget of one step: decodes first, prefill chunks fill it")
    max_sequences: Positive = Field(64, description="sequences that run at once; others wait")
    max_waiting: Positive = Field(1024, description="sequences that may wait; more are refused")
    num_threads: int = Field(0, ge=0, description="compute threads; 0: one per core of this process")
    attention: Literal["auto", "reference", "cpu"] = "auto"
    stall_warning_s: Seconds = Field(10.0, description="work waiting and nothing scheduled for this long is logged")


class KvSettings(_Section):
    """Exchange of KV blocks between workers."""

    transport: Literal["nixl", "local"] = "nixl"
    lease_ttl_s: Seconds = Field(10.0, description="a hand-off's blocks stay held this long after the reader's last word")
    connect_timeout_s: Seconds = 5.0
    transfer_timeout_s: Seconds = Field(10.0, description="longest time for one READ of announced blocks")
    progress_timeout_s: Seconds = Field(
        15.0, description="a prefill that has started and shows no progress for this long is abandoned"
    )
    min_remote_tokens: int = Field(
        64, ge=0, description="a prompt with fewer uncached tokens is prefilled by the decode worker itself"
    )
    checksum: bool = Field(False, description="checksum each moved block at both ends")


class DirectorySettings(_Section):
    """Redis or Valkey: who is alive, and which worker holds which blocks."""

    url: str = "redis://127.0.0.1:6379/0"
    cluster: str = Field("default", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    worker_ttl_s: Seconds = Field(5.0, description="a worker that does not refresh its record this long is gone")
    publish_interval_s: Seconds = 0.05


class RpcSettings(_Section):
    """The process's own server and the channels it opens."""

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535, description="0: any free port")
    advertise_host: str = Field("", description="name or address that others reach this process by; empty: host")
    max_message_bytes: Positive = 64 << 20
    keepalive_s: Seconds = Field(5.0, description="a silent connection is probed this often")
    keepalive_timeout_s: Seconds = Field(5.0, description="a probe unanswered this long breaks the connection")
    drain_timeout_s: Seconds = Field(30.0, description="on SIGTERM: time for running requests to end")


class RouterSettings(_Section):
    """Front door and routing."""

    policy: str = "prefix_load"
    max_prompt_bytes: Positive = 16 << 20
    max_inflight_requests: Positive = 1024
    default_timeout_s: Seconds = Field(600.0, description="deadline of a request whose client set none")


class Settings(BaseSettings):
    """All sections. Each process reads the ones it needs."""

    model_config = SettingsConfigDict(
        env_prefix="HEADRACE_", env_nested_delimiter="__", frozen=True, extra="forbid", nested_model_default_partial_update=True
    )

    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    kv: KvSettings = KvSettings()
    directory: DirectorySettings = DirectorySettings()
    rpc: RpcSettings = RpcSettings()
    router: RouterSettings = RouterSettings()
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `load` merges file < environment < assignments itself, so that a file never beats the environment.
        return (init_settings, env_settings)


def load(config_file: Path | None = None, assignments: list[str] | None = None) -> Settings:
    """Settings from all sources. Raises InvalidRequest naming the key, its value and what is allowed."""
    merged: dict[str, Any] = {}
    if config_file is not None:
        merged = yaml.safe_load(config_file.read_text()) or {}
    environment = Settings.model_validate({}).model_dump(exclude_unset=True)
    _merge(merged, environment)
    for assignment in assignments or []:
        key, separator, value = assignment.partition("=")
        if not separator:
            raise InvalidRequest("--set", assignment, "write section.field=value")
        tree: Any = yaml.safe_load(value)
        for part in reversed(key.split(".")):
            tree = {part: tree}
        _merge(merged, tree)
    return _validated(merged)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _validated(merged: dict[str, Any]) -> Settings:
    try:
        return Settings(**merged)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(".".join(map(str, first["loc"])), first.get("input"), first["msg"]) from None
