"""Engines over real models."""

from __future__ import annotations

from typing import Any

from headrace.clock import VirtualClock
from headrace.config import EngineSettings, ModelSettings
from headrace.engine.block_pool import BlockPool
from headrace.engine.engine import Engine
from headrace.engine.load import load_runner
from headrace.model_config import ModelFiles

BLOCK_SIZE = 32


def engine_for(
    files: ModelFiles,
    *,
    dtype: str = "float32",
    quantization: str = "none",
    ends: bool = False,
    **engine: Any,
) -> Engine:
    """`ends`: stop at the model's end-of-text tokens.

    One thread: tests share their cores with others, and threads that wait for each other suffer from that.
    """
    settings = EngineSettings.model_validate(
        {"num_blocks": 300, "block_size_tokens": BLOCK_SIZE, "num_threads": 1, **engine}
    )
    model = ModelSettings.model_validate({"dtype": dtype, "quantization": quantization})
    runner, cache = load_runner(files, model, settings)
    pool = BlockPool(cache.num_blocks, settings.block_size_tokens)
    return Engine(runner, pool, settings, files.eos_token_ids if ends else frozenset(), VirtualClock())
