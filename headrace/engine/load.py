"""From a model's files and the settings to a runner that is ready to step. Called once, by composition roots."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.config import EngineSettings, ModelSettings
from headrace.engine.forward import chosen_backend, load_forward
from headrace.engine.kv_cache import KvCache
from headrace.engine.torch_runner import TorchRunner
from headrace.engine.weights.load import load_model
from headrace.engine.weights.source import Quantization
from headrace.model_config import ModelFiles

# Capabilities of x86 processors. torch emulates the type on others, and is slower with it than with float32.
_NATIVE_BFLOAT16 = ("avx512_bf16", "amx_bf16")


def load_runner(
    files: ModelFiles,
    model: ModelSettings,
    engine: EngineSettings,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[TorchRunner, KvCache]:
    """`progress(taken, total)` counts tensors. Raises ModelError or InvalidRequest naming what does not fit."""
    backend = chosen_backend(engine.backend)
    dtype = choose_dtype(model.dtype, backend)
    cache = KvCache.for_model(files.config, engine, dtype)
    weights = load_model(
        files, dtype, progress, quantization=choose_quantization(model.quantization, backend)
    )
    forward = load_forward(weights, cache, engine)
    return TorchRunner(forward, cache, files.config.vocab_size, files.eos_token_ids), cache


def choose_dtype(name: str, backend: str) -> torch.dtype:
    """ "auto": bfloat16 with the native kernels, for which it is half the memory to read, and where the processor
    multiplies it; else float32.
    """
    if name == "auto":
        capabilities = torch.cpu.get_capabilities()
        is_fast = backend == "cpu" or any(capabilities.get(key) for key in _NATIVE_BFLOAT16)
        return torch.bfloat16 if is_fast else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def choose_quantization(name: Quantization, backend: str) -> Quantization:
    """ "auto" keeps stored quantization for the native kernels alone: torch would dequantize it again in each step."""
    return "none" if name == "auto" and backend != "cpu" else name
