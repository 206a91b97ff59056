"""Token ids to vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.engine.weights.stored_matrix import Matrix, StoredMatrix


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """`weight` is [vocabulary, hidden], or the rows of the tokens `part`. Rows come in `dtype`, times `scale`, which is
    rounded to it too.
    """

    weight: Matrix
    dtype: torch.dtype
    scale: float = 1.0
    part: range | None = None

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]: new memory, the caller's to change. Zeros for tokens outside of `part`."""
        if self.part is None:
            return self._rows(token_ids)
        is_outside = (token_ids < self.part.start) | (token_ids >= self.part.stop)
        return self._rows((token_ids - self.part.start).masked_fill(is_outside, 0)).masked_fill_(
            is_outside[:, None], 0
        )

    def _rows(self, indices: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, StoredMatrix):
            x = self.weight.rows(indices).dequantize(self.dtype)
        else:
            x = self.weight[indices]
        return x if self.scale == 1.0 else x * torch.tensor(self.scale, dtype=self.dtype)
