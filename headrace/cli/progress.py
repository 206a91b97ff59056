"""The consoles, and progress on standard error: a bar for downloads, a line per part of the cluster;
plain lines without a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from headrace.model_config import ModelFiles
from headrace.model_store import resolve

OnStage = Callable[[str, str], None]

console = Console(stderr=True)
# Read by programs too: without a terminal nothing is cut or wrapped.
output = Console(width=None if sys.stdout.isatty() else 400)


def obtain_model(ref: str, cache_dir: Path) -> ModelFiles:
    """The model's files, with a bar while they are fetched. Raises ModelError."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"model {ref}", total=None)
        shown: set[str] = set()

        def on_progress(stage: str, done_bytes: int, total_bytes: int) -> None:
            if not console.is_terminal and stage not in shown:
                shown.add(stage)
                console.print(f"model {ref}: {stage}", highlight=False)
            progress.update(
                task, description=f"model {ref}: {stage}", completed=done_bytes, total=total_bytes or None
            )

        return resolve(ref, cache_dir=cache_dir, progress=on_progress)


@contextmanager
def cluster_progress() -> Generator[OnStage]:
    """Within the block, the yielded function shows one line per part of the cluster with its stage."""
    stages: dict[str, str] = {}

    def rows() -> Table:
        table = Table.grid(padding=(0, 2))
        for name, stage in stages.items():
            table.add_row("[green]✓[/]" if stage == "serving" else "[yellow]…[/]", name, f"[dim]{stage}[/]")
        return table

    if not console.is_terminal:
        yield lambda name, stage: console.print(f"{name}: {stage}", highlight=False)
        return
    with Live(console=console, refresh_per_second=8) as live:

        def on_stage(name: str, stage: str) -> None:
            stages[name] = stage
            live.update(rows())

        yield on_stage
