"""The seam between a model and the files its weights are in: tensors by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from headrace.errors import ModelError

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class WeightFiles(Protocol):
    def __contains__(self, name: str) -> bool: ...

    def __len__(self) -> int:
        """Number of tensors, for progress."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in whatever floating-point type it is stored. Raises ModelError."""
        ...


class TensorSource:
    """Hands tensors to a model: checked, and in its dtype."""

    def __init__(
        self, files: WeightFiles, dtype: torch.dtype, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """`progress(taken, total)` is told after each tensor."""
        self._files = files
        self._dtype = dtype
        self._progress = progress
        self._num_taken = 0

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The named tensor. Raises ModelError when it is missing, has another shape or an unexpected dtype."""
        if name not in self._files:
            raise ModelError(f"the model's files have no tensor {name!r}")
        tensor = self._files.read(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype not in _DTYPES:
            # 8-bit types among them: their scales lie in tensors of their own, which nobody here would apply.
            raise ModelError(
                f"tensor {name!r} is {tensor.dtype}, expected one of {', '.join(map(str, _DTYPES))}"
            )
        self._num_taken += 1
        if self._progress is not None:
            self._progress(self._num_taken, len(self._files))
        return tensor.to(self._dtype).contiguous()
