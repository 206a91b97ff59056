"""The seam between a model and the files its weights are in: tensors by the decoder's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from headrace.errors import ModelError

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class WeightFiles(Protocol):
    def stored_name(self, name: str) -> str:
        """What the files call one of the decoder's tensors."""
        ...

    def __contains__(self, stored_name: str) -> bool: ...

    def __len__(self) -> int:
        """Number of tensors, for progress."""
        ...

    def read(self, stored_name: str) -> torch.Tensor:
        """The tensor, in whatever floating-point type it is stored. Raises ModelError."""
        ...


class TensorSource:
    """Hands tensors to a model by the decoder's names: checked, and in its dtype."""

    def __init__(
        self,
        files: WeightFiles,
        dtype: torch.dtype,
        progress: Callable[[int, int], None] | None = None,
        *,
        norm_offset: float = 0.0,
    ) -> None:
        """`progress(taken, total)` is told after each tensor. `norm_offset` is added to the weights of norms."""
        self.dtype = dtype
        self._files = files
        self._progress = progress
        self._norm_offset = norm_offset
        self._num_taken = 0

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The named tensor. Raises ModelError when it is missing, has another shape or an unexpected dtype."""
        return self._taken(name, shape).to(self.dtype).contiguous()

    def take_norm(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Weights of a norm, in fp32. Raises ModelError as `take` does."""
        return self._taken(name, shape).float() + self._norm_offset

    def _taken(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        stored_name = self._files.stored_name(name)
        if stored_name not in self._files:
            raise ModelError(f"the model's files have no tensor {stored_name!r}")
        tensor = self._files.read(stored_name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {stored_name!r} has shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype not in _DTYPES:
            # 8-bit types among them: their scales lie in tensors of their own, which nobody here would apply.
            raise ModelError(
                f"tensor {stored_name!r} is {tensor.dtype}, expected one of {', '.join(map(str, _DTYPES))}"
            )
        self._num_taken += 1
        if self._progress is not None:
            self._progress(self._num_taken, len(self._files))
        return tensor
