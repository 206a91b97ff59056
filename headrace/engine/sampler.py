"""Draws one token per row of logits. A row's token depends on nothing but its logits, its settings and its position.

Randomness is counter-based: the uniform number for (seed, choice, position) is a hash of the three, so the same draw
comes out in any batch, on any worker, and after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.sampling_params import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Draw:
    """What a row needs beside its logits. `position`: how many tokens the answer has already."""

    sampling: SamplingParams
    position: int
    choice: int = 0


def sample(logits_NV: torch.Tensor, draws: list[Draw]) -> list[int | None]:
    """One token id per row of fp32 logits; None for a row that is not finite: it can not be sampled from."""
    usable_N = logits_NV.isfinite().all(-1).tolist()
    tokens: list[int | None] = logits_NV.argmax(-1).tolist()
    for row, draw in enumerate(draws):
        if not usable_N[row]:
            tokens[row] = None
        elif not draw.sampling.greedy:
            tokens[row] = _draw(logits_NV[row], draw)
    return tokens


def uniform(seed: int, choice: int, position: int) -> float:
    """In [0, 1): 53 bits of splitmix64's finalizer over the three numbers (Steele, Lea, Flood 2014)."""
    state = _mixed((seed + _GOLDEN) & _MASK)
    state = _mixed((state ^ choice) + _GOLDEN & _MASK)
    state = _mixed((state ^ position) + _GOLDEN & _MASK)
    return (state >> 11) * 2.0**-53


def _mixed(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _draw(logits_V: torch.Tensor, draw: Draw) -> int:
    """Inverse of the cumulative distribution over the likeliest tokens, likeliest first."""
    sampling = draw.sampling
    scaled = logits_V.double() / sampling.temperature
    if sampling.top_k:
        kept, token_ids = scaled.topk(sampling.top_k)
    else:
        kept, token_ids = scaled.sort(descending=True, stable=True)
    cumulative = kept.softmax(0).cumsum(0)
    # A token stays if what stands before it has not reached top_p yet, so the likeliest always does.
    num_kept = 1 + int((cumulative[:-1] < sampling.top_p).sum()) if sampling.top_p < 1.0 else len(kept)
    target = uniform(sampling.seed, draw.choice, draw.position) * float(cumulative[num_kept - 1])
    index = int(torch.searchsorted(cumulative[:num_kept], target, right=True))
    return int(token_ids[min(index, num_kept - 1)])
