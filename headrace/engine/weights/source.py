"""The seam between a model and the files its weights are in: tensors by the decoder's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from headrace.engine.weights.stored_matrix import Cut, Matrix, StoredMatrix, quantize
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

    def shape(self, stored_name: str) -> tuple[int, ...]: ...

    def read(self, stored_name: str, cut: Cut | None = None) -> Matrix:
        """The tensor as it is stored: in some floating-point type, or quantized; of a `cut`, only that is read. Raises
        ModelError.
        """
        ...


Quantization = Literal["auto", "none", "int8", "int4"]
_GROUP = 32  # weights along a row that `quantize` rounds together


@dataclass(frozen=True, slots=True)
class Form:
    """What a model wants its weights to be.

    `quantization` is that of matrices. "auto": quantized where the files have them so. "none": all in `dtype`. "int8",
    "int4": rounded to it; the embedding and the head, which need it more, to 8 bits in both. A matrix whose rows are no
    multiple of 32 stays in `dtype`. `norm_offset` is added to the weights of norms.
    """

    dtype: torch.dtype
    quantization: Quantization = "none"
    norm_offset: float = 0.0


class TensorSource:
    """Hands tensors to a model by the decoder's names: checked, and in its form. `shape` is always that of the whole
    tensor, which is taken with no `cut`.
    """

    def __init__(
        self, files: WeightFiles, form: Form, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """`progress(taken, total)` is told after each tensor."""
        self.dtype = form.dtype
        self._files = files
        self._form = form
        self._progress = progress
        self._num_taken = 0

    def take(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> torch.Tensor:
        """The named tensor, in `dtype`. Raises ModelError when it is missing, has another shape or an odd dtype."""
        return self._dense(self._taken(name, shape, cut))

    def take_norm(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Weights of a norm, in fp32. Raises ModelError as `take` does."""
        return _floats(self._taken(name, shape)).float() + self._form.norm_offset

    def take_matrix(self, name: str, shape: tuple[int, int], cut: Cut | None = None) -> Matrix:
        """A matrix, in `dtype` or quantized. Raises ModelError as `take` does."""
        return self._in_form(
            self._taken(name, shape, cut), "q4_1" if self._form.quantization == "int4" else "q8_0"
        )

    def take_table(self, name: str, shape: tuple[int, int], cut: Cut | None = None) -> Matrix:
        """The embedding, or the head. Raises ModelError as `take` does."""
        return self._in_form(self._taken(name, shape, cut), "q8_0")

    def _in_form(self, matrix: Matrix, kind: Literal["q8_0", "q4_1"]) -> Matrix:
        """`kind`: what it is rounded to if it is to be rounded."""
        quantization = self._form.quantization
        stored_so = isinstance(matrix, StoredMatrix) and (quantization == "auto" or matrix.kind == kind)
        if quantization == "none" or (quantization == "auto" and not stored_so) or matrix.shape[1] % _GROUP:
            return self._dense(matrix)
        return matrix if stored_so else quantize(_floats(matrix), kind)

    def _dense(self, matrix: Matrix) -> torch.Tensor:
        return _floats(matrix, self.dtype).to(self.dtype).contiguous()

    def _taken(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Matrix:
        stored_name = self._files.stored_name(name)
        if stored_name not in self._files:
            raise ModelError(f"the model's files have no tensor {stored_name!r}")
        found = self._files.shape(stored_name)
        if found != shape:
            raise ModelError(f"tensor {stored_name!r} has shape {list(found)}, expected {list(shape)}")
        tensor = self._files.read(stored_name, cut)
        if isinstance(tensor, torch.Tensor) and tensor.dtype not in _DTYPES:
            # 8-bit types among them: their scales lie in tensors of their own, which nobody here would apply.
            raise ModelError(
                f"tensor {stored_name!r} is {tensor.dtype}, expected one of {', '.join(map(str, _DTYPES))}"
            )
        self._num_taken += 1
        if self._progress is not None:
            self._progress(self._num_taken, len(self._files))
        return tensor


def _floats(matrix: Matrix, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What is quantized in `dtype`, all else as it is."""
    return matrix.dequantize(dtype) if isinstance(matrix, StoredMatrix) else matrix
