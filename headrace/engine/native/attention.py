"""The `cpu` attention backend: the kernels' paged attention, called layer by layer. The whole forward pass of
`forward.py` runs the same code without coming back to Python in between.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headrace.engine.attention.base import Attend, StepBatch
from headrace.engine.kv_cache import KvCache
from headrace.engine.native import library
from headrace.engine.native.library import AttentionHeads, Step
from headrace.engine.native.threads import Team
from headrace.errors import InternalError
from headrace.model_config import ModelConfig


class NativeAttention:
    """Implements `AttentionBackend`."""

    def __init__(self, cache: KvCache, config: ModelConfig) -> None:
        self._cache = cache
        self._config = config
        self._struct = cache_struct(cache)
        self._team = Team(1)

    def prepare(self, batch: StepBatch) -> Attend:
        spans = np.empty((len(batch.spans), 4), dtype=np.int64)
        first_block = 0
        for index, span in enumerate(batch.spans):
            spans[index] = span.first_row, span.num_tokens, span.start, first_block
            first_block += len(span.block_ids)
        blocks = torch.cat([span.block_ids for span in batch.spans]).to(torch.int32)
        step = Step(len(batch.token_ids_T), len(spans), spans.ctypes.data, None, blocks.data_ptr())

        def attend(layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
            # The step holds addresses only: `spans` and `blocks` have to outlive it.
            assert step.spans == spans.ctypes.data and step.blocks == blocks.data_ptr()
            self._cache.write(layer, batch.block_ids_T, batch.offsets_T, k_TKD, v_TKD)
            return self._attend(layer, q_THD.contiguous(), step)

        return attend

    def _attend(self, layer: int, q_THD: torch.Tensor, step: Step) -> torch.Tensor:
        config = self._config
        heads = AttentionHeads(
            *(config.num_heads, config.num_kv_heads, config.head_dim, layer, config.window(layer)),
            *(config.query_scale, config.attention_softcap),
        )
        o_THD = torch.empty_like(q_THD)
        kernels: Any = library.load()
        is_f32 = q_THD.dtype == torch.float32
        arguments = (self._struct, step, heads, q_THD.data_ptr(), is_f32, o_THD.data_ptr())
        if kernels.attention(*arguments, self._team.handle):
            raise InternalError("no memory for attention")
        return o_THD


def cache_struct(cache: KvCache) -> library.Cache:
    """Where what is in the cache, in bytes."""
    tensor, item = cache.tensor, cache.tensor.element_size()
    strides = [stride * item for stride in tensor.stride()]
    kind = library.KV_FORMATS[cache.dtype_name]
    return library.Cache(cache.address, kind, *strides[:5], cache.block_size_tokens)
