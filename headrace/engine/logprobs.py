"""Log-probabilities of tokens, as the model gave them. Letters: R rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.sampling_params import TokenLogprobs


def logprobs(
    logits_RV: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """For each row of fp32 logits that token's, and so many of the likeliest."""
    total_R1 = logits_RV.logsumexp(-1, keepdim=True)
    own_R1 = logits_RV.gather(1, torch.tensor(token_ids)[:, None]) - total_R1
    top = logits_RV.topk(min(max(num_top), logits_RV.shape[1]))
    top_values, top_ids = (top.values - total_R1).tolist(), top.indices.tolist()
    return [
        TokenLogprobs(token_id, own, tuple(zip(ids[:number], values[:number], strict=True)))
        for token_id, own, number, ids, values in zip(
            token_ids, own_R1[:, 0].tolist(), num_top, top_ids, top_values, strict=True
        )
    ]
