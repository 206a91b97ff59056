"""Attention on CPUs through torch's fused kernel: decodes in padded batches, prefill chunks one sequence at a time.

The kernel sums in an order that depends on the shapes it is given. In bf16, where rounding is coarse, it gives a token
the same bits in every batch and for every chunk size if (measured on x86) positions are padded with zeros to multiples
of 32 and at least two queries come together, in chunks an even number. So all calls here are made like that.

Letters beside those of `base.py`: R sequences of a decode batch, C positions of their blocks, G query heads of a KV
head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from headrace.engine.attention.base import Attend, Span, StepBatch
from headrace.engine.kv_cache import KvCache

_POSITION_MULTIPLE = 32
# Bounds on a decode batch. Tokens that a sequence is padded by: more would cost more than a batch of its own.
_MAX_PADDING_TOKENS = 256
# Sequences times the longest context: bounds the copy of keys and values.
_MAX_PADDED_TOKENS = 16384
# Queries of a chunk that go into one call. Even. Shorter pieces skip more of the future, and cost more calls.
_PIECE_TOKENS = 128


class CpuAttention:
    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def prepare(self, batch: StepBatch) -> Attend:
        cache = self._cache
        decodes = [span for span in batch.spans if span.num_tokens == 1]
        parts = [_DecodeBatch(spans, cache) for spans in _groups(decodes)]
        parts += [_PrefillChunk(span, cache) for span in batch.spans if span.num_tokens > 1]

        def attend(layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
            cache.write(layer, batch.block_ids_T, batch.offsets_T, k_TKD, v_TKD)
            o_THD = torch.empty_like(q_THD)
            for part in parts:
                o_THD[part.rows] = part.attend(layer, q_THD[part.rows])
            return o_THD

        return attend


class _DecodeBatch:
    """One token of each of R sequences."""

    def __init__(self, spans: Sequence[Span], cache: KvCache) -> None:
        self.rows = _rows(spans)
        self._blocks = _PaddedBlocks(spans, cache)
        self._bias_R11C = _bias(self._blocks.unseen_RC, cache)[:, None, None]

    def attend(self, layer: int, q_RHD: torch.Tensor) -> torch.Tensor:
        k_RKCD, v_RKCD = self._blocks.read(layer)
        # The query heads that share a KV head stand in for query positions: one matrix product serves them all.
        q_RKGD = q_RHD.unflatten(1, (k_RKCD.shape[1], -1))
        num_queries = q_RKGD.shape[2]
        if num_queries == 1:
            q_RKGD = q_RKGD.expand(-1, -1, 2, -1)
        o_RKGD = F.scaled_dot_product_attention(q_RKGD, k_RKCD, v_RKCD, attn_mask=self._bias_R11C)
        return o_RKGD[:, :, :num_queries].flatten(1, 2)


class _PrefillChunk:
    """T tokens of one sequence behind a prefix that is in the cache."""

    def __init__(self, span: Span, cache: KvCache) -> None:
        self.rows = span.rows
        self._num_tokens = span.num_tokens
        self._blocks = _PaddedBlocks([span], cache)
        self._pieces: list[tuple[slice, torch.Tensor]] = []  # rows of the chunk, and their bias
        for first in range(0, span.num_tokens, _PIECE_TOKENS):
            num_tokens = min(_PIECE_TOKENS, span.num_tokens - first)
            last = span.start + first + num_tokens - 1
            # An odd number, which only the chunk's end can be, is made even by its last token.
            positions_T = (span.start + first + torch.arange(num_tokens + num_tokens % 2)).clamp(max=last)
            num_seen = _rounded_up(last + 1)
            bias_TC = _bias(torch.arange(num_seen) > positions_T[:, None], cache)
            self._pieces.append((slice(first, first + len(positions_T)), bias_TC))

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        k_1KCD, v_1KCD = self._blocks.read(layer)
        if self._num_tokens % 2:
            q_THD = torch.cat((q_THD, q_THD[-1:]))
        q_1HTD = q_THD.transpose(0, 1)[None]
        parts = [
            F.scaled_dot_product_attention(
                q_1HTD[:, :, rows],
                k_1KCD[:, :, : bias_TC.shape[1]],
                v_1KCD[:, :, : bias_TC.shape[1]],
                attn_mask=bias_TC,
                enable_gqa=True,
            )[0].transpose(0, 1)
            for rows, bias_TC in self._pieces
        ]
        return torch.cat(parts)[: self._num_tokens]


class _PaddedBlocks:
    """The KV of R sequences side by side, each padded to C positions. One buffer serves all layers."""

    def __init__(self, spans: Sequence[Span], cache: KvCache) -> None:
        size = cache.block_size_tokens
        num_positions = _rounded_up(max(len(span.block_ids) for span in spans) * size, size)
        block_ids = torch.zeros(len(spans), num_positions // size, dtype=torch.int64)
        for row, span in enumerate(spans):
            block_ids[row, : len(span.block_ids)] = span.block_ids
        contexts_R = torch.tensor([span.context for span in spans])
        self.unseen_RC = torch.arange(num_positions) >= contexts_R[:, None]
        self._cache = cache
        self._block_ids = block_ids.flatten()
        self._unseen = self.unseen_RC.flatten().nonzero().flatten()
        kv_heads, head_dim = cache.tensor.shape[3], cache.tensor.shape[5]
        self._kv = torch.empty(2, kv_heads, self.unseen_RC.numel(), head_dim, dtype=cache.tensor.dtype)

    def read(self, layer: int) -> torch.Tensor:
        """Keys and values [2, R, K, C, D]. What lies behind a sequence's last token is not its own and can be anything:
        here it is zeros, so that a weight of zero can not meet a NaN.
        """
        kv = self._cache.gather(layer, self._block_ids, out=self._kv)
        kv.index_fill_(2, self._unseen, 0.0)
        return kv.unflatten(2, self.unseen_RC.shape).transpose(1, 2)


def _rounded_up(num_positions: int, block_size_tokens: int = 1) -> int:
    """To a multiple of both."""
    multiple = math.lcm(_POSITION_MULTIPLE, block_size_tokens)
    return -(-num_positions // multiple) * multiple


def _bias(hidden: torch.Tensor, cache: KvCache) -> torch.Tensor:
    """Added to the scores: minus infinity where `hidden`, else 0. A mask of bools would become this in every layer."""
    return torch.zeros(hidden.shape, dtype=cache.tensor.dtype).masked_fill_(hidden, float("-inf"))


def _groups(decodes: list[Span]) -> list[list[Span]]:
    """Sequences of like length together, within the bounds on padding."""
    groups: list[list[Span]] = []
    for span in sorted(decodes, key=lambda span: -span.context):
        if groups and _fits(groups[-1], span):
            groups[-1].append(span)
        else:
            groups.append([span])
    return [sorted(group, key=lambda span: span.first_row) for group in groups]


def _fits(group: list[Span], span: Span) -> bool:
    longest = group[0].context
    return longest - span.context <= _MAX_PADDING_TOKENS and (len(group) + 1) * longest <= _MAX_PADDED_TOKENS


def _rows(spans: Sequence[Span]) -> slice | torch.Tensor:
    """The rows of these spans of one token; as a slice, which copies nothing, if they are neighbours."""
    first, last = spans[0].first_row, spans[-1].first_row
    if last - first == len(spans) - 1:
        return slice(first, last + 1)
    return torch.tensor([span.first_row for span in spans])
