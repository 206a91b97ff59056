"""The decoder that all families share: pre-norm layers with grouped-query attention, rotary positions and a gated MLP.

`ModelConfig` holds the switches that families differ in. Tensors are taken by the names of `TensorNames`.

Letters in tensor names: T tokens of the step, N tokens of which the logits are wanted, E hidden size, H query heads,
K KV heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from headrace.engine.attention.base import Attend
from headrace.engine.layers.embedding import Embedding
from headrace.engine.layers.linear import Linear
from headrace.engine.layers.rms_norm import RmsNorm
from headrace.engine.layers.rope import RotaryEmbedding, rotate
from headrace.engine.shard import WHOLE, Shard
from headrace.engine.weights.source import TensorSource
from headrace.engine.weights.stored_matrix import Cut, Matrix, joined
from headrace.model_config import ModelConfig

# The sum of a tensor over all ranks of the worker, the same everywhere: its memory is the caller's.
Sum = Callable[[torch.Tensor], torch.Tensor]


def _alone(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    input_norm: RmsNorm
    qkv: Linear  # queries, keys and values in one matrix: one pass over the input
    q_norm: RmsNorm | None  # over each head
    k_norm: RmsNorm | None
    output: Linear
    post_attention_norm: RmsNorm | None  # of what attention adds
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear
    post_mlp_norm: RmsNorm | None  # of what the MLP adds


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """Weights and the forward pass. Where keys and values are kept is the caller's affair: `attend`.

    Of one rank of several: its shard of the weights, and its part of V for the logits. They run `forward` at once.
    """

    config: ModelConfig  # of what is here
    embedding: Embedding
    layers: list[Layer]
    norm: RmsNorm
    head: Linear
    rope: RotaryEmbedding
    local_rope: RotaryEmbedding | None  # of sliding layers, where it differs
    sum_over_ranks: Sum = _alone

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states [T, E] after the last layer, not yet normalized."""
        x_TE = self.sum_over_ranks(self.embedding(token_ids_T))
        rotation = self.rope.at(positions_T, x_TE.dtype)
        local_rotation = self.local_rope.at(positions_T, x_TE.dtype) if self.local_rope else rotation
        for number, layer in enumerate(self.layers):
            q_THD, k_TKD, v_TKD = self._heads(layer, layer.qkv(layer.input_norm(x_TE)))
            turn = local_rotation if self.config.slides(number) else rotation
            o_THD = attend(number, rotate(q_THD, *turn), rotate(k_TKD, *turn), v_TKD)
            x_TE += _normalized(layer.post_attention_norm, self._summed(layer.output(o_THD.flatten(1))))
            gate, up = layer.gate_up(layer.mlp_norm(x_TE)).chunk(2, dim=-1)
            x_TE += _normalized(layer.post_mlp_norm, self._summed(layer.down(self._activated(gate) * up)))
        return x_TE

    def _summed(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self.sum_over_ranks(x_TE.contiguous())  # adding with mixed strides is slow

    def logits(self, x_NE: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] in fp32 of some of `forward`'s rows; of one rank of several, those of its tokens."""
        logits_NV = self.head(self.norm(x_NE)).contiguous().float()
        cap = self.config.logit_softcap
        return logits_NV if not cap else torch.tanh(logits_NV / cap) * cap

    def _heads(self, layer: Layer, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, not yet rotated."""
        heads = qkv.contiguous().unflatten(1, (-1, self.config.head_dim))
        num_kv = self.config.num_kv_heads
        q_THD, k_TKD, v_TKD = heads.split((self.config.num_heads, num_kv, num_kv), dim=1)
        return _normalized(layer.q_norm, q_THD), _normalized(layer.k_norm, k_TKD), v_TKD

    def _activated(self, gate: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) if self.config.activation == "silu" else F.gelu(gate, approximate="tanh")


def _normalized(norm: RmsNorm | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)


def build(config: ModelConfig, tensors: TensorSource, shard: Shard = WHOLE) -> Decoder:
    """Take the weights of a shard. Raises ModelError naming the tensor that does not fit."""
    size = (config.vocab_size, config.hidden_size)
    part = None if shard == WHOLE else shard.part(config.vocab_size)
    cut = None if part is None else Cut(0, part)
    embedding = tensors.take_table("embedding.weight", size, cut)
    head = embedding if config.tie_word_embeddings else tensors.take_table("head.weight", size, cut)
    layers = [_LayerBuilder(config, tensors, number, shard).build() for number in range(config.num_layers)]
    scales_locally = config.local_rope_theta > 0
    return Decoder(
        config=shard.config(config),
        embedding=Embedding(embedding, tensors.dtype, config.embedding_scale, part),
        layers=layers,
        norm=RmsNorm(tensors.take_norm("norm.weight", (config.hidden_size,)), config.rms_norm_eps),
        head=Linear(head),
        rope=RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling),
        local_rope=RotaryEmbedding(config.head_dim, config.local_rope_theta) if scales_locally else None,
    )


@dataclass(frozen=True, slots=True)
class _LayerBuilder:
    config: ModelConfig
    tensors: TensorSource
    number: int
    shard: Shard

    def build(self) -> Layer:
        config, hidden, mlp = self.config, self.config.hidden_size, self.config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q_part = self._features(self.shard.part(config.num_heads))
        kv_part = self._features(self.shard.kv_heads(config.num_kv_heads))
        mlp_part = self.shard.part(mlp)
        return Layer(
            input_norm=self._norm("input_norm", hidden),
            qkv=self._fused(
                {"q": (q_size, q_part), "k": (kv_size, kv_part), "v": (kv_size, kv_part)},
                hidden,
                has_bias=config.attention_bias,
            ),
            q_norm=self._norm("q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=self._norm("k_norm", config.head_dim) if config.qk_norm else None,
            output=self._summed("output", (hidden, q_size), q_part, has_bias=config.output_bias),
            post_attention_norm=self._norm("post_attention_norm", hidden) if config.sandwich_norms else None,
            mlp_norm=self._norm("mlp_norm", hidden),
            gate_up=self._fused(
                {"gate": (mlp, mlp_part), "up": (mlp, mlp_part)}, hidden, has_bias=config.mlp_bias
            ),
            down=self._summed("down", (hidden, mlp), mlp_part, has_bias=config.mlp_bias),
            post_mlp_norm=self._norm("post_mlp_norm", hidden) if config.sandwich_norms else None,
        )

    def _norm(self, part: str, size: int) -> RmsNorm:
        return RmsNorm(self.tensors.take_norm(self._name(part, "weight"), (size,)), self.config.rms_norm_eps)

    def _features(self, heads: range) -> range:
        return range(heads.start * self.config.head_dim, heads.stop * self.config.head_dim)

    def _cut(self, axis: Literal[0, 1], part: range) -> Cut | None:
        return None if self.shard == WHOLE else Cut(axis, part)

    def _fused(self, parts: dict[str, tuple[int, range]], in_size: int, *, has_bias: bool) -> Linear:
        """Several projections of one input as one matrix; `parts`: name to output size, and what of it is wanted."""
        weights: list[Matrix] = []
        biases: list[torch.Tensor] = []
        for name, (size, part) in parts.items():
            cut = self._cut(0, part)
            weights.append(self.tensors.take_matrix(self._name(name, "weight"), (size, in_size), cut))
            if has_bias:
                biases.append(self.tensors.take(self._name(name, "bias"), (size,), cut))
        return Linear(joined(weights), torch.cat(biases) if biases else None)

    def _summed(self, name: str, shape: tuple[int, int], part: range, *, has_bias: bool) -> Linear:
        """A projection whose results are summed over the ranks: one of them adds the bias."""
        weight = self.tensors.take_matrix(self._name(name, "weight"), shape, self._cut(1, part))
        has_bias = has_bias and self.shard.rank == 0
        return Linear(weight, self.tensors.take(self._name(name, "bias"), shape[:1]) if has_bias else None)

    def _name(self, part: str, kind: str) -> str:
        return f"layers.{self.number}.{part}.{kind}"
