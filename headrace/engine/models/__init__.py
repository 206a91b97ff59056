"""Model families by architecture, one line each. All are one `Decoder`, whose switches `ModelConfig` holds."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.models.decoder import Decoder, build
from headrace.engine.shard import WHOLE, Shard
from headrace.engine.weights.source import TensorSource
from headrace.engine.weights.tensor_names import GEMMA3, LLAMA, TensorNames
from headrace.errors import ModelError
from headrace.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Family:
    """What files of a family do in their own way."""

    names: TensorNames  # in Hugging Face files
    norm_offset: float = 0.0  # what Hugging Face files leave out of the weights of norms
    interleaves_gguf: bool = False  # in GGUF files the two halves of each query and key head are interleaved


FAMILIES = {
    "llama": Family(LLAMA, interleaves_gguf=True),
    "mistral": Family(LLAMA, interleaves_gguf=True),
    "qwen2": Family(LLAMA),
    "qwen3": Family(LLAMA),
    "gemma3": Family(GEMMA3, norm_offset=1.0),
}


def family_of(config: ModelConfig) -> Family:
    """Raises ModelError naming the architecture."""
    if config.architecture not in FAMILIES:
        raise ModelError(
            f"architecture {config.architecture!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[config.architecture]


def build_model(config: ModelConfig, tensors: TensorSource, shard: Shard = WHOLE) -> Decoder:
    """A shard of the model with its weights. Raises ModelError naming the architecture, or what does not fit."""
    family_of(config)
    return build(config, tensors, shard)
