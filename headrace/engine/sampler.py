"""Draws one token per row of logits. A row's token depends on nothing but its logits, its settings and its position.

Randomness is counter-based: the uniform number for (seed, choice, position) is a hash of the three, so the same draw
comes out in any batch, on any worker, and after a restart. The number picks a token from the cumulative distribution
in the order of token ids, not of likelihood: rounding that swaps two almost equally likely tokens then changes nothing.

Letters: N rows of the batch, R those that are not greedy, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.sampling_params import SamplingParams

_NUM_CANDIDATES = 1024
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Draw:
    """What a row needs beside its logits. `position`: how many tokens the answer has already."""

    sampling: SamplingParams
    position: int
    choice: int = 0


def sample(logits_NV: torch.Tensor, draws: list[Draw]) -> list[int]:
    """One token id per row of fp32 logits. Each row has a finite one; -inf is not drawn."""
    tokens_N = torch.from_numpy(logits_NV.numpy().argmax(axis=1))  # the first of equals; faster than torch's
    rows = [row for row, draw in enumerate(draws) if not draw.sampling.greedy]
    if rows:
        # All rows but the greedy ones are mostly all rows: no copy of the logits then.
        some = logits_NV if len(rows) == len(draws) else logits_NV[rows]
        tokens_N[rows] = _drawn(some, [draws[row] for row in rows])
    return tokens_N.tolist()


def uniform(draws: Sequence[Draw]) -> np.ndarray:
    """float64 in [0, 1) for each: 53 bits of splitmix64's finalizer over its numbers (Steele, Lea, Flood 2014)."""
    state = np.zeros(len(draws), dtype=np.uint64)
    for numbers in (
        [draw.sampling.seed for draw in draws],
        [draw.choice for draw in draws],
        [draw.position for draw in draws],
    ):
        state = _mixed((state ^ np.array(numbers, dtype=np.uint64)) + _GOLDEN)
    return (state >> np.uint64(11)) * 2.0**-53


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _drawn(logits_RV: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """Token ids [R]: the inverse of the cumulative distribution at each row's uniform number."""
    temperature_R1 = torch.tensor([[draw.sampling.temperature] for draw in draws])
    # The largest becomes 0 before the division, which then can not overflow upwards.
    weights_RV = ((logits_RV - logits_RV.amax(-1, keepdim=True)) / temperature_R1).softmax(-1)
    rows = [row for row, draw in enumerate(draws) if draw.sampling.min_p]
    if rows:
        weights_RV[rows] = _likely(weights_RV[rows], [draws[row].sampling.min_p for row in rows])
    rows = [row for row, draw in enumerate(draws) if draw.sampling.top_k or draw.sampling.top_p < 1.0]
    if rows:
        weights_RV[rows] = _filtered(weights_RV[rows], [draws[row].sampling for row in rows])
    cumulative_RV = weights_RV.double().cumsum(-1)
    total_R1 = cumulative_RV[:, -1:]
    targets_R1 = torch.from_numpy(uniform(draws))[:, None] * total_R1
    # Below the total even after rounding: the token found always has a weight.
    targets_R1 = targets_R1.minimum(total_R1.nextafter(torch.zeros_like(total_R1)))
    return torch.searchsorted(cumulative_RV, targets_R1, right=True)[:, 0]


def _likely(weights_RV: torch.Tensor, min_p: list[float]) -> torch.Tensor:
    """Weights with those under min_p of the row's largest set to 0. They add up to 1 again."""
    limit_R1 = weights_RV.amax(-1, keepdim=True) * torch.tensor(min_p)[:, None]
    kept_RV = weights_RV.where(weights_RV >= limit_R1, 0.0)
    return kept_RV / kept_RV.sum(-1, keepdim=True)


def _filtered(weights_RV: torch.Tensor, samplings: list[SamplingParams]) -> torch.Tensor:
    """Weights with all but the top_k largest set to 0, and of these all that come after top_p of their sum."""
    top_k_R1 = torch.tensor([[sampling.top_k or weights_RV.shape[1]] for sampling in samplings])
    # Off is infinite, since a sum that is rounded can reach 1 before the last token.
    top_p_R1 = torch.tensor(
        [[s.top_p if s.top_p < 1.0 else torch.inf] for s in samplings], dtype=torch.float64
    )
    # Nearly always a thousand candidates are enough, and sorting all takes several times as long.
    num_sorted = min(weights_RV.shape[1], max(_NUM_CANDIDATES, *(sampling.top_k for sampling in samplings)))
    sorted_RV = weights_RV.topk(num_sorted).values
    if ((top_k_R1 > num_sorted) & (sorted_RV.double().sum(-1, keepdim=True) < top_p_R1)).any():
        sorted_RV = weights_RV.sort(descending=True).values
    num_kept_R1 = _num_kept(sorted_RV, top_k_R1, top_p_R1)
    smallest_R1 = sorted_RV.gather(1, num_kept_R1 - 1)
    larger_RV, equal_RV = weights_RV > smallest_R1, weights_RV == smallest_R1
    # Among equals of the smallest the lower token ids stay, as in the choice of the greedy token.
    num_equal_R1 = num_kept_R1 - larger_RV.sum(-1, keepdim=True)
    return weights_RV.where(larger_RV | (equal_RV & (equal_RV.cumsum(-1) <= num_equal_R1)), 0.0)


def _num_kept(sorted_RV: torch.Tensor, top_k_R1: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    """How many of a row's largest weights stay, [R, 1]. Of the weights as many are given as this depends on."""
    num_sorted = sorted_RV.shape[1]
    in_top_k_RV = torch.arange(num_sorted) < top_k_R1
    cumulative_RV = sorted_RV.where(in_top_k_RV, 0.0).double().cumsum(-1)
    # All weights of a row add up to 1.
    total_R1 = cumulative_RV[:, -1:].where(top_k_R1 <= num_sorted, 1.0)
    # A token stays if what stands before it has not reached top_p yet, so the likeliest always does.
    stays_RV = in_top_k_RV[:, 1:] & (cumulative_RV[:, :-1] < top_p_R1 * total_R1)
    return 1 + stays_RV.sum(-1, keepdim=True)
