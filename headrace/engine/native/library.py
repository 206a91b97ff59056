"""The compiled kernels: structures as in src/layout.h, and the C functions of src/api.cpp. Called by this package only.

The library is compiled at installation (an optional extension of the package). Where there was no compiler it is
missing, and the engine computes with torch.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger()

F32, BF16, INT8, INT4 = range(4)
KV_FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "fp8": 3}


class Matrix(ctypes.Structure):
    _fields_ = [
        ("format", c_int64),
        ("rows", c_int64),
        ("columns", c_int64),
        ("group", c_int64),
        ("has_minima", c_int64),
        ("data", c_void_p),
        ("bias", c_void_p),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        ("qkv", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("input_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("post_attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("post_mlp_norm", c_void_p),
        ("window", c_int64),
        ("local_rope", c_int64),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        *(
            (name, c_int64)
            for name in ("num_layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim")
        ),
        ("is_f32", c_int64),
        ("gelu", c_int64),
        ("max_tokens", c_int64),
        ("eps", c_double),
        ("embedding_scale", c_double),
        ("query_scale", c_double),
        ("attention_softcap", c_double),
        ("logit_softcap", c_double),
        ("frequencies", c_void_p),
        ("local_frequencies", c_void_p),
        ("norm", c_void_p),
        ("embedding", Matrix),
        ("head", Matrix),
        ("layers", POINTER(Layer)),
    ]


class Cache(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        *(
            (name, c_int64)
            for name in (
                "format",
                "block_bytes",
                "layer_bytes",
                "kv_bytes",
                "head_bytes",
                "row_bytes",
                "block_size",
            )
        ),
    ]


class Span(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("first_row", "num_tokens", "start", "first_block")]


class Step(ctypes.Structure):
    _fields_ = [
        ("num_tokens", c_int64),
        ("num_spans", c_int64),
        ("spans", c_void_p),
        ("token_ids", c_void_p),
        ("blocks", c_void_p),
    ]


class AttentionHeads(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "layer", "window")),
        ("scale", c_float),
        ("softcap", c_float),
    ]


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "instruction_sets": (c_char_p, []),
    "use": (c_int, [c_char_p]),
    "team_new": (c_void_p, [c_int64, c_void_p]),
    "team_free": (None, [c_void_p]),
    "pin_caller": (None, [c_int64]),
    "packed_bytes": (c_int64, [POINTER(Matrix)]),
    "pack_bf16": (None, [POINTER(Matrix), c_void_p, c_void_p]),
    "pack_f32": (None, [POINTER(Matrix), c_void_p, c_void_p]),
    "pack_quantized": (None, [POINTER(Matrix), c_void_p, c_void_p, c_void_p, c_void_p]),
    "unpack_row": (None, [POINTER(Matrix), c_int64, c_void_p]),
    "runtime_new": (c_void_p, [POINTER(Model), POINTER(Cache), c_void_p]),
    "runtime_free": (None, [c_void_p]),
    "forward": (None, [c_void_p, POINTER(Step)]),
    "logits": (None, [c_void_p, c_void_p, c_int64, c_void_p]),
    "hidden": (c_void_p, [c_void_p, POINTER(c_int64)]),
    "product": (c_int, [POINTER(Matrix), c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
    "attention": (
        c_int,
        [POINTER(Cache), POINTER(Step), POINTER(AttentionHeads), c_void_p, c_int64, c_void_p, c_void_p],
    ),
    "read": (c_uint64, [c_void_p, c_int64, c_void_p]),
}


@cache
def load() -> Any | None:
    """The library with its functions as attributes, without their prefix; None where it was not compiled."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("_kernels" + suffix)
        if path.exists():
            return _Library(ctypes.CDLL(str(path)))
    log.warning(
        "native kernels are missing, computing with torch, several times slower",
        remedy="install a C++ compiler (g++) and reinstall headrace",
    )
    return None


def instruction_sets() -> list[str]:
    """What the kernels can use on this processor, best first; empty without kernels."""
    library = load()
    return library.instruction_sets().decode().split() if library is not None else []


class _Library:
    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, f"headrace_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
