"""From the metadata of a GGUF file to `ModelConfig`. Called by `headrace.model_reader`.

Families write the same fields, each behind its own name: `llama.block_count`, `qwen3.block_count`. What the tensors say
(biases, norms, a head of its own) is read off them. Files of Mistral call themselves llama.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from headrace.errors import ModelError
from headrace.gguf_metadata import GgufMetadata
from headrace.model_config import ModelConfig, RopeScaling, checked

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
# What files of Gemma 3 do not hold, as in llama.cpp (`src/llama-model.cpp`).
_GEMMA3_GLOBAL_EVERY = 6
_GEMMA3_LOCAL_ROPE_THETA = 10000.0
_GEMMA3_27B_LAYERS = 62

T = TypeVar("T")


def read_config(metadata: GgufMetadata) -> ModelConfig:
    """Raises ModelError for a model that is not supported, or a field that is missing."""
    architecture = metadata.get("general.architecture", str)
    name = metadata.path.name
    if architecture not in _ARCHITECTURES:
        supported = ", ".join(map(repr, _ARCHITECTURES))
        raise ModelError(f"{name}: architecture {architecture!r} is not supported; supported: {supported}")
    if "token_embd.weight" not in metadata.tensors:
        raise ModelError(f"{name}: the file has no tensor 'token_embd.weight'")
    return checked(_Reader(metadata, architecture).config(), name)


class _Reader:
    def __init__(self, metadata: GgufMetadata, architecture: str) -> None:
        self._metadata = metadata
        self._architecture = architecture
        self._name = metadata.path.name

    def _get(self, key: str, kind: type[T]) -> T:
        return self._metadata.get(f"{self._architecture}.{key}", kind)

    def _find(self, key: str, kind: type[T]) -> T | None:
        return self._metadata.find(f"{self._architecture}.{key}", kind)

    def config(self) -> ModelConfig:
        if self._find("expert_count", int):
            raise ModelError(f"{self._name}: mixture-of-experts models are not supported")
        tensors = self._metadata.tensors
        num_heads = self._get("attention.head_count", int)
        head_dim = self._head_dim(num_heads)
        rope_theta = self._find("rope.freq_base", float) or 10000.0
        return ModelConfig(
            architecture=self._architecture,
            num_layers=self._get("block_count", int),
            hidden_size=self._get("embedding_length", int),
            intermediate_size=self._get("feed_forward_length", int),
            num_heads=num_heads,
            num_kv_heads=self._find("attention.head_count_kv", int) or num_heads,
            head_dim=head_dim,
            vocab_size=tensors["token_embd.weight"].shape[-1],
            max_model_tokens=self._get("context_length", int),
            rope_theta=rope_theta,
            rms_norm_eps=self._get("attention.layer_norm_rms_epsilon", float),
            tie_word_embeddings="output.weight" not in tensors,
            rope_scaling=self._rope_scaling(head_dim, rope_theta),
            attention_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            sandwich_norms="blk.0.post_ffw_norm.weight" in tensors,
            **(self._gemma3(num_heads) if self._architecture == "gemma3" else {}),
        )

    def _head_dim(self, num_heads: int) -> int:
        head_dim = self._find("attention.key_length", int)
        head_dim = head_dim or self._get("embedding_length", int) // max(num_heads, 1)
        for key, what in (
            ("rope.dimension_count", "rotary embedding of"),
            ("attention.value_length", "a value of"),
        ):
            size = self._find(key, int) or head_dim
            if size != head_dim:
                raise ModelError(f"{self._name}: {what} {size} of {head_dim} dimensions is not supported")
        return head_dim

    def _gemma3(self, num_heads: int) -> dict[str, Any]:
        num_layers, hidden_size = self._get("block_count", int), self._get("embedding_length", int)
        # The largest model alone scales queries by the size that a head would have by division.
        scales_by_hidden = num_layers == _GEMMA3_27B_LAYERS
        window = self._find("attention.sliding_window", int) or 0
        slides = tuple((layer + 1) % _GEMMA3_GLOBAL_EVERY != 0 for layer in range(num_layers))
        return {
            "activation": "gelu_tanh",
            "embedding_scale": hidden_size**0.5,
            "query_scale": (hidden_size / num_heads) ** -0.5 if scales_by_hidden else 0.0,
            "attention_softcap": self._find("attn_logit_softcapping", float) or 0.0,
            "logit_softcap": self._find("final_logit_softcapping", float) or 0.0,
            "sliding_window": window,
            "sliding_layers": slides if window else (),
            "local_rope_theta": self._find("rope.freq_base_swa", float) or _GEMMA3_LOCAL_ROPE_THETA,
        }

    def _rope_scaling(self, head_dim: int, rope_theta: float) -> RopeScaling | None:
        kind = self._find("rope.scaling.type", str) or "none"
        if kind == "linear":
            return RopeScaling("linear", self._get("rope.scaling.factor", float))
        if kind != "none":
            raise ModelError(
                f"{self._name}: rope scaling {kind!r} is not supported; supported: 'linear' and Llama 3's"
            )
        if "rope_freqs.weight" not in self._metadata.tensors:
            return None
        # Llama 3: the file holds the divisor of each frequency, not the rule behind it. All published models use one
        # rule with different factors, so the factor is read off and the rule is verified.
        divisors = self._metadata.read_f32("rope_freqs.weight")
        scaling = RopeScaling("llama3", float(divisors.max()))
        if divisors.shape != (head_dim // 2,) or not np.allclose(
            divisors, _llama3_divisors(scaling, head_dim, rope_theta), rtol=1e-4
        ):
            raise ModelError(
                f"{self._name}: 'rope_freqs.weight' does not follow Llama 3's rule; it is not supported"
            )
        return scaling


def _llama3_divisors(scaling: RopeScaling, head_dim: int, rope_theta: float) -> np.ndarray:
    """Divisor of each rotary frequency, as in `_compute_llama3_parameters` of Hugging Face transformers."""
    wavelengths = 2 * np.pi * rope_theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_max_tokens / wavelengths
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)  # 0: long waves, divided by the factor; 1: short waves, left alone
    return 1 / ((1 - smooth) / scaling.factor + smooth)
