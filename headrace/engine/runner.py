"""The model runner seam: a step plan goes in, one drawn token per sampling sequence comes out."""

from __future__ import annotations

from typing import Protocol

from headrace.engine.sequence import StepPlan
from headrace.errors import HeadraceError


class ModelRunner(Protocol):
    def run(self, plan: StepPlan) -> dict[str, int | HeadraceError]:
        """Put the plan's chunks through the model: write their KV, draw a token for every chunk that samples.

        Returns, by sequence id, the token id drawn, or the error of a sequence that failed alone. Does not change the
        sequences. Called on the engine's thread only.
        """
        ...
