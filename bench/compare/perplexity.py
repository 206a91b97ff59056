"""Perplexity of a model on a text, by kind of weights and of KV: Headrace's forward pass beside llama-perplexity.

python bench/compare/perplexity.py
python bench/compare/perplexity.py --tokens 0 --llama-perplexity BUILD/bin/llama-perplexity --gguf MODEL-BF16.gguf

What rounding weights or KV costs in quality. The text is cut into windows of 512 tokens, the model sees each alone, and
the tokens of its second half are scored: as llama-perplexity does, so that its figures on the same file stand beside.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from headrace.config import DEFAULT_CACHE_DIR, DEFAULT_MODEL, EngineSettings
from headrace.engine.forward import ForwardPass, load_forward
from headrace.engine.kv_cache import KvCache
from headrace.engine.native import library
from headrace.engine.sequence import Chunk, StepPlan
from headrace.engine.sequence import Sequence as EngineSequence
from headrace.engine.weights.load import load_model
from headrace.engine.weights.source import Quantization
from headrace.model_config import ModelFiles
from headrace.model_store import resolve
from headrace.sampling_params import SamplingParams
from headrace.tokenizer import load_tokenizer

WINDOW = 512
TEXT = Path(__file__).parents[2] / "tests" / "data" / "shakespeare.txt"
_BLOCK_SIZE = 32
_LLAMA_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    dtype: torch.dtype
    quantization: Quantization = "none"
    kv_quantization: Literal["none", "int8", "fp8"] = "none"


VARIANTS = (
    Variant("float32", torch.float32),
    Variant("bfloat16", torch.bfloat16),
    Variant("int8", torch.bfloat16, "int8"),
    Variant("int4", torch.bfloat16, "int4"),
    Variant("stored", torch.bfloat16, "auto"),
    Variant("kv-int8", torch.bfloat16, "none", "int8"),
    Variant("kv-fp8", torch.bfloat16, "none", "fp8"),
)


@dataclass(frozen=True, slots=True)
class Score:
    perplexity: float
    error: float  # one standard error, tokens taken as independent
    num_scored: int


def windows(token_ids: Sequence[int], window: int, bos_id: int | None) -> Iterator[list[int]]:
    """Whole windows of the text; where the model wants BOS, it takes the place of the first token."""
    for start in range(0, len(token_ids) - window + 1, window):
        tokens = list(token_ids[start : start + window])
        yield tokens if bos_id is None else [bos_id, *tokens[1:]]


def window_losses(forward: ForwardPass, tokens: Sequence[int], block_size_tokens: int) -> torch.Tensor:
    """fp64 -log p of each token behind the first of the second half. The window takes the cache's first blocks."""
    sequence = EngineSequence("perplexity", list(tokens), len(tokens), SamplingParams(max_tokens=1), root=b"")
    sequence.block_ids = list(range(-(-len(tokens) // block_size_tokens)))
    forward.run(StepPlan([Chunk(sequence, 0, len(tokens))]))
    first = len(tokens) // 2
    logits_NV = forward.logits(range(first, len(tokens) - 1)).double()
    following = torch.tensor(tokens[first + 1 :])
    return torch.nn.functional.cross_entropy(logits_NV, following, reduction="none")


def score(losses: torch.Tensor) -> Score:
    perplexity = float(losses.mean().exp())
    error = perplexity * float(losses.std(correction=0)) / math.sqrt(max(len(losses) - 1, 1))
    return Score(perplexity, error, len(losses))


def measure(
    files: ModelFiles,
    variant: Variant,
    token_ids: Sequence[int],
    settings: EngineSettings,
    bos_id: int | None,
) -> Score:
    """`settings.max_step_tokens` is the window."""
    window = settings.max_step_tokens
    settings = settings.model_copy(
        update={
            "kv_quantization": variant.kv_quantization,
            "num_blocks": max(2, -(-window // settings.block_size_tokens)),
        }
    )
    model = load_model(files, variant.dtype, quantization=variant.quantization)
    cache = KvCache.for_model(files.config, settings, variant.dtype)
    forward = load_forward(model, cache, settings)
    losses = [
        window_losses(forward, tokens, settings.block_size_tokens)
        for tokens in windows(token_ids, window, bos_id)
    ]
    return score(torch.cat(losses))


def llama_perplexity(binary: Path, gguf: Path, text: Path, num_windows: int, threads: int) -> Score:
    """Raises RuntimeError with what it said when it gives no figure."""
    command = [str(binary), "-m", str(gguf), "-f", str(text), "-c", str(WINDOW), "-b", str(WINDOW)]
    command += ["--chunks", str(num_windows), "-t", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LLAMA_TIMEOUT_S, check=False)
    return parse_llama(done.stdout + done.stderr, num_windows)


def parse_llama(text: str, num_windows: int) -> Score:
    found = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", text)
    if found is None:
        raise RuntimeError(f"llama-perplexity gave no figure: {text[-500:]}")
    return Score(float(found[1]), float(found[2]), num_windows * (WINDOW - WINDOW // 2 - 1))


def read_tokens(files: ModelFiles, text: Path, num_tokens: int) -> tuple[list[int], int | None]:
    """The first `num_tokens` (0: all) tokens of the text, and BOS if the model begins with it."""
    tokenizer = load_tokenizer(files)
    plain = text.read_text().removesuffix("\n")  # as llama.cpp reads a file
    token_ids = tokenizer.encode(plain, add_special=False)
    with_bos = tokenizer.encode("", add_special=True)
    bos_id = with_bos[0] if with_bos else None
    if bos_id is not None:
        token_ids = [bos_id, *token_ids]
    return token_ids[: num_tokens or None], bos_id


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=16 * WINDOW, help="of the text; 0: all")
    parser.add_argument("--variants", default=",".join(v.name for v in VARIANTS), help="with commas between")
    parser.add_argument("--backend", choices=("cpu", "torch"), default="cpu" if library.load() else "torch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--llama-perplexity", type=Path, help="path of the binary: see README.md")
    parser.add_argument(
        "--gguf",
        type=Path,
        action="append",
        default=[],
        help="for llama-perplexity, beside the model's own file",
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    unknown = set(arguments.variants.split(",")) - {variant.name for variant in VARIANTS}
    if unknown:
        parser.error(f"--variants: there is no {', '.join(sorted(unknown))}")
    if arguments.tokens and arguments.tokens < 2 * WINDOW:
        parser.error(f"--tokens: {arguments.tokens} is not allowed; it must be 0 or at least {2 * WINDOW}")
    return arguments


def main() -> None:
    arguments = _arguments()
    files = resolve(arguments.model, cache_dir=DEFAULT_CACHE_DIR)
    token_ids, bos_id = read_tokens(files, arguments.text, arguments.tokens)
    num_windows = len(token_ids) // WINDOW
    print(f"{files.name}: {num_windows} windows of {WINDOW} tokens of {arguments.text.name}", flush=True)
    settings = EngineSettings(
        block_size_tokens=_BLOCK_SIZE,
        max_step_tokens=WINDOW,
        backend=arguments.backend,
        num_threads=arguments.threads,
    )
    rows: list[dict[str, object]] = []

    def add(name: str, found: Score) -> None:
        rows.append({"name": name, **dataclasses.asdict(found)})
        print(f"{name:<40} {found.perplexity:9.4f} +/- {found.error:.4f}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({"model": files.name, "rows": rows}, indent=1) + "\n")

    for variant in VARIANTS:
        if variant.name in arguments.variants.split(","):
            add(f"headrace {variant.name}", measure(files, variant, token_ids, settings, bos_id))
    if arguments.llama_perplexity:
        own = [files.path] if files.format == "gguf" else []
        for gguf in [*own, *arguments.gguf]:
            run = llama_perplexity(
                arguments.llama_perplexity, gguf, arguments.text, num_windows, arguments.threads
            )
            add(f"llama.cpp {gguf.name}", run)


if __name__ == "__main__":
    main()
