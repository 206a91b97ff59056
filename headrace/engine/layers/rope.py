"""Rotary position embedding, in the half-split form that Hugging Face weights have."""

from __future__ import annotations

import math

import torch

from headrace.model_config import RopeScaling


class RotaryEmbedding:
    """Turns pairs (i, i + D/2) of each head by position times frequency i. Angles are computed in fp32."""

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.frequencies = _scaled(1.0 / theta**exponents, scaling)  # radians per position, [D / 2]

    def at(self, positions_T: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors for `rotate`, each [T, 1, D]: for all heads and all layers of a kind."""
        angles_T1F = (positions_T[:, None].float() * self.frequencies)[:, None]
        cos, sin = angles_T1F.cos().to(dtype), angles_T1F.sin().to(dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * cos_T1D + torch.cat((second, first), dim=-1) * sin_T1D


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling | None) -> torch.Tensor:
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3 (`_compute_llama3_parameters` in Hugging Face transformers): long waves are stretched by `factor`, short
    # ones left alone, and between the two it goes over smoothly.
    turns = scaling.original_max_tokens * frequencies / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
