"""Options that several commands share, and what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace import config
from headrace.cluster.running import find_running
from headrace.config import Settings

DEFAULT_PORT = 8470
DEFAULT_HTTP_PORT = 8000

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="YAML file with settings in sections.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.FIELD=VALUE", help="One setting; can be repeated.", show_default=False
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", help="Catalogue name, GGUF file, Hugging Face folder or hub name.", show_default=False
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        help=f"HOST:PORT of a router. Default: the local cluster, else 127.0.0.1:{DEFAULT_PORT}.",
        show_default=False,
    ),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", help="Longest answer. Default: up to the model's limit.", show_default=False
    ),
]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy: always the likeliest token.")]
SeedOption = Annotated[int | None, typer.Option(help="Equal seeds give equal answers.", show_default=False)]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Seconds until an answer is given up.")]


def settings_from(
    config_file: Path | None, assignments: list[str] | None, model: str | None = None
) -> Settings:
    """Settings of this process from all sources. Raises InvalidRequest."""
    all_assignments = [*(assignments or []), *([f"model.ref={model}"] if model else [])]
    return config.load(config_file, all_assignments)


def of_running_cluster(settings: Settings) -> Settings:
    """With the directory of the local cluster, where that runs."""
    running = find_running(settings.model.cache_dir, settings.directory.cluster)
    if running is None:
        return settings
    directory = settings.directory.model_copy(update={"url": running.directory_url})
    return settings.model_copy(update={"directory": directory})


def router_address(address: str | None, settings: Settings) -> str:
    if address:
        return address
    running = find_running(settings.model.cache_dir, settings.directory.cluster)
    return running.router if running else f"127.0.0.1:{DEFAULT_PORT}"


def http_address(settings: Settings) -> str:
    """URL of the local cluster's HTTP API, else the one that `headrace router` has by default."""
    running = find_running(settings.model.cache_dir, settings.directory.cluster)
    return (running and running.http) or f"http://127.0.0.1:{DEFAULT_HTTP_PORT}"
