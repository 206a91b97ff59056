"""What the decoder's layers do alone. That whole models are right, `tests/contract/test_model_families.py` shows."""

from __future__ import annotations

import pytest
import torch

from headrace.engine.layers.embedding import Embedding
from headrace.engine.layers.linear import Linear
from headrace.engine.layers.rms_norm import RmsNorm
from headrace.engine.models import build_model
from headrace.engine.weights.source import Form, TensorSource
from headrace.errors import ModelError
from headrace.model_config import ModelConfig


class NoFiles(dict[str, torch.Tensor]):
    def stored_name(self, name: str) -> str:
        return name

    def read(self, stored_name: str) -> torch.Tensor:
        return self[stored_name]


def test_unknown_architecture_is_named():
    config = ModelConfig("mamba", 1, 8, 8, 1, 1, 8, 8, 8, 1e4, 1e-5, tie_word_embeddings=True)
    with pytest.raises(ModelError, match="'mamba' is not supported; supported: llama, mistral, qwen2"):
        build_model(config, TensorSource(NoFiles(), Form(torch.float32)))


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


def test_norm_is_rounded_once():
    generator = torch.Generator().manual_seed(4)
    x, weight = torch.randn(3, 64, generator=generator).bfloat16(), torch.randn(64, generator=generator)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = RmsNorm(weight, 1e-5)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, atol=0, rtol=2**-8)


def test_embedding_scale_is_rounded_to_the_dtype():
    """33 ** 0.5 is not a bfloat16; transformers multiplies by the nearest one."""
    weight = torch.full((2, 4), 3.0, dtype=torch.bfloat16)
    found = Embedding(weight, torch.bfloat16, 33**0.5)(torch.tensor([1]))
    assert torch.equal(found, torch.full((1, 4), 3.0, dtype=torch.bfloat16) * torch.tensor(5.75).bfloat16())
    assert torch.equal(weight, torch.full_like(weight, 3.0))
