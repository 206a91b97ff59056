"""Attention backends by name; one line each. `base.py` is the seam."""

from __future__ import annotations

from importlib import import_module

from headrace.engine.attention.base import AttentionBackend
from headrace.engine.kv_cache import KvCache
from headrace.model_config import ModelConfig

BACKENDS = {
    "reference": ("headrace.engine.attention.reference", "ReferenceAttention"),
    "torch": ("headrace.engine.attention.torch_sdpa", "TorchAttention"),
    "cpu": ("headrace.engine.attention.torch_sdpa", "TorchAttention"),
}


def load_backend(name: str, cache: KvCache, config: ModelConfig) -> AttentionBackend:
    """The named backend; "auto" takes the one for the device that the cache is on."""
    module, attribute = BACKENDS["cpu" if name == "auto" else name]
    return getattr(import_module(module), attribute)(cache, config)
