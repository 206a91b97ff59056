"""Small but complete GGUF files, written by the format's own library: a Llama of one layer with a chosen vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
HIDDEN = 8


def write_gguf(path: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A file with the fields of a Llama, and `fields` on top: text, numbers, lists. None takes a field away."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (LLAMA | fields).items():
        _add(writer, key, value)
    num_tokens = len(fields.get("tokenizer.ggml.tokens") or [0])
    embedding = np.zeros((num_tokens, HIDDEN), np.float32)
    for name, tensor in ({"token_embd.weight": embedding} if tensors is None else tensors).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(words: dict[str, int] | None = None, merges: Sequence[str] = ("h e",)) -> dict[str, Any]:
    """Fields of a byte-level vocabulary: `words` with their types, then the 256 bytes, then what `merges` make."""
    tokens = [*(words or {}), *ALPHABET, *(merge.replace(" ", "") for merge in merges)]
    types = [*(words or {}).values()]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types + [NORMAL] * (len(tokens) - len(types)),
        "tokenizer.ggml.merges": list(merges),
    }


def sentence_piece(pieces: dict[str, float], words: dict[str, int] | None = None) -> dict[str, Any]:
    """Fields of a SentencePiece vocabulary: <unk> <s> </s>, `words` with types, the 256 bytes, scored `pieces`."""
    special = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, **(words or {})}
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    num_unscored = len(special) + len(byte_tokens)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*special, *byte_tokens, *pieces],
        "tokenizer.ggml.token_type": [*special.values(), *[BYTE] * 256, *[NORMAL] * len(pieces)],
        "tokenizer.ggml.scores": [*[0.0] * num_unscored, *pieces.values()],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


LLAMA = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
