"""What tensors are called: by the decoder, by Hugging Face files, by GGUF files. Used by the readers of both.

The decoder's names:   embedding.weight   norm.weight   head.weight   layers.7.q.weight   layers.7.q.bias   …
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_IN_LAYER = re.compile(r"layers\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class TensorNames:
    """A file's own names for the decoder's tensors."""

    layer: str  # what names in layers begin with
    top: Mapping[str, str]
    parts: Mapping[str, str]  # of a layer

    def of(self, name: str) -> str:
        """`name`: the decoder's. A part that these files do not have keeps its name, which no file has."""
        in_layer = _IN_LAYER.fullmatch(name)
        if in_layer is None:
            return self.top[name]
        number, part, kind = in_layer.groups()
        return f"{self.layer}.{number}.{self.parts.get(part, part)}.{kind}"


LLAMA = TensorNames(
    layer="model.layers",
    top={
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    },
    parts={
        "input_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
)

GEMMA3 = TensorNames(
    layer=LLAMA.layer,
    top=LLAMA.top,
    parts={
        **LLAMA.parts,
        "post_attention_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    },
)

GGUF = TensorNames(
    layer="blk",
    top={
        "embedding.weight": "token_embd.weight",
        "norm.weight": "output_norm.weight",
        "head.weight": "output.weight",
    },
    parts={
        "input_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "output": "attn_output",
        "post_attention_norm": "post_attention_norm",
        "mlp_norm": "ffn_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
        "post_mlp_norm": "post_ffw_norm",
    },
)
