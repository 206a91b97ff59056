"""Token ids to vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.engine.weights.stored_matrix import Matrix, StoredMatrix


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """`weight` is [vocabulary, hidden]. Rows come in `dtype`, times `scale`, which is rounded to it too."""

    weight: Matrix
    dtype: torch.dtype
    scale: float = 1.0

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]: new memory, the caller's to change."""
        if isinstance(self.weight, StoredMatrix):
            x = self.weight.rows(token_ids).dequantize(self.dtype)
        else:
            x = self.weight[token_ids]
        return x if self.scale == 1.0 else x * torch.tensor(self.scale, dtype=self.dtype)
