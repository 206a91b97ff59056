"""A step plan as the kernels read it. The arrays are kept from step to step and grow when they have to."""

from __future__ import annotations

import numpy as np

from headrace.engine.native.library import Step
from headrace.engine.sequence import StepPlan


class StepArrays:
    """`fill` makes `struct` describe a plan."""

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size_tokens = block_size_tokens
        self._spans = np.empty((64, 4), dtype=np.int64)
        self._token_ids = np.empty(512, dtype=np.int32)
        self._blocks = np.empty(4096, dtype=np.int32)
        self.struct = Step()

    def fill(self, plan: StepPlan) -> list[int]:
        """Returns the row of each chunk's last token."""
        num_tokens = plan.num_tokens
        size = self._block_size_tokens
        num_blocks = [-(-(chunk.start + chunk.num_tokens) // size) for chunk in plan.chunks]
        self._spans = _grown(self._spans, len(plan.chunks))
        self._token_ids = _grown(self._token_ids, num_tokens)
        self._blocks = _grown(self._blocks, sum(num_blocks))
        last_rows: list[int] = []
        row = block = 0
        for index, chunk in enumerate(plan.chunks):
            end = chunk.start + chunk.num_tokens
            self._spans[index] = row, chunk.num_tokens, chunk.start, block
            self._token_ids[row : row + chunk.num_tokens] = chunk.sequence.token_ids[chunk.start : end]
            self._blocks[block : block + num_blocks[index]] = chunk.sequence.block_ids[: num_blocks[index]]
            row += chunk.num_tokens
            block += num_blocks[index]
            last_rows.append(row - 1)
        struct = self.struct
        struct.num_tokens, struct.num_spans = num_tokens, len(plan.chunks)
        struct.spans = self._spans.ctypes.data
        struct.token_ids = self._token_ids.ctypes.data
        struct.blocks = self._blocks.ctypes.data
        return last_rows


def _grown(array: np.ndarray, length: int) -> np.ndarray:
    """Room for `length` entries. What is in it is lost when it grows."""
    if len(array) >= length:
        return array
    return np.empty((2 * length, *array.shape[1:]), dtype=array.dtype)
