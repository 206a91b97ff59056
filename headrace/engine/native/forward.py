"""The whole forward pass as one native call: `ForwardPass` on CPUs. See src/forward.inc for what happens in it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from headrace.engine.kv_cache import KvCache
from headrace.engine.layers.linear import Linear
from headrace.engine.layers.rms_norm import RmsNorm
from headrace.engine.models import decoder
from headrace.engine.models.decoder import Decoder
from headrace.engine.native import library
from headrace.engine.native.attention import cache_struct
from headrace.engine.native.packing import PackedMatrix, Weight, interleaved
from headrace.engine.native.step import StepArrays
from headrace.engine.native.threads import Team
from headrace.engine.sequence import StepPlan
from headrace.errors import ModelError
from headrace.model_config import ModelConfig


class NativeForward:
    def __init__(self, model: Decoder, cache: KvCache, *, num_threads: int, max_step_tokens: int) -> None:
        """Takes the weights out of `model`, one layer at a time, so that they are in memory once."""
        self._kernels: Any = library.load()
        if self._kernels is None:
            raise ModelError("engine.backend is 'cpu', but the native kernels were not compiled: see the log")
        self._max_step_tokens = max_step_tokens
        self._weights = _Weights(model, max_step_tokens)
        self._cache = cache  # its memory has to outlive the kernels' view of it
        self._team = Team(num_threads)
        self._step = StepArrays(cache.block_size_tokens)
        self._vocab_size = model.config.vocab_size
        self._rows = np.empty(0, dtype=np.int64)
        self._logits_NV = torch.empty(0, self._vocab_size)
        handle = self._kernels.runtime_new(self._weights.struct, cache_struct(cache), self._team.handle)
        if not handle:
            raise ModelError(f"no memory for the buffers of a step of {max_step_tokens} tokens")
        self._handle = handle
        self._free = weakref.finalize(self, self._kernels.runtime_free, handle)

    @property
    def weight_bytes(self) -> int:
        """Of all matrices, as they are in memory."""
        return self._weights.num_bytes

    def run(self, plan: StepPlan) -> list[int]:
        """Raises IndexError for a token that the model does not have."""
        assert plan.num_tokens <= self._max_step_tokens
        for chunk in plan.chunks:
            self._check(chunk.sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens])
        self._team.pin_caller()
        last_rows = self._step.fill(plan)
        self._kernels.forward(self._handle, self._step.struct)
        return last_rows

    def _check(self, token_ids: Sequence[int]) -> None:
        # The kernels would read beyond the embedding.
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise IndexError(
                f"token ids from {min(token_ids)} to {max(token_ids)}, of {self._vocab_size} tokens"
            )

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        if len(rows) > len(self._rows):
            self._rows = np.empty(2 * len(rows), dtype=np.int64)
            self._logits_NV = torch.empty(2 * len(rows), self._vocab_size)
        self._rows[: len(rows)] = rows
        # The kernels gather as many rows as a step has tokens; the choices of a few prompts can be more.
        for start in range(0, len(rows), self._max_step_tokens):
            some = min(self._max_step_tokens, len(rows) - start)
            arguments = (self._rows[start:].ctypes.data, some, self._logits_NV[start:].data_ptr())
            self._kernels.logits(self._handle, *arguments)
        return self._logits_NV[: len(rows)]


class _Weights:
    """`struct`, and all that it points to."""

    def __init__(self, model: Decoder, max_step_tokens: int) -> None:
        config, dtype = model.config, model.dtype
        self.num_bytes = 0
        self._dtype = dtype
        self._kept: list[Any] = []
        layers = (library.Layer * config.num_layers)()
        for number in range(config.num_layers):
            self._fill_layer(layers[number], model.layers.pop(0), config, number)
        local = model.local_rope
        struct = library.Model(
            *(config.num_layers, config.hidden_size, config.intermediate_size),
            *(config.num_heads, config.num_kv_heads, config.head_dim),
            is_f32=dtype == torch.float32,
            gelu=config.activation == "gelu_tanh",
            max_tokens=max_step_tokens,
            eps=config.rms_norm_eps,
            embedding_scale=float(torch.tensor(config.embedding_scale, dtype=dtype)),
            query_scale=config.query_scale,
            attention_softcap=config.attention_softcap,
            logit_softcap=config.logit_softcap,
            frequencies=self._floats(model.rope.frequencies),
            local_frequencies=self._floats(local.frequencies) if local else None,
            norm=self._norm(model.norm),
            layers=layers,
        )
        self.struct = struct
        head, embedding = model.head, model.embedding.weight
        struct.head = self._matrix(head.weight, head.bias)
        struct.embedding = struct.head if embedding is head.weight else self._matrix(embedding, None)

    def _fill_layer(self, to: library.Layer, layer: decoder.Layer, config: ModelConfig, number: int) -> None:
        to.qkv = self._linear(layer.qkv)
        to.output = self._linear(layer.output)
        gate_up = layer.gate_up
        order = interleaved(config.intermediate_size)
        to.gate_up = self._matrix(gate_up.weight, gate_up.bias, order)
        to.down = self._linear(layer.down)
        to.input_norm, to.mlp_norm = self._norm(layer.input_norm), self._norm(layer.mlp_norm)
        to.q_norm, to.k_norm = self._norm(layer.q_norm), self._norm(layer.k_norm)
        to.post_attention_norm = self._norm(layer.post_attention_norm)
        to.post_mlp_norm = self._norm(layer.post_mlp_norm)
        to.window = config.window(number)
        to.local_rope = config.slides(number) and config.local_rope_theta > 0

    def _linear(self, linear: Linear) -> library.Matrix:
        return self._matrix(linear.weight, linear.bias)

    def _matrix(
        self, weight: Weight, bias: torch.Tensor | None, order: np.ndarray | None = None
    ) -> library.Matrix:
        packed = PackedMatrix(weight, self._dtype, bias, order)
        self.num_bytes += packed.num_bytes
        self._kept.append(packed)
        return packed.struct

    def _norm(self, norm: RmsNorm | None) -> int | None:
        return None if norm is None else self._floats(norm.weight)

    def _floats(self, values: torch.Tensor) -> int:
        """Address of a copy in fp32."""
        array = values.to(torch.float32).contiguous().clone()
        self._kept.append(array)
        return array.data_ptr()
