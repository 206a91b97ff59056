"""Attention as it is defined, one sequence and one head at a time, softmax in fp32. For tests, and to read."""

from __future__ import annotations

import torch

from headrace.engine.attention.base import Attend, BlockWriter, Span, gather, spans_of
from headrace.engine.kv_cache import KvCache
from headrace.engine.sequence import StepPlan


class ReferenceAttention:
    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def prepare(self, plan: StepPlan) -> Attend:
        spans = spans_of(plan, self._cache.block_size_tokens)
        writer = BlockWriter(self._cache, spans)

        def attend(layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
            writer.write(layer, k_TKD, v_TKD)
            return torch.cat([self._one(layer, q_THD[span.rows], span) for span in spans])

        return attend

    def _one(self, layer: int, q_THD: torch.Tensor, span: Span) -> torch.Tensor:
        keys, values = (
            gather(x, span.block_ids)[:, : span.context] for x in self._cache.keys_and_values(layer)
        )
        positions_T = torch.arange(span.start, span.context)
        hidden_TC = torch.arange(span.context) > positions_T[:, None]  # the future
        heads: list[torch.Tensor] = []
        for head in range(q_THD.shape[1]):
            kv_head = head * keys.shape[0] // q_THD.shape[1]
            scores_TC = q_THD[:, head].float() @ keys[kv_head].float().T / q_THD.shape[2] ** 0.5
            weights_TC = scores_TC.masked_fill(hidden_TC, float("-inf")).softmax(-1)
            heads.append(weights_TC @ values[kv_head].float())
        return torch.stack(heads, dim=1).to(q_THD.dtype)
