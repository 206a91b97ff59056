"""The decoder that all families share: pre-norm layers with grouped-query attention, rotary positions and a gated MLP.

`ModelConfig` holds the switches that families differ in. Tensors are taken by the names of `TensorNames`.

Letters in tensor names: T tokens of the step, N tokens of which the logits are wanted, E hidden size, H query heads,
K KV heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.engine.attention.base import Attend
from headrace.engine.layers.embedding import Embedding
from headrace.engine.layers.linear import Linear
from headrace.engine.layers.rms_norm import RmsNorm
from headrace.engine.layers.rope import RotaryEmbedding, rotate
from headrace.engine.weights.source import TensorSource
from headrace.engine.weights.stored_matrix import joined
from headrace.model_config import ModelConfig


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
    """Weights and the forward pass. Where keys and values are kept is the caller's affair: `attend`."""

    config: ModelConfig
    embedding: Embedding
    layers: list[Layer]
    norm: RmsNorm
    head: Linear
    rope: RotaryEmbedding
    local_rope: RotaryEmbedding | None  # of sliding layers, where it differs

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states [T, E] after the last layer, not yet normalized."""
        x_TE = self.embedding(token_ids_T)
        rotation = self.rope.at(positions_T, x_TE.dtype)
        local_rotation = self.local_rope.at(positions_T, x_TE.dtype) if self.local_rope else rotation
        for number, layer in enumerate(self.layers):
            q_THD, k_TKD, v_TKD = self._heads(layer, layer.qkv(layer.input_norm(x_TE)))
            turn = local_rotation if self.config.slides(number) else rotation
            o_THD = attend(number, rotate(q_THD, *turn), rotate(k_TKD, *turn), v_TKD)
            # Adding with mixed strides is slow.
            x_TE += _normalized(layer.post_attention_norm, layer.output(o_THD.flatten(1)).contiguous())
            gate, up = layer.gate_up(layer.mlp_norm(x_TE)).chunk(2, dim=-1)
            x_TE += _normalized(layer.post_mlp_norm, layer.down(self._activated(gate) * up).contiguous())
        return x_TE

    def logits(self, x_NE: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] in fp32 of some of `forward`'s rows."""
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


def build(config: ModelConfig, tensors: TensorSource) -> Decoder:
    """Take the weights. Raises ModelError naming the tensor that does not fit."""
    size = (config.vocab_size, config.hidden_size)
    embedding = tensors.take_table("embedding.weight", size)
    head = embedding if config.tie_word_embeddings else tensors.take_table("head.weight", size)
    layers = [_LayerBuilder(config, tensors, number).build() for number in range(config.num_layers)]
    scales_locally = config.local_rope_theta > 0
    return Decoder(
        config=config,
        embedding=Embedding(embedding, tensors.dtype, config.embedding_scale),
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

    def build(self) -> Layer:
        config, hidden, mlp = self.config, self.config.hidden_size, self.config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return Layer(
            input_norm=self._norm("input_norm", hidden),
            qkv=self._fused(
                {"q": q_size, "k": kv_size, "v": kv_size}, hidden, has_bias=config.attention_bias
            ),
            q_norm=self._norm("q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=self._norm("k_norm", config.head_dim) if config.qk_norm else None,
            output=self._fused({"output": hidden}, q_size, has_bias=config.output_bias),
            post_attention_norm=self._norm("post_attention_norm", hidden) if config.sandwich_norms else None,
            mlp_norm=self._norm("mlp_norm", hidden),
            gate_up=self._fused({"gate": mlp, "up": mlp}, hidden, has_bias=config.mlp_bias),
            down=self._fused({"down": hidden}, mlp, has_bias=config.mlp_bias),
            post_mlp_norm=self._norm("post_mlp_norm", hidden) if config.sandwich_norms else None,
        )

    def _norm(self, part: str, size: int) -> RmsNorm:
        return RmsNorm(self.tensors.take_norm(self._name(part, "weight"), (size,)), self.config.rms_norm_eps)

    def _fused(self, parts: dict[str, int], in_size: int, *, has_bias: bool) -> Linear:
        """Several projections of one input as one matrix; `parts`: name to output size."""
        tensors = self.tensors
        weights = [
            tensors.take_matrix(self._name(part, "weight"), (size, in_size)) for part, size in parts.items()
        ]
        biases = [tensors.take(self._name(part, "bias"), (size,)) for part, size in parts.items() if has_bias]
        return Linear(joined(weights), torch.cat(biases) if biases else None)

    def _name(self, part: str, kind: str) -> str:
        return f"layers.{self.number}.{part}.{kind}"
