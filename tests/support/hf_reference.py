"""Hugging Face transformers on the same files, fp32: the reference for tokens. It reads the weights by its own code."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace.model_config import ModelFiles


def reference_model(files: ModelFiles) -> PreTrainedModel:
    if files.format == "gguf":
        where = {"pretrained_model_name_or_path": str(files.path.parent), "gguf_file": files.path.name}
    else:
        where = {"pretrained_model_name_or_path": str(files.path)}
    return AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()


@torch.inference_mode()
def reference_greedy(
    model: PreTrainedModel, token_ids: list[int], num_tokens: int
) -> tuple[list[int], list[float]]:
    """The likeliest `num_tokens` tokens, end tokens ignored, and at each step the gap between the two best logits."""
    tokens: list[int] = []
    gaps: list[float] = []
    output = model(torch.tensor([token_ids]), use_cache=True, logits_to_keep=1)
    for _ in range(num_tokens):
        best = output.logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        output = model(torch.tensor([tokens[-1:]]), cache=output.past_key_values, use_cache=True)
    return tokens, gaps
