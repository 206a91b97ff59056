"""The seam between a step and the model: tokens go through, their KV is written, logits are read off by row.

`backend` chooses: "cpu" the native kernels, "torch" and "reference" the eager model with that attention.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import torch

from headrace.config import EngineSettings
from headrace.engine.attention import load_backend
from headrace.engine.attention.base import StepBatch
from headrace.engine.kv_cache import KvCache
from headrace.engine.models.decoder import Decoder
from headrace.engine.native import library
from headrace.engine.sequence import StepPlan


class ForwardPass(Protocol):
    """Rows count the tokens of a step, chunk after chunk. Called on one thread."""

    def run(self, plan: StepPlan) -> list[int]:
        """Put the plan's tokens through the model. Returns the row of each chunk's last token."""
        ...

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """fp32 [len(rows), vocabulary], of rows of the last run. The memory is the next call's to overwrite."""
        ...


class EagerForward:
    """The model as it is written in `models/`, operator by operator."""

    def __init__(self, model: Decoder, cache: KvCache, attention: str) -> None:
        self.block_size_tokens = cache.block_size_tokens
        self._model = model
        self._attention = load_backend(attention, cache, model.config)
        self._x_TE = torch.empty(0)

    def run(self, plan: StepPlan) -> list[int]:
        return self.run_batch(StepBatch.of(plan, self.block_size_tokens))

    @torch.inference_mode()
    def run_batch(self, batch: StepBatch) -> list[int]:
        """As `run`."""
        self._x_TE = self._model.forward(batch.token_ids_T, batch.positions_T, self._attention.prepare(batch))
        return [span.rows.stop - 1 for span in batch.spans]

    @torch.inference_mode()
    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        return self._model.logits(self._x_TE[list(rows)])


def chosen_backend(name: str) -> str:
    """ "auto" is the kernels where they were compiled, else torch."""
    if name != "auto":
        return name
    return "torch" if library.load() is None else "cpu"


def load_forward(model: Decoder, cache: KvCache, settings: EngineSettings) -> ForwardPass:
    """As `settings.backend` says. The kernels take the weights out of `model`, which is empty afterwards."""
    num_threads = settings.num_threads or len(os.sched_getaffinity(0))
    backend = chosen_backend(settings.backend)
    if backend == "cpu":
        from headrace.engine.native.forward import NativeForward

        # What is left to torch, sampling, is too little for threads; and they would share the kernels' cores.
        torch.set_num_threads(1)
        return NativeForward(model, cache, num_threads=num_threads, max_step_tokens=settings.max_step_tokens)
    torch.set_num_threads(num_threads)
    return EagerForward(model, cache, backend)
