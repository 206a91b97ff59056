"""The model runner on torch: a step plan becomes one forward pass over all its tokens."""

from __future__ import annotations

import torch

from headrace.engine.attention import load_backend
from headrace.engine.attention.base import positions_of, spans_of
from headrace.engine.kv_cache import KvCache
from headrace.engine.models.llama import Llama
from headrace.engine.sampler import Draw, sample
from headrace.engine.sequence import Chunk, Sequence, StepPlan
from headrace.errors import HeadraceError, InternalError
from headrace.sampling_params import SamplingParams


def choose_dtype(name: str) -> torch.dtype:
    """ "auto": bfloat16 where the processor multiplies it natively, else float32."""
    if name == "auto":
        return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


class TorchRunner:
    """Implements `ModelRunner`."""

    def __init__(self, model: Llama, cache: KvCache, attention: str = "auto") -> None:
        self._model = model
        self._cache = cache
        self._attention = load_backend(attention, cache)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> dict[str, int | HeadraceError]:
        token_ids_T = torch.tensor(
            [
                token_id
                for chunk in plan.chunks
                for token_id in chunk.sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]
            ]
        )
        positions_T = positions_of(spans_of(plan, self._cache.block_size_tokens))
        x_TE = self._model.forward(token_ids_T, positions_T, self._attention.prepare(plan))
        return self._sample(plan, x_TE)

    def warm_up(self) -> None:
        """Run a prompt and a decode step, so that the first request does not pay for what torch sets up on first use.
        Writes into the first blocks; call before anything is in them.
        """
        num_tokens = min(2, self._cache.num_blocks) * self._cache.block_size_tokens - 1
        sampling = SamplingParams(max_tokens=2, temperature=1.0, seed=0)
        sequence = Sequence("warm-up", [0] * num_tokens, num_tokens, sampling, root=b"")
        sequence.block_ids = list(range(min(2, self._cache.num_blocks)))
        self.run(StepPlan([Chunk(sequence, 0, num_tokens)]))
        sequence.token_ids.append(0)
        self.run(StepPlan([Chunk(sequence, num_tokens, 1)]))
        self._cache.tensor[: len(sequence.block_ids)] = 0

    def _sample(self, plan: StepPlan, x_TE: torch.Tensor) -> dict[str, int | HeadraceError]:
        sampling: list[Sequence] = []
        last_rows: list[int] = []
        row = 0
        for chunk in plan.chunks:
            row += chunk.num_tokens
            if chunk.samples:
                sampling.append(chunk.sequence)
                last_rows.append(row - 1)
        if not sampling:
            return {}
        logits_NV = self._model.logits(x_TE[last_rows])
        tokens = sample(logits_NV, [Draw(s.sampling, s.num_output_tokens) for s in sampling])
        return {
            sequence.id: InternalError("the model gave logits that are not finite")
            if token is None
            else token
            for sequence, token in zip(sampling, tokens, strict=True)
        }
