"""`generate` of Hugging Face transformers on a GGUF file, timed by token. Started by `engine.py`, a process each run.

Points are PHASE:BATCH:CONTEXT; for each a line of JSON with its tokens per second is printed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class TokenTimes(StoppingCriteria):
    """Never stops; notes when each token of the batch was there."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.seconds.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def token_times(model: Any, batch: int, context: int, num_tokens: int) -> list[float]:
    """Seconds from the start until each of the generated tokens."""
    prompt = torch.randint(0, model.config.vocab_size, (batch, context))
    times = TokenTimes()
    started = time.perf_counter()
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([times]),
    )
    return [seconds - started for seconds in times.seconds]


def rate(model: Any, phase: str, batch: int, context: int, num_generated: int) -> float:
    """Tokens per second."""
    if phase == "prefill":
        return batch * context / token_times(model, batch, context, 1)[0]
    times = token_times(model, batch, context, num_generated + 1)
    return batch * (len(times) - 1) / (times[-1] - times[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--generated", type=int, default=32)
    parser.add_argument("points", nargs="+")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(
        str(arguments.model.parent),
        gguf_file=arguments.model.name,
        dtype=getattr(torch, arguments.dtype),
    ).eval()
    with torch.inference_mode():
        token_times(model, 1, 32, 4)  # to get warm
        for point in arguments.points:
            phase, batch, context = point.split(":")
            found = rate(model, phase, int(batch), int(context), arguments.generated)
            line = {"phase": phase, "batch": int(batch), "context": int(context), "tokens_per_s": found}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
