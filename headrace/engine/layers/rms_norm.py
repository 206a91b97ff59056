"""Root mean square normalization."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    weight: torch.Tensor  # fp32
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension, in fp32 up to the result."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)
