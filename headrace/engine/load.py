"""From a model's files and the settings to a runner that is ready to step. Called once, by composition roots."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headrace.config import EngineSettings, ModelSettings
from headrace.engine.forward import EagerForward, chosen_backend, load_forward
from headrace.engine.kv_cache import KvCache
from headrace.engine.models.decoder import Decoder
from headrace.engine.parallel.group import Group
from headrace.engine.parallel.ranks import ParallelForward, ParallelRunner, Ranks
from headrace.engine.shard import Shard, check_divides
from headrace.engine.torch_runner import TorchRunner
from headrace.engine.weights.load import load_model
from headrace.engine.weights.source import Quantization
from headrace.errors import InvalidRequest
from headrace.model_config import ModelConfig, ModelFiles

# Capabilities of x86 processors. torch emulates the type on others, and is slower with it than with float32.
_NATIVE_BFLOAT16 = ("avx512_bf16", "amx_bf16")


def load_runner(
    files: ModelFiles,
    model: ModelSettings,
    engine: EngineSettings,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[TorchRunner, KvCache]:
    """A model as a whole. `progress(taken, total)` counts tensors. Raises ModelError or InvalidRequest naming what does
    not fit.
    """
    if engine.tensor_parallel_size > 1:
        raise InvalidRequest("engine.tensor_parallel_size", engine.tensor_parallel_size, "must be 1 here")
    backend = chosen_backend(engine.backend)
    dtype = choose_dtype(model.dtype, backend)
    cache = KvCache.for_model(files.config, engine, dtype)
    weights = load_model(
        files, dtype, progress, quantization=choose_quantization(model.quantization, backend)
    )
    forward = load_forward(weights, cache, engine)
    return TorchRunner(forward, cache, files.config.vocab_size, files.eos_token_ids), cache


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """A rank's weights, and memory for its KV."""

    model: Decoder
    cache: KvCache
    backend: str

    def forward(self, group: Group) -> EagerForward:
        model = replace(self.model, sum_over_ranks=group.summed)
        return EagerForward(model, self.cache, self.backend)

    def runner(self, files: ModelFiles, ranks: Ranks) -> ParallelRunner:
        """At rank 0."""
        vocab_size = files.config.vocab_size
        forward = ParallelForward(ranks, self.forward(ranks.group), vocab_size)
        return ParallelRunner(ranks, TorchRunner(forward, self.cache, vocab_size, files.eos_token_ids))


def load_shard(files: ModelFiles, model: ModelSettings, engine: EngineSettings, shard: Shard) -> LoadedShard:
    """One rank's part. Sets the threads of this process. Raises as `load_runner`."""
    check_parallel(files.config, engine)
    backend = "torch" if engine.backend == "auto" else engine.backend
    torch.set_num_threads(engine.num_threads or max(1, len(os.sched_getaffinity(0)) // shard.size))
    dtype = choose_dtype(model.dtype, backend)
    cache = KvCache.for_model(files.config, engine, dtype, shard)
    quantization = choose_quantization(model.quantization, backend)
    weights = load_model(files, dtype, quantization=quantization, shard=shard)
    return LoadedShard(weights, cache, backend)


def check_parallel(config: ModelConfig, engine: EngineSettings) -> None:
    """Raises InvalidRequest for what several ranks can not be, naming the setting."""
    check_divides(config, engine.tensor_parallel_size)
    if engine.backend == "cpu":
        raise InvalidRequest(
            "engine.backend",
            engine.backend,
            f"the native kernels are of one rank: with engine.tensor_parallel_size {engine.tensor_parallel_size} it"
            " must be torch or reference",
        )


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
