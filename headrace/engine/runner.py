"""The model runner seam: a step plan goes in, what each of its chunks gave comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.engine.sequence import ChunkResult, StepPlan


class ModelRunner(Protocol):
    """Called on the engine's thread only."""

    def run(self, plan: StepPlan) -> list[ChunkResult]:
        """Put the plan's chunks through the model: write their KV, draw tokens for every chunk that samples.

        Returns a result for each chunk, in their order. Does not change the sequences.
        """
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the KV of blocks: (from, to)."""
        ...
