"""A matrix with an optional bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.engine.weights.stored_matrix import Matrix, StoredMatrix


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """`weight` is [out, in], or the parts that it has along `out`. What is quantized is dequantized at each call.

    Computed as weight times inputs, tokens as columns, and not the other way around as `F.linear` does. For two
    tokens and more the libraries then sum a token's products in one order, however many others are with it (measured
    bit for bit on x86, MKL and oneDNN, with rare exceptions over 64 tokens): a sequence gets the same numbers alone or
    in a batch. It is also up to twice as fast for 4 to 64 tokens.
    """

    weight: Matrix | tuple[Matrix, ...]
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, in] -> [tokens, out], in memory feature by feature: strides (1, tokens)."""
        num_tokens = len(x)
        # One token of bf16 is computed twice: that is faster than oneDNN's product of matrix and vector. In fp32 it
        # would take twice the time, so there one token alone is summed in another order than in a batch.
        if num_tokens == 1 and x.dtype == torch.bfloat16:
            x = x.expand(2, -1)
        y = self.dense(x.dtype) @ x.t()
        if self.bias is not None:
            y += self.bias[:, None]
        return y.t()[:num_tokens]

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole weight [out, in] in `dtype`; no copy where it is that already."""
        if isinstance(self.weight, tuple):
            return torch.cat([_dense(part, dtype) for part in self.weight])
        return _dense(self.weight, dtype)


def _dense(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    return matrix.dequantize(dtype) if isinstance(matrix, StoredMatrix) else matrix.to(dtype)
