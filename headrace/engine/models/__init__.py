"""Models by architecture; one line each."""

from __future__ import annotations

from importlib import import_module

from headrace.engine.models.llama import Llama
from headrace.engine.weights.source import TensorSource
from headrace.errors import ModelError
from headrace.model_config import ModelConfig

MODELS = {
    "llama": "headrace.engine.models.llama",
}


def build_model(config: ModelConfig, tensors: TensorSource) -> Llama:
    """The model with its weights. Raises ModelError naming the architecture, or the tensor that does not fit."""
    if config.architecture not in MODELS:
        raise ModelError(
            f"architecture {config.architecture!r} is not supported; supported: {', '.join(MODELS)}"
        )
    return import_module(MODELS[config.architecture]).build(config, tensors)
