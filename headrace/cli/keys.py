"""`headrace keys`: API keys of the front door. A key is shown once; the file keeps its hash."""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
import yaml
from pydantic import ValidationError
from rich.box import SIMPLE_HEAD
from rich.table import Table

from headrace.cli.options import ConfigOption, SetOption, settings_from
from headrace.cli.progress import console, output
from headrace.errors import InvalidRequest, NotFound
from router.callers import KEY_PREFIX, ApiKey, KeyFile, read_key_file

keys = typer.Typer(help="API keys of the front door.", no_args_is_help=True)

FileOption = Annotated[
    Path | None,
    typer.Option("--file", help="Default: security.api_keys_file.", show_default=False),
]


@keys.command()
def new(
    tenant: Annotated[str, typer.Option(help="Whose requests it is for.")],
    days: Annotated[int | None, typer.Option(min=1, help="Until it expires. Default: never.")] = None,
    file: FileOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Make a key, print it once, and append its hash to the file."""
    path, known = _opened(file, config, assignments, must_exist=False)
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=days) if days else None
    try:
        key = ApiKey(
            id=key_id, tenant=tenant, sha256=hashlib.sha256(secret.encode()).hexdigest(), expires=expires
        )
    except ValidationError as error:
        raise InvalidRequest("--tenant", tenant, error.errors()[0]["msg"]) from None
    _write(path, KeyFile(keys=[*known.keys, key]))
    console.print(f"[dim]key {key_id} of tenant {tenant}; it is not shown again[/]", highlight=False)
    output.print(f"{KEY_PREFIX}{key_id}_{secret}", highlight=False, soft_wrap=True)


@keys.command()
def disable(
    key_id: Annotated[str, typer.Argument(help="As `headrace keys list` shows it.")],
    file: FileOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Refuse a key from now on. Routers notice by themselves."""
    path, known = _opened(file, config, assignments)
    if key_id not in {key.id for key in known.keys}:
        raise NotFound(f"{path} has no key {key_id!r}")
    changed = [key.model_copy(update={"disabled": key.disabled or key.id == key_id}) for key in known.keys]
    _write(path, known.model_copy(update={"keys": changed}))


@keys.command("list")
def list_(file: FileOption = None, config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Show the keys of the file: ids, tenants, ends."""
    _, known = _opened(file, config, assignments)
    table = Table("id", "tenant", "expires", "state", box=SIMPLE_HEAD)
    for key in known.keys:
        expires = f"{key.expires:%Y-%m-%d %H:%M}" if key.expires else "never"
        table.add_row(key.id, key.tenant, expires, "disabled" if key.disabled else "enabled")
    output.print(table)


def _opened(
    file: Path | None, config: Path | None, assignments: list[str] | None, *, must_exist: bool = True
) -> tuple[Path, KeyFile]:
    path = file or settings_from(config, assignments).security.api_keys_file
    if path is None:
        raise InvalidRequest("--file", "", "say --file, or set security.api_keys_file")
    try:
        return path, read_key_file(path) if must_exist or path.exists() else KeyFile()
    except (OSError, ValueError) as error:
        raise InvalidRequest("--file", str(path), f"can not be read: {error}") from None


def _write(path: Path, content: KeyFile) -> None:
    """Whole or not at all, and for its owner only."""
    data = yaml.safe_dump(content.model_dump(exclude_defaults=True), sort_keys=False)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # made with mode 0600
    with os.fdopen(descriptor, "w") as stream:
        stream.write(data)
    Path(partial).replace(path)
