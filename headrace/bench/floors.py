"""The least time that a step can take on a machine: what it has to read and to multiply, over how fast that goes.

Called by the benchmarks. How fast it goes, `headrace.bench.meter` measures beside each of their rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.layers.linear import Linear
from headrace.engine.models.decoder import Decoder
from headrace.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Limits:
    """The best that was seen of a machine with so many threads."""

    bytes_per_s: float
    flops_per_s: float

    def best(self, other: Limits) -> Limits:
        return Limits(
            max(self.bytes_per_s, other.bytes_per_s),
            max(self.flops_per_s, other.flops_per_s),
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What a computation can not do without."""

    flops: float
    read_bytes: float

    def seconds(self, limits: Limits) -> float:
        """The larger of the two times: at best all reading is hidden behind computing, or the other way around."""
        return max(self.flops / limits.flops_per_s, self.read_bytes / limits.bytes_per_s)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Matrices that each token goes through, counted before a backend takes the weights over. Norms and rows of the
    embedding, a thousandth of it, are left out: a floor may be low, never high.
    """

    config: ModelConfig
    layer_weights: int  # of all layers
    layer_bytes: int  # as stored: with their scales where they are quantized
    head_weights: int
    head_bytes: int
    kv_token_bytes: float  # one token's keys and values, of all layers

    @classmethod
    def of(cls, model: Decoder, kv_token_bytes: float) -> ModelSize:
        linears = [
            linear
            for layer in model.layers
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        return cls(
            config=model.config,
            layer_weights=sum(_count(linear)[0] for linear in linears),
            layer_bytes=sum(_count(linear)[1] for linear in linears),
            head_weights=_count(model.head)[0],
            head_bytes=_count(model.head)[1],
            kv_token_bytes=kv_token_bytes,
        )

    @property
    def weight_bytes(self) -> int:
        return self.layer_bytes + self.head_bytes

    def prefill(self, num_tokens: int, max_step_tokens: int) -> Work:
        """A prompt, of which the last token's logits are wanted. Each step reads all layers, and the KV of the steps
        before it.
        """
        starts = range(0, num_tokens, max_step_tokens)
        weights = 2.0 * (self.layer_weights * num_tokens + self.head_weights)
        attention = sum(self._attention_flops(position + 1) for position in range(num_tokens))
        # A window that slides has left some of the earlier tokens behind when the step begins.
        earlier = sum(self._kv_bytes(start) for start in starts)
        return Work(weights + attention, len(starts) * self.layer_bytes + self.head_bytes + earlier)

    def decode(self, batch: int, context: float) -> Work:
        """One token of each of `batch` sequences, which sees `context` tokens, itself included."""
        weights = 2.0 * batch * (self.layer_weights + self.head_weights)
        attention = batch * self._attention_flops(context)
        return Work(weights + attention, self.weight_bytes + batch * self._kv_bytes(context))

    def _attention_flops(self, context: float) -> float:
        """Scores and weighted sum of one token, in all layers."""
        return 4.0 * self.config.num_heads * self.config.head_dim * self._seen_by_layers(context)

    def _kv_bytes(self, context: float) -> float:
        return self.kv_token_bytes * self._seen_by_layers(context) / self.config.num_layers

    def _seen_by_layers(self, context: float) -> float:
        """Tokens that one token sees, summed over the layers."""
        windows = (self.config.window(layer) for layer in range(self.config.num_layers))
        return sum(min(context, window) if window else context for window in windows)


def num_weights(config: ModelConfig) -> int:
    """Of all matrices, embedding and head included: what a model takes in memory before it is loaded."""
    hidden, heads = config.hidden_size, (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    tables = 1 if config.tie_word_embeddings else 2
    return (
        config.num_layers * hidden * (heads + 3 * config.intermediate_size)
        + tables * config.vocab_size * hidden
    )


def _count(linear: Linear) -> tuple[int, int]:
    """Weights, and the bytes they take."""
    parts = linear.weight if isinstance(linear.weight, tuple) else (linear.weight,)
    return sum(part.shape[0] * part.shape[1] for part in parts), sum(part.nbytes for part in parts)
