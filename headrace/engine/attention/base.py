"""The attention seam: one step's tokens against the paged KV cache.

    chunks of a step, ragged, one after the other:      | seq A: 1 token | seq B: 1 token | seq C: 37 tokens |
    q_THD                                                 row 0            row 1            rows 2 .. 38

T tokens of the step, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from headrace.engine.kv_cache import KvCache
from headrace.engine.sequence import StepPlan
from headrace.model_config import ModelConfig

# (layer, q_THD, k_TKD, v_TKD) -> o_THD; q and k carry their rotary positions already
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Span:
    """One chunk: rows `first_row ..` of the step; its tokens sit at positions `start .. start + num_tokens - 1`."""

    first_row: int
    num_tokens: int
    start: int
    block_ids: torch.Tensor  # int64, the blocks of positions 0 .. start + num_tokens - 1

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_tokens)

    @property
    def context(self) -> int:
        """Tokens that the chunk's last token sees, itself included."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step plan as tensors (int64), made once per step and the same for all layers."""

    spans: list[Span]
    token_ids_T: torch.Tensor
    positions_T: torch.Tensor  # of each token in its sequence
    block_ids_T: torch.Tensor  # the block in which each token's KV goes, …
    offsets_T: torch.Tensor  # … and where in it

    @classmethod
    def of(cls, plan: StepPlan, block_size_tokens: int) -> StepBatch:
        chunks: list[tuple[int, int, torch.Tensor]] = []
        token_ids: list[int] = []
        for chunk in plan.chunks:
            end = chunk.start + chunk.num_tokens
            blocks = chunk.sequence.block_ids[: -(-end // block_size_tokens)]
            chunks.append((chunk.start, chunk.num_tokens, torch.tensor(blocks)))
            token_ids += chunk.sequence.token_ids[chunk.start : end]
        return cls.made(chunks, torch.tensor(token_ids), block_size_tokens)

    @classmethod
    def made(
        cls, chunks: list[tuple[int, int, torch.Tensor]], token_ids_T: torch.Tensor, block_size_tokens: int
    ) -> StepBatch:
        """`chunks`: start, number of tokens, and blocks up to the last of them."""
        rows = accumulate((num_tokens for _, num_tokens, _ in chunks), initial=0)
        spans = [
            Span(row, num_tokens, start, block_ids)
            for row, (start, num_tokens, block_ids) in zip(rows, chunks, strict=False)
        ]
        positions = [torch.arange(span.start, span.context) for span in spans]
        blocks_of_tokens = [
            span.block_ids[p // block_size_tokens] for span, p in zip(spans, positions, strict=True)
        ]
        positions_T = torch.cat(positions)
        return cls(
            spans=spans,
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            block_ids_T=torch.cat(blocks_of_tokens),
            offsets_T=positions_T % block_size_tokens,
        )


class AttentionBackend(Protocol):
    """softmax(cap(scale * q·k)) over what a token sees: itself and all before it, or as many as a window holds. Scale,
    cap and window are those of the config: `query_scale`, `attention_softcap`, `window(layer)`.
    """

    def __init__(self, cache: KvCache, config: ModelConfig) -> None: ...

    def prepare(self, batch: StepBatch) -> Attend:
        """What is the same for all layers of a step, done once. The function it returns first writes keys and values of
        the step's tokens into their blocks, then attends. Whatever lies in a block behind a sequence's last token, NaN
        included, changes nothing.
        """
        ...
