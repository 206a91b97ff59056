"""Floors against bytes and operations counted by hand, on the tiny Llama.

2 layers, hidden 64, 4 heads and 2 KV heads of 16, MLP 128, vocabulary 260, head not tied to the embedding:

    a layer   qkv (4 + 2 + 2) * 16 = 128 x 64, output 64 x 64, gate and up 256 x 64, down 64 x 128:  36,864 weights
    head      260 x 64:                                                                              16,640
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.bench.floors import Limits, ModelSize, Work, num_weights
from headrace.engine.weights.load import load_model

LAYER_WEIGHTS = 2 * 36_864
HEAD_WEIGHTS = 16_640


def size_of(files, dtype=torch.float32, quantization="none") -> ModelSize:
    return ModelSize.of(load_model(files, dtype, quantization=quantization), kv_token_bytes=512.0)


@pytest.mark.parametrize(
    ("dtype", "quantization", "layer_bytes", "head_bytes"),
    [
        (torch.float32, "none", 4 * LAYER_WEIGHTS, 4 * HEAD_WEIGHTS),
        (torch.bfloat16, "none", 2 * LAYER_WEIGHTS, 2 * HEAD_WEIGHTS),
        # 32 weights take 32 bytes and a scale of 2 …
        (torch.float32, "int8", 34 * LAYER_WEIGHTS // 32, 34 * HEAD_WEIGHTS // 32),
        # … or 16 bytes, a scale and a minimum. The head has 8 bits in both.
        (torch.float32, "int4", 20 * LAYER_WEIGHTS // 32, 34 * HEAD_WEIGHTS // 32),
    ],
)
def test_bytes_are_those_of_the_stored_weights(
    tiny_model_files, dtype, quantization, layer_bytes, head_bytes
):
    size = size_of(tiny_model_files, dtype, quantization)
    assert (size.layer_weights, size.head_weights) == (LAYER_WEIGHTS, HEAD_WEIGHTS)
    assert (size.layer_bytes, size.head_bytes) == (layer_bytes, head_bytes)
    assert size.weight_bytes == layer_bytes + head_bytes


def test_all_weights_are_counted_from_the_config(tiny_model_files):
    config = tiny_model_files.config
    assert num_weights(config) == LAYER_WEIGHTS + 2 * HEAD_WEIGHTS
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    assert num_weights(tied) == LAYER_WEIGHTS + HEAD_WEIGHTS


def test_decode_reads_weights_once_and_the_kv_of_each_sequence(tiny_model_files):
    work = size_of(tiny_model_files).decode(batch=3, context=10)
    assert work.read_bytes == 4 * (LAYER_WEIGHTS + HEAD_WEIGHTS) + 3 * 10 * 512
    # A weight is multiplied and added; a score and a weighted value are 16 of these, in 4 heads and 2 layers.
    assert work.flops == 3 * (2 * (LAYER_WEIGHTS + HEAD_WEIGHTS) + 2 * 4 * 2 * 2 * 16 * 10)


def test_prefill_reads_the_layers_once_a_step(tiny_model_files):
    size = size_of(tiny_model_files)
    whole, steps = size.prefill(5, max_step_tokens=8), size.prefill(5, max_step_tokens=2)
    assert whole.read_bytes == 4 * (LAYER_WEIGHTS + HEAD_WEIGHTS)
    # Three steps; the second reads the KV of 2 tokens, the third that of 4.
    assert steps.read_bytes == 4 * (3 * LAYER_WEIGHTS + HEAD_WEIGHTS) + (2 + 4) * 512
    attention = 2 * 4 * 2 * 2 * 16 * (1 + 2 + 3 + 4 + 5)
    assert whole.flops == steps.flops == 2 * (5 * LAYER_WEIGHTS + HEAD_WEIGHTS) + attention


def test_a_sliding_layer_reads_its_window(tiny_model_files):
    size = size_of(tiny_model_files)
    config = dataclasses.replace(size.config, sliding_window=4, sliding_layers=(True, False))
    slides = dataclasses.replace(size, config=config)
    assert size.decode(1, 10).read_bytes - slides.decode(1, 10).read_bytes == (10 - 4) * 512 / 2
    assert slides.decode(1, 3) == size.decode(1, 3)


def test_the_slower_of_reading_and_computing_is_the_floor():
    assert Work(flops=100.0, read_bytes=60.0).seconds(Limits(bytes_per_s=30.0, flops_per_s=20.0)) == 5.0
    assert Work(flops=100.0, read_bytes=300.0).seconds(Limits(bytes_per_s=30.0, flops_per_s=20.0)) == 10.0


def test_the_best_of_each_limit_is_kept():
    assert Limits(1.0, 20.0).best(Limits(3.0, 10.0)) == Limits(3.0, 20.0)
