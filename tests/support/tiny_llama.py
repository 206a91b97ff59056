"""A Llama of a few thousand random weights, in Hugging Face layout. Answers are nonsense, and reproducible."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

NUM_BYTE_TOKENS = 256
SPECIAL = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
VOCAB_SIZE = 260
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 2, 64, 4, 2, 16, 128
MAX_TOKENS = 4096

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_llama(folder: Path, *, seed: int = 0) -> Path:
    """Write config, weights and tokenizer into `folder` (made if missing) and return it. Equal seeds: equal models."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_TOKENS,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 256,
        "eos_token_id": 258,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    tokenizer_config = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**tokenizer_config, "chat_template": _TEMPLATE})
    )
    save_file(tiny_weights(seed), folder / "model.safetensors")
    return folder


def tiny_weights(seed: int) -> dict[str, torch.Tensor]:
    """fp32 weights by Hugging Face name. Special tokens have a logit of 0, which never wins: no answer ends early."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    weights = {
        "model.embed_tokens.weight": normal(VOCAB_SIZE, HIDDEN, scale=1.0),
        "model.norm.weight": 1 + normal(HIDDEN),
        "lm_head.weight": normal(VOCAB_SIZE, HIDDEN, scale=1.0),
    }
    weights["lm_head.weight"][NUM_BYTE_TOKENS:] = 0.0
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": 1 + normal(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": 1 + normal(HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE),
        }
    return weights


def _tokenizer() -> dict[str, object]:
    """One token per byte: the id is the byte."""
    # GPT-2's stand-in for each byte: printable ones are themselves, the others follow from U+0100 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(NUM_BYTE_TOKENS) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    added = [
        {
            "id": token_id,
            "content": text,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for text, token_id in SPECIAL.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }
