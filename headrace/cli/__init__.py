"""The command line: `headrace …`."""

from headrace.cli.app import main

__all__ = ["main"]
