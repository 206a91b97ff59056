"""What a model is, as plain data. Read from disk by `headrace.model_store`, used by engine and router. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal


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
    """Shape of a decoder of the Llama architecture."""

    architecture: str  # key of the registry in headrace/engine/models: "llama"
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
    attention_bias: bool = False
    mlp_bias: bool = False


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
