"""Configs of every family, as their authors publish them and as transformers writes them."""

from __future__ import annotations

import pytest
from transformers import Gemma3TextConfig

from headrace.errors import ModelError
from headrace.hf_config import read_config
from headrace.model_config import RopeScaling

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}


def read(architecture, **changes):
    return read_config({"architectures": [architecture], **SIZES, **changes}, "small")


def test_mistral_has_a_window_where_its_config_does():
    assert read("MistralForCausalLM", sliding_window=None).sliding_layers == ()
    config = read("MistralForCausalLM", sliding_window=32)
    assert [config.window(layer) for layer in range(8)] == [32] * 8


def test_qwen2_has_biases_that_its_config_does_not_mention():
    config = read("Qwen2ForCausalLM")
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (True, False, False)


def test_qwen_has_a_window_only_where_it_is_used():
    unused = read("Qwen2ForCausalLM", sliding_window=32, use_sliding_window=False, max_window_layers=6)
    assert (unused.sliding_window, unused.sliding_layers) == (0, ())
    used = read("Qwen2ForCausalLM", sliding_window=32, use_sliding_window=True, max_window_layers=6)
    assert [used.window(layer) for layer in range(8)] == [0] * 6 + [32] * 2
    types = ["sliding_attention", "full_attention"] * 4
    listed = read("Qwen3ForCausalLM", sliding_window=32, use_sliding_window=True, layer_types=types)
    assert [listed.window(layer) for layer in range(8)] == [32, 0] * 4


def test_qwen3_normalizes_heads_of_a_size_of_their_own():
    config = read("Qwen3ForCausalLM")
    assert (config.head_dim, config.qk_norm, config.attention_bias) == (128, True, False)
    assert config.query_scale == 128**-0.5


# gemma-3-4b-it, in part: its authors leave out what is the default.
PUBLISHED_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


def test_gemma_3_as_published_without_what_is_the_default():
    config, defaults = read_config(PUBLISHED_4B, "4b"), Gemma3TextConfig()
    assert (config.num_layers, config.hidden_size, config.embedding_scale) == (34, 2560, 2560**0.5)
    assert config.num_heads == defaults.num_attention_heads
    assert config.num_kv_heads == defaults.num_key_value_heads
    assert config.head_dim == defaults.head_dim
    assert config.vocab_size == defaults.vocab_size
    assert config.max_model_tokens == defaults.max_position_embeddings
    assert config.rms_norm_eps == defaults.rms_norm_eps
    assert config.query_scale == defaults.query_pre_attn_scalar**-0.5
    assert config.rope_theta == defaults.rope_parameters["full_attention"]["rope_theta"]
    assert config.local_rope_theta == defaults.rope_parameters["sliding_attention"]["rope_theta"]
    assert (config.tie_word_embeddings, config.activation) == (True, "gelu_tanh")
    assert config.rope_scaling == RopeScaling("linear", 8.0)
    assert [config.window(layer) for layer in range(7)] == [1024] * 5 + [0, 1024]


def test_gemma_3_as_transformers_writes_it_is_the_same():
    text = PUBLISHED_4B["text_config"]
    written = Gemma3TextConfig(**text, architectures=["Gemma3ForCausalLM"]).to_dict()
    assert read_config(written, "4b") == read_config(PUBLISHED_4B, "4b")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ({"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ({"query_pre_attn_scalar": 0}, "lacks a field or has one of the wrong type"),
        ({"layer_types": ["full_attention"]}, "lacks a field or has one of the wrong type"),
        ({"sliding_window": -3}, "sliding_window is -3"),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0},
                }
            },
            "rope scaling of sliding layers is not supported",
        ),
    ],
)
def test_what_is_not_supported_is_named(changes, complaint):
    with pytest.raises(ModelError, match=complaint):
        read("Gemma3ForCausalLM", **changes)
