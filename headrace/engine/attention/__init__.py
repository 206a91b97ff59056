"""Attention backends by name; one line each. `base.py` is the seam."""

from __future__ import annotations

from importlib import import_module

from headrace.engine.attention.base import AttentionBackend
from headrace.engine.kv_cache import KvCache

BACKENDS = {
    "reference": ("headrace.engine.attention.reference", "ReferenceAttention"),
    "cpu": ("headrace.engine.attention.cpu", "CpuAttention"),
}


def load_backend(name: str, cache: KvCache) -> AttentionBackend:
    """The named backend; "auto" takes the one for the device that the cache is on."""
    module, attribute = BACKENDS["cpu" if name == "auto" else name]
    return getattr(import_module(module), attribute)(cache)
