"""Arguments of `headrace`, read by its own command line without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from headrace.cli.app import app


def parsed_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """What the command would get. Raises what it would say to a user."""
    group: Any = typer.main.get_command(app)
    command, *rest = arguments
    return group.commands[command].make_context(command, rest).params


def assignments(parsed: dict[str, Any]) -> list[str]:
    """As `headrace.config.load` takes them."""
    return [*(parsed["assignments"] or []), *([f"model.ref={parsed['model']}"] if parsed["model"] else [])]
