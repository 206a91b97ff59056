"""From a model's files to a model in memory. Called once, by composition roots."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.engine.models import build_model
from headrace.engine.models.llama import Llama
from headrace.engine.weights.gguf_file import GgufFile
from headrace.engine.weights.safetensors_files import SafetensorsFiles
from headrace.engine.weights.source import TensorSource
from headrace.model_config import ModelFiles


def load_model(
    files: ModelFiles, dtype: torch.dtype, progress: Callable[[int, int], None] | None = None
) -> Llama:
    """Weights in `dtype`. `progress(taken, total)` counts tensors. Raises ModelError naming what does not fit."""
    if files.format == "gguf":
        return build_model(files.config, TensorSource(GgufFile(files.path, files.config), dtype, progress))
    with SafetensorsFiles(files.path) as tensors:
        return build_model(files.config, TensorSource(tensors, dtype, progress))
