"""What GGUF files of each family say of themselves. Whole files: `tests/contract/test_model_families.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ModelError
from headrace.gguf_config import read_config
from headrace.gguf_metadata import GgufMetadata, GgufTensor

SIZES = {
    "block_count": 8,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
}


def read(architecture, *, tensors=(), **changes):
    """`changes`: fields, with __ for a dot."""
    fields = {**SIZES, **{key.replace("__", "."): value for key, value in changes.items()}}
    named = {f"{architecture}.{key}": value for key, value in fields.items()}
    found = {name: GgufTensor(name, (64, 100), 0, 0) for name in ("token_embd.weight", *tensors)}
    return read_config(GgufMetadata(Path("m.gguf"), {"general.architecture": architecture, **named}, found))


def test_biases_and_norms_are_read_off_the_tensors():
    names = ("blk.0.attn_q.bias", "blk.0.attn_q_norm.weight", "blk.0.post_ffw_norm.weight")
    config = read("qwen2", tensors=names)
    assert (config.attention_bias, config.output_bias, config.qk_norm) == (True, False, True)
    assert config.sandwich_norms
    assert not read("qwen3").qk_norm


def test_gemma_3():
    config = read("gemma3", attention__key_length=256, attention__sliding_window=32, rope__freq_base=1e6)
    assert [config.window(layer) for layer in range(8)] == [32] * 5 + [0, 32, 32]
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert (config.head_dim, config.query_scale) == (256, 256**-0.5)
    assert (config.embedding_scale, config.activation, config.logit_softcap) == (8.0, "gelu_tanh", 0.0)
    assert read("gemma3", final_logit_softcapping=30.0).logit_softcap == 30.0


def test_the_largest_gemma_3_scales_queries_by_the_hidden_size():
    config = read(
        "gemma3",
        block_count=62,
        embedding_length=5376,
        attention__head_count=32,
        attention__head_count_kv=16,
        attention__key_length=128,
    )
    assert config.query_scale == 168**-0.5


def test_keys_and_values_of_unlike_size_are_refused():
    with pytest.raises(ModelError, match="a value of 32 of 16 dimensions is not supported"):
        read("llama", attention__value_length=32)
