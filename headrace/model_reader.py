"""From a GGUF file or a Hugging Face folder to `ModelFiles`: config, end tokens, fingerprints.

Called by `headrace.model_store`. Only what the engine computes exactly is accepted; anything else is a ModelError that
names the setting and what is supported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from headrace import gguf_metadata
from headrace.errors import ModelError
from headrace.gguf_metadata import GgufMetadata
from headrace.model_config import ModelConfig, ModelFiles, RopeScaling
from headrace.model_fingerprint import tokenizer_fingerprint, weights_fingerprint

# Some files name only the end of a text, not the end of a turn. A template that uses one of these ends turns with it.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>")
# Mistral without a sliding window computes exactly what Llama does.
_HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
_MAX_SAFETENSORS_INDEX_BYTES = 100_000_000  # the limit of the safetensors library
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def read_gguf(path: Path, name: str) -> ModelFiles:
    """Raises ModelError for a file that is damaged or of a model that is not supported."""
    metadata = gguf_metadata.read(path)
    config = _gguf_config(metadata)
    tokens = metadata.get_list("tokenizer.ggml.tokens", str)
    index = "\n".join(f"{t.name} {t.type_id} {t.shape} {t.offset}" for t in metadata.tensors.values())
    return ModelFiles(
        name=name,
        path=path,
        format="gguf",
        config=config,
        fingerprint=weights_fingerprint(config, [(path, index.encode())]),
        tokenizer_fingerprint=tokenizer_fingerprint(
            {key: value for key, value in metadata.fields.items() if key.startswith("tokenizer.")}
        ),
        eos_token_ids=_checked_ids(_gguf_eos_ids(metadata, tokens), config.vocab_size),
    )


def _gguf_config(metadata: GgufMetadata) -> ModelConfig:
    architecture = metadata.get("general.architecture", str)
    if architecture != "llama":
        raise ModelError(
            f"{metadata.path.name}: architecture {architecture!r} is not supported; supported: 'llama'"
        )
    if metadata.find("llama.expert_count", int):
        raise ModelError(f"{metadata.path.name}: mixture-of-experts models are not supported")
    if "token_embd.weight" not in metadata.tensors:
        raise ModelError(f"{metadata.path.name}: the file has no tensor 'token_embd.weight'")
    hidden_size = metadata.get("llama.embedding_length", int)
    num_heads = metadata.get("llama.attention.head_count", int)
    head_dim = metadata.find("llama.attention.key_length", int) or hidden_size // max(num_heads, 1)
    rotary_dim = metadata.find("llama.rope.dimension_count", int) or head_dim
    if rotary_dim != head_dim:
        raise ModelError(
            f"{metadata.path.name}: rotary embedding of {rotary_dim} of {head_dim} dimensions is not supported"
        )
    rope_theta = metadata.find("llama.rope.freq_base", float) or 10000.0
    return _checked(
        ModelConfig(
            architecture="llama",
            num_layers=metadata.get("llama.block_count", int),
            hidden_size=hidden_size,
            intermediate_size=metadata.get("llama.feed_forward_length", int),
            num_heads=num_heads,
            num_kv_heads=metadata.find("llama.attention.head_count_kv", int) or num_heads,
            head_dim=head_dim,
            vocab_size=metadata.tensors["token_embd.weight"].shape[-1],
            max_model_tokens=metadata.get("llama.context_length", int),
            rope_theta=rope_theta,
            rms_norm_eps=metadata.get("llama.attention.layer_norm_rms_epsilon", float),
            tie_word_embeddings="output.weight" not in metadata.tensors,
            rope_scaling=_gguf_rope_scaling(metadata, head_dim, rope_theta),
            attention_bias="blk.0.attn_q.bias" in metadata.tensors,
            output_bias="blk.0.attn_output.bias" in metadata.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in metadata.tensors,
        ),
        metadata.path.name,
    )


def _gguf_rope_scaling(metadata: GgufMetadata, head_dim: int, rope_theta: float) -> RopeScaling | None:
    kind = metadata.find("llama.rope.scaling.type", str) or "none"
    if kind == "linear":
        return RopeScaling("linear", metadata.get("llama.rope.scaling.factor", float))
    if kind != "none":
        raise ModelError(
            f"{metadata.path.name}: rope scaling {kind!r} is not supported; supported: 'linear' and Llama 3's"
        )
    if "rope_freqs.weight" not in metadata.tensors:
        return None
    # Llama 3: the file holds the divisor of each frequency, not the rule behind it. All published models use one rule
    # with different factors, so the factor is read off and the rule is verified.
    divisors = metadata.read_f32("rope_freqs.weight")
    scaling = RopeScaling("llama3", float(divisors.max()))
    if divisors.shape != (head_dim // 2,) or not np.allclose(
        divisors, _llama3_divisors(scaling, head_dim, rope_theta), rtol=1e-4
    ):
        raise ModelError(
            f"{metadata.path.name}: 'rope_freqs.weight' does not follow Llama 3's rule; it is not supported"
        )
    return scaling


def _llama3_divisors(scaling: RopeScaling, head_dim: int, rope_theta: float) -> np.ndarray:
    """Divisor of each rotary frequency, as in `_compute_llama3_parameters` of Hugging Face transformers."""
    wavelengths = 2 * np.pi * rope_theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_max_tokens / wavelengths
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)  # 0: long waves, divided by the factor; 1: short waves, left alone
    return 1 / ((1 - smooth) / scaling.factor + smooth)


def _gguf_eos_ids(metadata: GgufMetadata, tokens: list[str]) -> set[int]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = {token_id for key in keys if (token_id := metadata.find(key, int)) is not None}
    template = metadata.find("tokenizer.chat_template", str) or ""
    return ids | {tokens.index(token) for token in _END_OF_TURN if token in template and token in tokens}


def read_folder(path: Path, name: str) -> ModelFiles:
    """Raises ModelError for a folder that lacks a file, or of a model that is not supported."""
    raw = read_json(path / "config.json")
    config = _hf_config(raw, name)
    weight_files = sorted(path.glob("*.safetensors"))
    if not weight_files:
        raise ModelError(f"{path}: there are no *.safetensors files")
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"{path}: there is no tokenizer.json (other tokenizer formats are not supported)")
    present = {file: (path / file) for file in _TOKENIZER_FILES if (path / file).is_file()}
    return ModelFiles(
        name=name,
        path=path,
        format="safetensors",
        config=config,
        fingerprint=weights_fingerprint(config, [(file, _safetensors_index(file)) for file in weight_files]),
        tokenizer_fingerprint=tokenizer_fingerprint(
            {file: where.read_text(encoding="utf-8") for file, where in present.items()}
        ),
        eos_token_ids=_checked_ids(_hf_eos_ids(path, raw), config.vocab_size),
    )


def _hf_config(raw: dict[str, Any], name: str) -> ModelConfig:
    _require_supported(raw, name)
    try:
        num_heads = raw["num_attention_heads"]
        return _checked(
            ModelConfig(
                architecture="llama",
                num_layers=raw["num_hidden_layers"],
                hidden_size=raw["hidden_size"],
                intermediate_size=raw["intermediate_size"],
                num_heads=num_heads,
                num_kv_heads=raw.get("num_key_value_heads") or num_heads,
                head_dim=raw.get("head_dim") or raw["hidden_size"] // max(num_heads, 1),
                vocab_size=raw["vocab_size"],
                max_model_tokens=raw["max_position_embeddings"],
                rope_theta=_rope_parameters(raw).get("rope_theta") or raw.get("rope_theta") or 10000.0,
                rms_norm_eps=raw["rms_norm_eps"],
                tie_word_embeddings=raw.get("tie_word_embeddings", False),
                rope_scaling=_hf_rope_scaling(_rope_parameters(raw), name),
                attention_bias=raw.get("attention_bias", False),
                output_bias=raw.get("attention_bias", False),
                mlp_bias=raw.get("mlp_bias", False),
            ),
            name,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{name}: config.json lacks a field or has one of the wrong type: {error}") from None


def _require_supported(raw: dict[str, Any], name: str) -> None:
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in _HF_ARCHITECTURES:
        raise ModelError(
            f"{name}: architecture {architecture!r} is not supported; supported: {', '.join(_HF_ARCHITECTURES)}"
        )
    for key, accepted in (
        ("sliding_window", (None,)),
        ("quantization_config", (None,)),
        ("hidden_act", (None, "silu")),
        ("partial_rotary_factor", (None, 1, 1.0)),
    ):
        if raw.get(key) not in accepted:
            raise ModelError(f"{name}: {key} {raw[key]!r} is not supported; supported: {accepted[-1]!r}")


def _rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 writes rope_parameters, which also holds rope_theta; before, it was rope_scaling.
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _hf_rope_scaling(rope: dict[str, Any], name: str) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    raise ModelError(f"{name}: rope scaling {kind!r} is not supported; supported: 'linear', 'llama3'")


def _hf_eos_ids(path: Path, raw_config: dict[str, Any]) -> set[int]:
    ids = _as_ids(raw_config.get("eos_token_id"))
    if (path / "generation_config.json").is_file():
        ids |= _as_ids(read_json(path / "generation_config.json").get("eos_token_id"))
    # The tokenizer can end a chat turn with another token than the model's config says.
    config = read_tokenizer_config(path)
    template = chat_template(path, config) or ""
    ends = {token for token in _END_OF_TURN if token in template} | {token_text(config.get("eos_token"))}
    added = read_json(path / "tokenizer.json").get("added_tokens") or []
    return ids | {token["id"] for token in added if token["content"] in ends}


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, or nothing where there is none."""
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """A folder's chat template: a file of its own since transformers 4.50, a field of tokenizer_config.json before."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several, by name
        return next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template


def token_text(token: str | dict[str, Any] | None) -> str:
    """A special token's text. In tokenizer_config.json it is plain, an object with its matching rules, or absent."""
    return token["content"] if isinstance(token, dict) else token or ""


def _as_ids(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {value}


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object. Raises ModelError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: can not be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: does not hold a JSON object")
    return content


def _safetensors_index(path: Path) -> bytes:
    """The file's index: 8 bytes with its size, then JSON that says where behind it each tensor begins and ends."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        index = file.read(size) if size <= _MAX_SAFETENSORS_INDEX_BYTES else b""
    try:
        tensors = json.loads(index)
        end = max(
            (entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"), default=0
        )
        complete = path.stat().st_size >= 8 + size + end
    except (ValueError, LookupError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise ModelError(f"{path}: not a safetensors file, or cut short")
    return index


def _checked(config: ModelConfig, name: str) -> ModelConfig:
    """Refuse shapes that no kernel could run, here and not in the middle of loading."""
    sizes = (
        "num_layers",
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "vocab_size",
    )
    for field in (*sizes, "max_model_tokens"):
        if not getattr(config, field) > 0:
            raise ModelError(f"{name}: {field} is {getattr(config, field)}; it must be positive")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{name}: {config.num_heads} heads can not share {config.num_kv_heads} KV heads evenly"
        )
    if config.head_dim % 2:
        raise ModelError(f"{name}: head_dim {config.head_dim} is odd; rotary embedding needs pairs")
    return config


def _checked_ids(ids: Iterable[int], vocab_size: int) -> frozenset[int]:
    for token_id in ids:
        if not (isinstance(token_id, int) and 0 <= token_id < vocab_size):
            raise ModelError(f"end token {token_id!r} lies outside the vocabulary of {vocab_size} tokens")
    return frozenset(ids)
