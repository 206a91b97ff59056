"""The model runner on torch: a step plan becomes one forward pass over all its tokens."""

from __future__ import annotations

import structlog
import torch

from headrace.engine.forward import ForwardPass
from headrace.engine.kv_cache import KvCache
from headrace.engine.sampler import Draw, sample
from headrace.engine.sequence import Chunk, Sequence, StepPlan
from headrace.errors import HeadraceError, InternalError
from headrace.sampling_params import SamplingParams

log = structlog.get_logger()

# Capabilities of x86 processors. Others emulate the type, and are slower with it than with float32.
_NATIVE_BFLOAT16 = ("avx512_bf16", "amx_bf16")


def choose_dtype(name: str) -> torch.dtype:
    """ "auto": bfloat16 where the processor multiplies it natively, else float32."""
    if name == "auto":
        capabilities = torch.cpu.get_capabilities()
        return torch.bfloat16 if any(capabilities.get(key) for key in _NATIVE_BFLOAT16) else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


class TorchRunner:
    """Implements `ModelRunner`."""

    def __init__(self, forward: ForwardPass, cache: KvCache) -> None:
        self._forward = forward
        self._cache = cache

    def run(self, plan: StepPlan) -> dict[str, int | HeadraceError]:
        """One forward pass. If it fails, each chunk gets one of its own, so that only those fail that have to."""
        try:
            return self._run(plan)
        except (RuntimeError, IndexError):  # what torch raises
            if len(plan.chunks) == 1:
                raise
            log.exception("step failed, running its chunks one by one", chunks=len(plan.chunks))
        results: dict[str, int | HeadraceError] = {}
        for chunk in plan.chunks:
            try:
                results |= self._run(StepPlan([chunk]))
            except (RuntimeError, IndexError) as error:
                results[chunk.sequence.id] = InternalError(f"the model failed: {error}")
        return results

    def warm_up(self, max_step_tokens: int) -> None:
        """Run a prompt and a decode step, so that the first request does not pay for what torch sets up on first use.
        Writes into the first blocks; call before anything is in them.
        """
        room = min(2, self._cache.num_blocks) * self._cache.block_size_tokens
        num_tokens = max(1, min(room - 1, max_step_tokens))
        sampling = SamplingParams(max_tokens=2, temperature=1.0, seed=0)
        sequence = Sequence("warm-up", [0] * num_tokens, num_tokens, sampling, root=b"")
        sequence.block_ids = list(range(min(2, self._cache.num_blocks)))
        self.run(StepPlan([Chunk(sequence, 0, num_tokens)]))
        sequence.token_ids.append(0)
        self.run(StepPlan([Chunk(sequence, num_tokens, 1)]))
        self._cache.tensor[: len(sequence.block_ids)] = 0

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> dict[str, int | HeadraceError]:
        last_rows = self._forward.run(plan)
        drawing = [(chunk, row) for chunk, row in zip(plan.chunks, last_rows, strict=True) if chunk.samples]
        if not drawing:
            return {}
        logits_NV = self._forward.logits([row for _, row in drawing])
        sequences = [chunk.sequence for chunk, _ in drawing]
        tokens = sample(logits_NV, [Draw(s.sampling, s.num_output_tokens) for s in sequences])
        return {
            sequence.id: InternalError("the model gave logits that are not finite")
            if token is None
            else token
            for sequence, token in zip(sequences, tokens, strict=True)
        }
