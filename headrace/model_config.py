"""What a model is, as plain data. Read from disk by `headrace.model_store`, used by engine and router. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from headrace.errors import ModelError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Frequency scaling of Llama 3 ("llama3"), or position interpolation ("linear": only `factor` counts)."""

    kind: Literal["llama3", "linear"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder: pre-norm layers with grouped-query attention, rotary positions and a gated MLP. What families
    differ in are the switches below; `headrace.hf_config` and `headrace.gguf_config` set them.
    """

    architecture: str  # key of the registry in headrace/engine/models
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_tokens: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False  # of queries, keys and values
    output_bias: bool = False  # of attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # each head's query and key are normalized before they are rotated
    activation: Literal["silu", "gelu_tanh"] = "silu"
    sandwich_norms: bool = False  # attention's and the MLP's output are normalized before they are added
    embedding_scale: float = 1.0  # rounded to the weights' dtype before use
    query_scale: float = 0.0  # 0: head_dim**-0.5, which the field then holds
    attention_softcap: float = 0.0  # cap * tanh(score / cap); 0: off
    logit_softcap: float = 0.0
    sliding_window: int = (
        0  # tokens that a sliding layer's token sees, itself included; 0: there is no such layer
    )
    sliding_layers: tuple[bool, ...] = ()  # by layer: whether it slides; (): none does
    local_rope_theta: float = 0.0  # of sliding layers, which then have no `rope_scaling`; 0: as all others

    def __post_init__(self) -> None:
        if not self.query_scale and self.head_dim > 0:
            object.__setattr__(self, "query_scale", self.head_dim**-0.5)

    def slides(self, layer: int) -> bool:
        return bool(self.sliding_layers) and self.sliding_layers[layer]

    def window(self, layer: int) -> int:
        """Tokens that a token sees in this layer, itself included; 0: all before it."""
        return self.sliding_window if self.slides(layer) else 0


def checked(config: ModelConfig, name: str) -> ModelConfig:
    """The config. Raises ModelError for shapes that no kernel could run, here and not in the middle of loading."""
    sizes = (
        "num_layers",
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "vocab_size",
    )
    for field in (*sizes, "max_model_tokens"):
        if not getattr(config, field) > 0:
            raise ModelError(f"{name}: {field} is {getattr(config, field)}; it must be positive")
    if config.sliding_window < 0:
        raise ModelError(f"{name}: sliding_window is {config.sliding_window}; it must not be negative")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{name}: {config.num_heads} heads can not share {config.num_kv_heads} KV heads evenly"
        )
    if config.head_dim % 2:
        raise ModelError(f"{name}: head_dim {config.head_dim} is odd; rotary embedding needs pairs")
    return config


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine's disk, ready to load.

    `fingerprint` is equal only for equal weights and config, `tokenizer_fingerprint` only for equal tokenizer and chat
    template.
    """

    name: str
    path: Path  # a .gguf file, or a folder in Hugging Face layout
    format: Literal["gguf", "safetensors"]
    config: ModelConfig
    fingerprint: str
    tokenizer_fingerprint: str
    eos_token_ids: frozenset[int]

    def with_limit(self, max_model_tokens: int) -> ModelFiles:
        """The same model, serving at most this many tokens per sequence; 0: what it declares."""
        limit = min(max_model_tokens or self.config.max_model_tokens, self.config.max_model_tokens)
        return replace(self, config=replace(self.config, max_model_tokens=limit))
