"""Token ids to vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """`weight` is [vocabulary, hidden]. Its rows are multiplied by `scale`, rounded to their dtype."""

    weight: torch.Tensor
    dtype: torch.dtype
    scale: float = 1.0

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]: new memory, the caller's to change."""
        x = self.weight[token_ids]
        return x if self.scale == 1.0 else x * torch.tensor(self.scale, dtype=self.dtype)
