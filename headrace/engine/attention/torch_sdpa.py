"""Attention through torch's fused kernel: decodes in padded batches, prefill chunks one sequence at a time.

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
from headrace.model_config import ModelConfig

_POSITION_MULTIPLE = 32
# Bounds on a decode batch. Tokens that a sequence is padded by: more would cost more than a batch of its own.
_MAX_PADDING_TOKENS = 256
# Sequences times the longest context: bounds the copy of keys and values.
_MAX_PADDED_TOKENS = 16384
# Queries of a chunk that go into one call. Even. Shorter pieces skip more of the future, and cost more calls.
_PIECE_TOKENS = 128


class TorchAttention:
    def __init__(self, cache: KvCache, config: ModelConfig) -> None:
        self._cache = cache
        self._config = config

    def prepare(self, batch: StepBatch) -> Attend:
        cache, config = self._cache, self._config
        decodes = [span for span in batch.spans if span.num_tokens == 1]
        parts = [_DecodeBatch(spans, cache, config) for spans in _groups(decodes)]
        parts += [_PrefillChunk(span, cache, config) for span in batch.spans if span.num_tokens > 1]

        def attend(layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
            cache.write(layer, batch.block_ids_T, batch.offsets_T, k_TKD, v_TKD)
            o_THD = torch.empty_like(q_THD)
            for part in parts:
                o_THD[part.rows] = part.attend(layer, q_THD[part.rows])
            return o_THD

        return attend


class _DecodeBatch:
    """One token of each of R sequences."""

    def __init__(self, spans: Sequence[Span], cache: KvCache, config: ModelConfig) -> None:
        self.rows = _rows(spans)
        self._config = config
        self._blocks = _PaddedBlocks(spans, cache)
        positions_R1 = torch.tensor([span.start for span in spans])[:, None]
        num_positions = self._blocks.unseen_RC.shape[1]
        self._biases = {
            window: _bias(positions_R1, num_positions, window, cache)[:, None, None]
            for window in _windows(config)
        }

    def attend(self, layer: int, q_RHD: torch.Tensor) -> torch.Tensor:
        k_RKCD, v_RKCD = self._blocks.read(layer)
        # The query heads that share a KV head stand in for query positions: one matrix product serves them all.
        q_RKGD = q_RHD.unflatten(1, (k_RKCD.shape[1], -1))
        num_queries = q_RKGD.shape[2]
        if num_queries == 1:
            q_RKGD = q_RKGD.expand(-1, -1, 2, -1)
        bias_R11C = self._biases[self._config.window(layer)]
        o_RKGD = _attention(q_RKGD, k_RKCD, v_RKCD, bias_R11C, self._config)
        return o_RKGD[:, :, :num_queries].flatten(1, 2)


class _PrefillChunk:
    """T tokens of one sequence behind a prefix that is in the cache."""

    def __init__(self, span: Span, cache: KvCache, config: ModelConfig) -> None:
        self.rows = span.rows
        self._config = config
        self._num_tokens = span.num_tokens
        self._blocks = _PaddedBlocks([span], cache)
        # Rows of the chunk, and their bias, by window.
        self._pieces: dict[int, list[tuple[slice, torch.Tensor]]] = {
            window: [
                self._piece(span, first, window, cache) for first in range(0, span.num_tokens, _PIECE_TOKENS)
            ]
            for window in _windows(config)
        }

    def _piece(self, span: Span, first: int, window: int, cache: KvCache) -> tuple[slice, torch.Tensor]:
        num_tokens = min(_PIECE_TOKENS, span.num_tokens - first)
        last = span.start + first + num_tokens - 1
        # An odd number, which only the chunk's end can be, is made even by its last token.
        positions_T = (span.start + first + torch.arange(num_tokens + num_tokens % 2)).clamp(max=last)
        bias_TC = _bias(positions_T[:, None], _rounded_up(last + 1), window, cache)
        return slice(first, first + len(positions_T)), bias_TC

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        k_1KCD, v_1KCD = self._blocks.read(layer)
        if self._num_tokens % 2:
            q_THD = torch.cat((q_THD, q_THD[-1:]))
        q_1HTD = q_THD.transpose(0, 1)[None]
        parts = [
            _attention(
                q_1HTD[:, :, rows],
                k_1KCD[:, :, : bias_TC.shape[1]],
                v_1KCD[:, :, : bias_TC.shape[1]],
                bias_TC,
                self._config,
            )[0].transpose(0, 1)
            for rows, bias_TC in self._pieces[self._config.window(layer)]
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
        kv_heads = cache.tensor.shape[3]
        self._kv = torch.empty(2, kv_heads, self.unseen_RC.numel(), cache.head_dim, dtype=cache.dtype)

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


def _windows(config: ModelConfig) -> set[int]:
    return {config.window(layer) for layer in range(config.num_layers)}


def _bias(positions_T1: torch.Tensor, num_positions: int, window: int, cache: KvCache) -> torch.Tensor:
    """[T, C], added to the scores: minus infinity where a token does not see a position, else 0. A mask of bools would
    become this in every layer.
    """
    distances_TC = positions_T1 - torch.arange(num_positions)
    hidden_TC = (distances_TC < 0) | (distances_TC >= (window or num_positions))
    return torch.zeros(hidden_TC.shape, dtype=cache.dtype).masked_fill_(hidden_TC, float("-inf"))


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, config: ModelConfig
) -> torch.Tensor:
    """[rows, heads, queries, D]; `k` and `v` have as many heads, or fewer that are shared."""
    if not config.attention_softcap:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, scale=config.query_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    # The fused kernel can not cap.
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).float() for x in (k, v))
    scores = q.float() @ k.transpose(-1, -2) * config.query_scale
    scores = torch.tanh(scores / config.attention_softcap) * config.attention_softcap + bias
    return (scores.softmax(-1) @ v).to(q.dtype)


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
