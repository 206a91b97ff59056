"""From a Hugging Face `config.json` to `ModelConfig`, family by family. Called by `headrace.model_reader`.

Only what the engine computes exactly is accepted; anything else is a ModelError that names the setting and what is
supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from headrace.errors import ModelError
from headrace.model_config import ModelConfig, RopeScaling, checked

Raw = dict[str, Any]  # config.json, or its text_config
Switches = dict[str, Any]  # fields of ModelConfig that a family sets in its own way

_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# What configs of Gemma 3 leave out: `Gemma3TextConfig` in Hugging Face transformers.
_GEMMA3_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}


def read_config(raw: Raw, name: str) -> ModelConfig:
    """`name` stands in messages. Raises ModelError for a model that is not supported, or a field that is missing."""
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in _FAMILIES:
        raise ModelError(
            f"{name}: architecture {architecture!r} is not supported; supported: {', '.join(_FAMILIES)}"
        )
    try:
        raw = {**raw, **raw.get("text_config", {})}
        _require_supported(raw, name)
        return checked(_FAMILIES[architecture](raw, name), name)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"{name}: config.json lacks a field or has one of the wrong type: {error}") from None


def _require_supported(raw: Raw, name: str) -> None:
    for key, accepted in (
        ("quantization_config", (None,)),
        ("partial_rotary_factor", (None, 1, 1.0)),
        ("use_bidirectional_attention", (None, False)),
    ):
        if raw.get(key) not in accepted:
            raise ModelError(f"{name}: {key} {raw[key]!r} is not supported; supported: {accepted[-1]!r}")
    key = "hidden_activation" if raw.get("hidden_activation") else "hidden_act"
    if raw.get(key) not in (None, *_ACTIVATIONS):
        supported = ", ".join(map(repr, _ACTIVATIONS))
        raise ModelError(f"{name}: {key} {raw[key]!r} is not supported; supported: {supported}")


def _llama(raw: Raw, name: str) -> ModelConfig:
    has_bias = raw.get("attention_bias", False)
    return _decoder(
        "llama",
        raw,
        _rope(raw, name)
        | {"attention_bias": has_bias, "output_bias": has_bias, "mlp_bias": raw.get("mlp_bias", False)},
    )


def _mistral(raw: Raw, name: str) -> ModelConfig:
    return _decoder("mistral", raw, _rope(raw, name) | _windows(raw, lambda _: True))


def _qwen2(raw: Raw, name: str) -> ModelConfig:
    return _decoder("qwen2", raw, _rope(raw, name) | _qwen_windows(raw) | {"attention_bias": True})


def _qwen3(raw: Raw, name: str) -> ModelConfig:
    has_bias = raw.get("attention_bias", False)
    switches = {"attention_bias": has_bias, "output_bias": has_bias, "qk_norm": True}
    # head_dim is not hidden_size / num_attention_heads, and 128 where the config does not say.
    return _decoder("qwen3", {"head_dim": 128, **raw}, _rope(raw, name) | _qwen_windows(raw) | switches)


def _gemma3(raw: Raw, name: str) -> ModelConfig:
    raw = {**_GEMMA3_DEFAULTS, **raw}
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    has_bias = raw.get("attention_bias", False)
    switches = {
        "attention_bias": has_bias,
        "output_bias": has_bias,
        "qk_norm": True,
        "sandwich_norms": True,
        "embedding_scale": raw["hidden_size"] ** 0.5,
        "query_scale": raw["query_pre_attn_scalar"] ** -0.5,
        "attention_softcap": raw.get("attn_logit_softcapping") or 0.0,
        "logit_softcap": raw.get("final_logit_softcapping") or 0.0,
    }
    windows = _windows(raw, lambda layer: (layer + 1) % pattern != 0)
    return _decoder("gemma3", raw, _gemma3_rope(raw, name) | windows | switches)


_FAMILIES: dict[str, Callable[[Raw, str], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,  # its text part; images are not supported
}


def _decoder(architecture: str, raw: Raw, switches: Switches) -> ModelConfig:
    """What all families write alike."""
    num_heads = raw["num_attention_heads"]
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or "silu"
    return ModelConfig(
        architecture=architecture,
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // max(num_heads, 1),
        vocab_size=raw["vocab_size"],
        max_model_tokens=raw["max_position_embeddings"],
        rms_norm_eps=raw["rms_norm_eps"],
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        activation=_ACTIVATIONS[activation],
        **switches,
    )


def _windows(raw: Raw, slides: Callable[[int], bool]) -> Switches:
    """`slides`: whether a layer does, where the config does not list the types of layers."""
    if not raw.get("sliding_window"):
        return {}
    types = raw.get("layer_types")
    layers = range(raw["num_hidden_layers"])
    sliding = tuple(types[layer] == "sliding_attention" if types else slides(layer) for layer in layers)
    return {"sliding_window": raw["sliding_window"], "sliding_layers": sliding} if any(sliding) else {}


def _qwen_windows(raw: Raw) -> Switches:
    # The config has a window that it does not use.
    if not raw.get("use_sliding_window", False):
        return {}
    return _windows(raw, lambda layer: layer >= raw.get("max_window_layers", 28))


def _rope(raw: Raw, name: str) -> Switches:
    # transformers 5 writes rope_parameters, which also holds rope_theta; before, it was rope_scaling.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    return {"rope_theta": theta, "rope_scaling": _rope_scaling(rope, name)}


def _gemma3_rope(raw: Raw, name: str) -> Switches:
    """Sliding layers have a base of their own, and are not scaled."""
    by_type = raw.get("rope_parameters") or {}
    if "full_attention" not in by_type:
        return _rope(raw, name) | {"local_rope_theta": raw["rope_local_base_freq"]}
    local = by_type["sliding_attention"]
    if _rope_scaling(local, name) is not None:
        raise ModelError(f"{name}: rope scaling of sliding layers is not supported")
    return _rope({"rope_parameters": by_type["full_attention"]}, name) | {
        "local_rope_theta": local["rope_theta"]
    }


def _rope_scaling(rope: dict[str, Any], name: str) -> RopeScaling | None:
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
