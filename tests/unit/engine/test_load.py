from __future__ import annotations

import pytest
import torch

from headrace.config import EngineSettings, ModelSettings
from headrace.engine import forward
from headrace.engine.load import choose_dtype, choose_quantization, load_runner
from headrace.engine.native import library


def test_dtypes_by_name():
    for backend in ("cpu", "torch"):
        assert choose_dtype("float32", backend) is torch.float32
        assert choose_dtype("bfloat16", backend) is torch.bfloat16
    assert choose_dtype("auto", "cpu") is torch.bfloat16


@pytest.mark.parametrize("capability", ["", "avx512_bf16", "amx_bf16"])
def test_torch_gets_bfloat16_where_the_processor_has_it(monkeypatch, capability):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True})
    assert choose_dtype("auto", "torch") is (torch.bfloat16 if capability else torch.float32)


def test_stored_quantization_is_kept_for_the_native_kernels_alone():
    assert choose_quantization("auto", "cpu") == "auto"
    assert choose_quantization("auto", "torch") == choose_quantization("auto", "reference") == "none"
    assert choose_quantization("int8", "torch") == "int8"


def test_backend_auto_is_torch_without_the_native_kernels(monkeypatch, tiny_model_files):
    monkeypatch.setattr(library, "load", lambda: None)
    engine = EngineSettings(num_blocks=8, num_threads=1)
    runner, cache = load_runner(tiny_model_files, ModelSettings(dtype="float32"), engine)
    assert isinstance(runner._forward, forward.EagerForward)
    assert cache.num_blocks == 8
    runner.warm_up(engine.max_step_tokens)
    assert not cache.tensor.any()
