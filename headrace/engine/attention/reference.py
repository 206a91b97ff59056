"""Attention as it is defined, one sequence and one head at a time, softmax in fp32. For tests, and to read."""

from __future__ import annotations

import torch

from headrace.engine.attention.base import Attend, Span, StepBatch
from headrace.engine.kv_cache import KvCache


class ReferenceAttention:
    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def prepare(self, batch: StepBatch) -> Attend:
        def attend(layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
            self._cache.write(layer, batch.block_ids_T, batch.offsets_T, k_TKD, v_TKD)
            return torch.cat([self._one(layer, q_THD[span.rows], span) for span in batch.spans])

        return attend

    def _one(self, layer: int, q_THD: torch.Tensor, span: Span) -> torch.Tensor:
        k_KCD, v_KCD = self._cache.gather(layer, span.block_ids)[:, :, : span.context]
        positions_T = torch.arange(span.start, span.context)
        future_TC = torch.arange(span.context) > positions_T[:, None]
        heads: list[torch.Tensor] = []
        for head in range(q_THD.shape[1]):
            kv_head = head * len(k_KCD) // q_THD.shape[1]
            scores_TC = q_THD[:, head].float() @ k_KCD[kv_head].float().T / q_THD.shape[2] ** 0.5
            weights_TC = scores_TC.masked_fill(future_TC, float("-inf")).softmax(-1)
            heads.append(weights_TC @ v_KCD[kv_head].float())
        return torch.stack(heads, dim=1).to(q_THD.dtype)
