"""Attention as it is defined, one sequence and one head at a time, softmax in fp32. For tests, and to read."""

from __future__ import annotations

import torch

from headrace.engine.attention.base import Attend, Span, StepBatch
from headrace.engine.kv_cache import KvCache
from headrace.model_config import ModelConfig


class ReferenceAttention:
    def __init__(self, cache: KvCache, config: ModelConfig) -> None:
        self._cache = cache
        self._config = config

    def prepare(self, batch: StepBatch) -> Attend:
        def attend(layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
            self._cache.write(layer, batch.block_ids_T, batch.offsets_T, k_TKD, v_TKD)
            return torch.cat([self._one(layer, q_THD[span.rows], span) for span in batch.spans])

        return attend

    def _one(self, layer: int, q_THD: torch.Tensor, span: Span) -> torch.Tensor:
        k_KCD, v_KCD = self._cache.gather(layer, span.block_ids)[:, :, : span.context]
        hidden_TC = self._hidden(layer, span)
        heads: list[torch.Tensor] = []
        for head in range(q_THD.shape[1]):
            kv_head = head * len(k_KCD) // q_THD.shape[1]
            scores_TC = q_THD[:, head].float() @ k_KCD[kv_head].float().T * self._config.query_scale
            if cap := self._config.attention_softcap:
                scores_TC = torch.tanh(scores_TC / cap) * cap
            weights_TC = scores_TC.masked_fill(hidden_TC, float("-inf")).softmax(-1)
            heads.append(weights_TC @ v_KCD[kv_head].float())
        return torch.stack(heads, dim=1).to(q_THD.dtype)

    def _hidden(self, layer: int, span: Span) -> torch.Tensor:
        distances_TC = torch.arange(span.start, span.context)[:, None] - torch.arange(span.context)
        window = self._config.window(layer) or span.context
        return (distances_TC < 0) | (distances_TC >= window)
