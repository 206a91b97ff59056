"""Logits of the model, position by position, are those of Hugging Face transformers with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.engine.attention import load_backend
from headrace.engine.attention.base import StepBatch
from headrace.engine.kv_cache import KvCache
from headrace.engine.layers.linear import Linear
from headrace.engine.models import build_model
from headrace.engine.sequence import Chunk, Sequence, StepPlan
from headrace.engine.weights.source import TensorSource
from headrace.engine.weights.tensor_names import LLAMA
from headrace.errors import ModelError
from headrace.model_config import ModelConfig, RopeScaling
from headrace.sampling_params import SamplingParams

NUM_TOKENS = 70
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # differences in their config, and in ours
    "grouped queries": ({}, {}),
    "as many KV heads": ({"num_key_value_heads": 4}, {"num_kv_heads": 4}),
    "one KV head": ({"num_key_value_heads": 1}, {"num_kv_heads": 1}),
    "wide heads": ({"head_dim": 24}, {"head_dim": 24}),
    "tied": ({"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
    "attention bias": ({"attention_bias": True}, {"attention_bias": True, "output_bias": True}),
    "mlp bias": ({"mlp_bias": True}, {"mlp_bias": True}),
    "linear rope": (
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {"rope_scaling": RopeScaling("linear", 4.0)},
    ),
    "llama3 rope": (
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
            }
        },
        {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 64)},
    ),
}


class Tensors(dict[str, torch.Tensor]):
    """Weight files in memory."""

    def stored_name(self, name: str) -> str:
        return LLAMA.of(name)

    def read(self, name: str) -> torch.Tensor:
        return self[name]


def reference(changes: dict[str, Any]) -> LlamaForCausalLM:
    config = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**config, **changes})).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():  # biases among them, which begin as zeros
        parameter.data.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3, generator=generator)
    return model


def model_config(**changes: Any) -> ModelConfig:
    return ModelConfig(
        **{
            "architecture": "llama",
            "num_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "vocab_size": 50,
            "max_model_tokens": 128,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            **changes,
        }
    )


@torch.inference_mode()
@pytest.mark.parametrize(("theirs", "ours"), VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_are_those_of_transformers(theirs, ours):
    their_model, config = reference(theirs), model_config(**ours)
    weights = Tensors(their_model.state_dict())
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    model = build_model(config, TensorSource(weights, torch.float32))
    token_ids = torch.randint(50, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()

    cache = KvCache(config, 16, 8, torch.float32)
    sequence = Sequence("s", token_ids, NUM_TOKENS, SamplingParams(max_tokens=1), root=b"")
    sequence.block_ids = list(range(15, 5, -1))
    batch = StepBatch.of(StepPlan([Chunk(sequence, 0, NUM_TOKENS)]), 8)
    attend = load_backend("reference", cache, config).prepare(batch)
    logits = model.logits(model.forward(batch.token_ids_T, batch.positions_T, attend))

    expected = their_model(torch.tensor([token_ids])).logits[0]
    assert expected.std() > 0.5  # the comparison means something
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_unknown_architecture_is_named():
    with pytest.raises(ModelError, match="'mamba' is not supported; supported: llama"):
        build_model(model_config(architecture="mamba"), TensorSource(Tensors(), torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_linear(dtype, num_tokens):
    generator = torch.Generator().manual_seed(2)
    weight, x = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((6, 16), (num_tokens, 16)))
    bias = torch.randn(6, generator=generator).to(dtype)
    for linear, added in ((Linear(weight), 0.0), (Linear(weight, bias), bias.double())):
        expected = x.double() @ weight.double().T + added
        found = linear(x)
        assert (found.shape, found.dtype) == (expected.shape, dtype)
        tolerance = 1e-5 if dtype == torch.float32 else 0.06
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


def test_linear_gives_a_bf16_token_the_same_bits_alone_and_in_a_batch():
    if not torch.cpu.get_capabilities().get("avx512_bf16"):
        pytest.skip("other kernels than those whose order of sums was measured")
    generator = torch.Generator().manual_seed(3)
    linear = Linear(torch.randn(960, 576, generator=generator).bfloat16())
    x = torch.randn(64, 576, generator=generator).bfloat16()
    together = linear(x)
    for num_tokens in (1, 2, 3, 8, 33):
        assert torch.equal(linear(x[:num_tokens]), together[:num_tokens]), num_tokens
