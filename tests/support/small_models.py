"""Random models of a few thousand weights, one of each kind that families can be, made by Hugging Face transformers.

`write_folder` and `write_gguf` put them on disk as transformers and llama.cpp's converter do. Test files only need
names: `MODELS`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.masking_utils import eager_mask
from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward

from headrace.model_config import ModelFiles
from headrace.model_reader import read_folder, read_gguf

VOCAB_SIZE = 96
WINDOW = 24
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
ATTENTION_CAP = 3.0
# transformers reads the cap of Gemma 3's scores from the config and forgets to hand it to its own function.
AttentionInterface.register("capped", partial(eager_attention_forward, softcap=ATTENTION_CAP))
AttentionMaskInterface.register("capped", eager_mask)

GEMMA3 = {
    "num_hidden_layers": 7,  # files in GGUF always have five sliding layers to a global one
    "head_dim": 32,
    "query_pre_attn_scalar": 32,  # head_dim, as files in GGUF take for granted
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MODELS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama, one KV head": (LlamaConfig, {"num_key_value_heads": 1}),
    "llama, as many KV heads": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama, wide heads, tied": (LlamaConfig, {"head_dim": 24, "tie_word_embeddings": True}),
    "llama, biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama, llama3 rope": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama, narrow": (LlamaConfig, {"head_dim": 12}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral, window": (MistralConfig, {"sliding_window": WINDOW}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2, windows": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3, biases, untied": (Qwen3Config, {"head_dim": 16, "attention_bias": True}),
    "gemma3": (Gemma3TextConfig, GEMMA3),
    "gemma3, scaled rope": (Gemma3TextConfig, {**GEMMA3, "rope_parameters": GEMMA3_ROPE}),
    "gemma3, scaled queries, caps": (
        Gemma3TextConfig,
        {
            **GEMMA3,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": ATTENTION_CAP,
            "final_logit_softcapping": 4.0,
            "attn_implementation": "capped",
        },
    ),
}
IN_GGUF = ("llama", "llama, wide heads, tied", "mistral", "qwen2", "qwen3", "gemma3", "gemma3, scaled rope")


def random_model(name: str) -> PreTrainedModel:
    """In fp32. All weights are random, norms and biases among them."""
    config_class, changes = MODELS[name]
    model = AutoModelForCausalLM.from_config(config_class(**{**SIZES, **changes}), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    is_gemma = config_class is Gemma3TextConfig
    for key, parameter in model.named_parameters():
        mean = 1.0 if "norm" in key and not is_gemma else 0.0  # Gemma's norms scale by 1 + weight
        std = 0.5 if "embed_tokens" in key or "lm_head" in key else 0.2
        parameter.data.normal_(mean=mean, std=std, generator=generator)
    return model


def write_folder(model: PreTrainedModel, folder: Path, **options: Any) -> ModelFiles:
    """`options`: of `save_pretrained`."""
    model.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text("{}")
    return read_folder(folder, "small")


_GGUF_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    drop: str = "",
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> ModelFiles:
    """As llama.cpp's converter writes the model; matrices in `quantization`, each of which must hold whole blocks.

    By their names in GGUF: `drop` a tensor, `shapes` that are wrong.
    """
    is_gemma = model.config.model_type == "gemma3_text"
    is_llama = model.config.model_type in ("llama", "mistral")
    architecture = {"mistral": "llama", "gemma3_text": "gemma3"}.get(
        model.config.model_type, model.config.model_type
    )
    writer = gguf.GGUFWriter(path, architecture)
    _add_fields(writer, model.config, architecture)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if is_llama and (".q_proj." in key or ".k_proj." in key):
            values = _interleaved(values, model.config, ".q_proj." in key)
        if is_gemma and "norm" in key:
            values = values + 1
        name, kind = (
            gguf_name(key, is_gemma),
            quantization if values.ndim > 1 else gguf.GGMLQuantizationType.F32,
        )
        values = values.reshape(shapes.get(name, values.shape))
        if name != drop:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path, "small")


def gguf_name(key: str, is_gemma: bool) -> str:
    key = key.replace("post_attention_layernorm", "post_attention_norm" if is_gemma else "ffn_norm")
    for theirs, ours in _GGUF_PARTS.items():
        key = key.replace(theirs, ours)
    return key


def round_to(model: PreTrainedModel, quantization: gguf.GGMLQuantizationType) -> None:
    """Give the model's matrices the values that they have in a file of this quantization."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            stored = gguf.quants.quantize(parameter.detach().numpy(), quantization)
            parameter.data = torch.from_numpy(gguf.quants.dequantize(stored, quantization).copy())


def _interleaved(values: np.ndarray, config: PreTrainedConfig, is_query: bool) -> np.ndarray:
    """`permute` of llama.cpp's converter."""
    num_heads = config.num_attention_heads if is_query else config.num_key_value_heads
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(halves.reshape(values.shape))


def _add_fields(writer: gguf.GGUFWriter, config: PreTrainedConfig, architecture: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{number}>" for number in range(config.vocab_size)])


def rename_for_images(folder: Path, prefix: str) -> ModelFiles:
    """Turn a folder of Gemma 3's text model into one of the model that also sees images, less its eyes.
    `prefix`: what its tensors are called in place of `model.`.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": config,
    }
    (folder / "config.json").write_text(json.dumps(outer))
    weights = load_file(folder / "model.safetensors")
    save_file(
        {prefix + name.removeprefix("model."): tensor for name, tensor in weights.items()},
        folder / "model.safetensors",
    )
    return read_folder(folder, "small")
