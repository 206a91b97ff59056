"""The Llama architecture: pre-norm decoder layers with grouped-query attention, rotary positions and a SwiGLU MLP.

Letters in tensor names: T tokens of the step, N tokens of which the logits are wanted, E hidden size, H query heads,
K KV heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.engine.attention.base import Attend
from headrace.engine.layers.linear import Linear
from headrace.engine.layers.rms_norm import RmsNorm
from headrace.engine.layers.rope import RotaryEmbedding, rotate
from headrace.engine.weights.source import TensorSource
from headrace.model_config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    input_norm: RmsNorm
    qkv: Linear  # queries, keys and values in one matrix: one pass over the input
    output: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class Llama:
    """Weights and the forward pass. Where keys and values are kept is the caller's affair: `attend`."""

    config: ModelConfig
    embedding_VE: torch.Tensor
    layers: list[Layer]
    norm: RmsNorm
    head: Linear
    rope: RotaryEmbedding

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_VE.dtype

    def forward(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states [T, E] after the last layer, not yet normalized."""
        x_TE = self.embedding_VE[token_ids_T]
        rotation = self.rope.at(positions_T, x_TE.dtype)
        for number, layer in enumerate(self.layers):
            qk, v_TKD = self._heads(layer.qkv(layer.input_norm(x_TE)))
            q_THD, k_TKD = self._queries_and_keys(rotate(qk, *rotation))
            o_THD = attend(number, q_THD, k_TKD, v_TKD)
            x_TE += layer.output(o_THD.flatten(1)).contiguous()  # adding with mixed strides is slow
            gate, up = layer.gate_up(layer.mlp_norm(x_TE)).chunk(2, dim=-1)
            x_TE += layer.down(F.silu(gate) * up).contiguous()
        return x_TE

    def logits(self, x_NE: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] in fp32 of some of `forward`'s rows."""
        return self.head(self.norm(x_NE)).contiguous().float()

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys together, which are rotated, and values."""
        kv_heads = self.config.num_kv_heads
        heads = qkv.contiguous().unflatten(1, (-1, self.config.head_dim))
        return heads[:, :-kv_heads], heads[:, -kv_heads:]

    def _queries_and_keys(self, qk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return qk[:, : self.config.num_heads], qk[:, self.config.num_heads :]


def build(config: ModelConfig, tensors: TensorSource) -> Llama:
    """Take the weights by their Hugging Face names. Raises ModelError naming the tensor that does not fit."""
    embedding = tensors.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    if config.tie_word_embeddings:
        head = Linear(embedding)
    else:
        head = Linear(tensors.take("lm_head.weight", (config.vocab_size, config.hidden_size)))
    return Llama(
        config=config,
        embedding_VE=embedding,
        layers=[_layer(config, tensors, f"model.layers.{number}") for number in range(config.num_layers)],
        norm=RmsNorm(tensors.take("model.norm.weight", (config.hidden_size,)), config.rms_norm_eps),
        head=head,
        rope=RotaryEmbedding(config),
    )


def _layer(config: ModelConfig, tensors: TensorSource, prefix: str) -> Layer:
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def norm(name: str) -> RmsNorm:
        return RmsNorm(tensors.take(f"{prefix}.{name}.weight", (hidden,)), config.rms_norm_eps)

    def fused(parts: dict[str, int], in_size: int, *, has_bias: bool) -> Linear:
        """Several projections of one input as one matrix; `parts`: name to output size."""
        names = {f"{prefix}.{name}": size for name, size in parts.items()}
        weights = [tensors.take(f"{name}.weight", (size, in_size)) for name, size in names.items()]
        biases = [tensors.take(f"{name}.bias", (size,)) for name, size in names.items()] if has_bias else []
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

    attention_bias, mlp_bias = config.attention_bias, config.mlp_bias
    qkv = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
    return Layer(
        input_norm=norm("input_layernorm"),
        qkv=fused(qkv, hidden, has_bias=attention_bias),
        output=fused({"self_attn.o_proj": hidden}, q_size, has_bias=attention_bias),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=fused({"mlp.gate_proj": mlp, "mlp.up_proj": mlp}, hidden, has_bias=mlp_bias),
        down=fused({"mlp.down_proj": hidden}, mlp, has_bias=mlp_bias),
    )
