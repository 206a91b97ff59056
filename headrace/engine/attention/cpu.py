"""Attention on CPUs through torch's fused kernel: decodes in padded batches, prefill chunks one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from headrace.engine.attention.base import Attend, BlockWriter, Span, gather, spans_of
from headrace.engine.kv_cache import KvCache
from headrace.engine.sequence import StepPlan

# Rows times context of one padded batch: bounds its copy of keys and values, and the work wasted on padding.
_MAX_PADDED_TOKENS = 16384


class CpuAttention:
    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def prepare(self, plan: StepPlan) -> Attend:
        spans = spans_of(plan, self._cache.block_size_tokens)
        writer = BlockWriter(self._cache, spans)
        size = self._cache.block_size_tokens
        batches = [_DecodeBatch(group, size) for group in _groups([s for s in spans if s.num_tokens == 1])]
        chunks = [_PrefillChunk(span) for span in spans if span.num_tokens > 1]

        def attend(layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
            writer.write(layer, k_TKD, v_TKD)
            keys, values = self._cache.keys_and_values(layer)
            o_THD = torch.empty_like(q_THD)
            for part in (*batches, *chunks):
                o_THD[part.rows] = part.attend(q_THD[part.rows], keys, values)
            return o_THD

        return attend


class _DecodeBatch:
    """R sequences of one token each, their block tables padded to N blocks. C = N * block_size positions."""

    def __init__(self, spans: Sequence[Span], block_size_tokens: int) -> None:
        num_blocks = max(len(span.block_ids) for span in spans)
        self.rows = torch.tensor([span.first_row for span in spans])
        self._block_ids_RN = torch.zeros(len(spans), num_blocks, dtype=torch.int64)
        for row, span in enumerate(spans):
            self._block_ids_RN[row, : len(span.block_ids)] = span.block_ids
        contexts_R = torch.tensor([span.context for span in spans])
        positions_C = torch.arange(num_blocks * block_size_tokens)
        self._seen_R11C = (positions_C < contexts_R[:, None])[:, None, None]

    def attend(self, q_RHD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        k_RKCD, v_RKCD = gather(keys, self._block_ids_RN), gather(values, self._block_ids_RN)
        # The query heads that share a KV head stand in for query positions: one matrix product serves them all.
        q_RKGD = q_RHD.unflatten(1, (k_RKCD.shape[1], -1))
        return F.scaled_dot_product_attention(q_RKGD, k_RKCD, v_RKCD, attn_mask=self._seen_R11C).flatten(1, 2)


class _PrefillChunk:
    """T tokens of one sequence behind a prefix that is in the cache. C positions are seen in all."""

    def __init__(self, span: Span) -> None:
        self.rows = span.rows
        self._block_ids = span.block_ids
        self._context = span.context
        # Without a prefix the kernel's own causal rule applies; with one, row t sees `start + t + 1` positions.
        positions_T = torch.arange(span.start, span.context)
        self._seen_TC = None if span.start == 0 else torch.arange(span.context) <= positions_T[:, None]

    def attend(self, q_THD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        k_KCD, v_KCD = (gather(x, self._block_ids)[:, : self._context] for x in (keys, values))
        o_HTD = F.scaled_dot_product_attention(
            q_THD.transpose(0, 1)[None],
            k_KCD[None],
            v_KCD[None],
            attn_mask=self._seen_TC,
            is_causal=self._seen_TC is None,
            enable_gqa=True,
        )[0]
        return o_HTD.transpose(0, 1)


def _groups(spans: list[Span]) -> list[list[Span]]:
    """Sequences of like length together, each group within the bound on padded tokens (or alone)."""
    groups: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: -span.context):
        if groups and (len(groups[-1]) + 1) * groups[-1][0].context <= _MAX_PADDED_TOKENS:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups
