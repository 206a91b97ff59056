"""From a model's files to a model in memory. Called once, by composition roots."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.engine.models import build_model, family_of
from headrace.engine.models.decoder import Decoder
from headrace.engine.shard import WHOLE, Shard
from headrace.engine.weights.gguf_file import GgufFile
from headrace.engine.weights.safetensors_files import SafetensorsFiles
from headrace.engine.weights.source import Form, Quantization, TensorSource
from headrace.model_config import ModelFiles


def load_model(
    files: ModelFiles,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
    *,
    quantization: Quantization = "none",
    shard: Shard = WHOLE,
) -> Decoder:
    """`dtype` is that of what is not quantized; what `quantization` means, `Form` says. Of a `shard`, no more is read.

    `progress(taken, total)` counts tensors. Raises ModelError naming what does not fit.
    """
    config, family = files.config, family_of(files.config)
    if files.format == "gguf":
        gguf = GgufFile(files.path, config, interleaved=family.interleaves_gguf)
        return build_model(config, TensorSource(gguf, Form(dtype, quantization), progress), shard)
    with SafetensorsFiles(files.path, family.names) as folder:
        tensors = TensorSource(folder, Form(dtype, quantization, family.norm_offset), progress)
        return build_model(config, tensors, shard)
