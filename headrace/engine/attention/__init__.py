"""Attention backends by name; one line each. `base.py` is the seam."""

from __future__ import annotations

from importlib import import_module

from headrace.engine.attention.base import AttentionBackend
from headrace.engine.kv_cache import KvCache
from headrace.model_config import ModelConfig

BACKENDS = {
    "reference": ("headrace.engine.attention.reference", "ReferenceAttention"),
    "torch": ("headrace.engine.attention.torch_sdpa", "TorchAttention"),
    "cpu": ("headrace.engine.native.attention", "NativeAttention"),
}


def load_backend(name: str, cache: KvCache, config: ModelConfig) -> AttentionBackend:
    module, attribute = BACKENDS[name]
    return getattr(import_module(module), attribute)(cache, config)
