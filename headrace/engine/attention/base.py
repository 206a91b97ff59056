"""The attention seam: one step's chunks against the paged KV cache.

    chunks of a step, ragged, one after the other:      | seq A: 1 token | seq B: 1 token | seq C: 37 tokens |
    q_THD                                                 row 0            row 1            rows 2 .. 38

T tokens of the step, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.engine.kv_cache import KvCache
from headrace.engine.sequence import StepPlan

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


class AttentionBackend(Protocol):
    def __init__(self, cache: KvCache) -> None: ...

    def prepare(self, plan: StepPlan) -> Attend:
        """What is the same for all layers of a step, done once. The function it returns first writes keys and values of
        the step's tokens into their blocks, then attends, causally, to everything each token sees.
        """
        ...


def spans_of(plan: StepPlan, block_size_tokens: int) -> list[Span]:
    """The chunks in the plan's order."""
    spans: list[Span] = []
    row = 0
    for chunk in plan.chunks:
        num_blocks = -(-(chunk.start + chunk.num_tokens) // block_size_tokens)
        block_ids = torch.tensor(chunk.sequence.block_ids[:num_blocks])
        spans.append(Span(row, chunk.num_tokens, chunk.start, block_ids))
        row += chunk.num_tokens
    return spans


def positions_of(spans: list[Span]) -> torch.Tensor:
    """Position of each of the step's T tokens in its sequence, int64."""
    return torch.cat([torch.arange(span.start, span.context) for span in spans])


class BlockWriter:
    """Writes the step's keys and values to where their tokens live."""

    def __init__(self, cache: KvCache, spans: list[Span]) -> None:
        size = cache.block_size_tokens
        positions = [torch.arange(span.start, span.context) for span in spans]
        self._cache = cache
        self._block_T = torch.cat(
            [span.block_ids[p // size] for span, p in zip(spans, positions, strict=True)]
        )
        self._offset_T = torch.cat(positions) % size

    def write(self, layer: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        keys, values = self._cache.keys_and_values(layer)
        keys[self._block_T, :, self._offset_T] = k_TKD
        values[self._block_T, :, self._offset_T] = v_TKD


def gather(blocks: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Blocks [num_blocks, K, block_size, D] of one table, or of several padded ones, in token order.

    `block_ids` [n] gives [K, n * block_size, D]; [rows, n] gives [rows, K, n * block_size, D].
    """
    picked = blocks[block_ids]  # [..., n, K, block_size, D]
    return picked.transpose(-4, -3).flatten(-3, -2)
