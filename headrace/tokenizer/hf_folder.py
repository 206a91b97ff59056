"""A vocabulary from a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat_template.jinja.

Called by `headrace.tokenizer.tokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from headrace.errors import ModelError
from headrace.model_reader import chat_template, read_tokenizer_config, token_text
from headrace.tokenizer.vocabulary import Vocabulary, byte_level_bytes, sentence_piece_bytes


def read_vocabulary(folder: Path) -> Vocabulary:
    """Raises ModelError for a tokenizer that can not be read, or whose tokens can not be turned into bytes."""
    try:
        raw = (folder / "tokenizer.json").read_text(encoding="utf-8")
        backend = tokenizers.Tokenizer.from_str(raw)
    except Exception as error:  # the Rust library raises plain Exception
        raise ModelError(f"{folder / 'tokenizer.json'}: can not be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = read_tokenizer_config(folder)
    steps = _decoder_steps(json.loads(raw).get("decoder"))
    added = backend.get_added_tokens_decoder()
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    bos_id = backend.token_to_id(token_text(config.get("bos_token")))
    return Vocabulary(
        backend=backend,
        token_bytes=_token_bytes(backend, _to_bytes(steps, folder), special),
        bos_id=bos_id,
        eos_id=backend.token_to_id(token_text(config.get("eos_token"))),
        adds_bos=bos_id is not None and _adds_bos(backend, config, bos_id),
        strips_leading_space=_strips_leading_space(steps),
        chat_template=chat_template(folder, config),
    )


def _decoder_steps(decoder: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """The decoder's steps by type: it says how tokens were made from text, whatever the rest of the file does."""
    if decoder is None:
        return {}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return {step["type"]: step for step in steps}


def _to_bytes(steps: dict[str, dict[str, Any]], folder: Path) -> Callable[[str], bytes]:
    if "ByteLevel" in steps:
        return byte_level_bytes
    if "ByteFallback" in steps or "Metaspace" in steps:
        return sentence_piece_bytes
    raise ModelError(
        f"{folder / 'tokenizer.json'}: decoder {list(steps)} is not supported; supported: byte-level and SentencePiece"
    )


def _strips_leading_space(steps: dict[str, dict[str, Any]]) -> bool:
    if "Metaspace" in steps:
        return steps["Metaspace"].get("prepend_scheme", "always") != "never"
    return "Strip" in steps and steps["Strip"].get("start", 0) > 0


def _adds_bos(backend: tokenizers.Tokenizer, config: dict[str, Any], bos_id: int) -> bool:
    declared = config.get("add_bos_token")
    return backend.encode("").ids[:1] == [bos_id] if declared is None else declared


def _token_bytes(
    backend: tokenizers.Tokenizer, to_bytes: Callable[[str], bytes], special: frozenset[int]
) -> list[bytes]:
    vocab = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        if token_id not in special:
            table[token_id] = token.encode() if token_id in added else to_bytes(token)
    return table
