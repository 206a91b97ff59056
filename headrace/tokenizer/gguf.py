"""A vocabulary from GGUF metadata. Called by `headrace.tokenizer.tokenizer`.

"gpt2" is byte-level BPE with merges and a named rule that splits text first; "llama" is SentencePiece BPE, whose merges
follow from the pieces' scores. Rules and defaults are those of llama.cpp (`src/llama-vocab.cpp`), which defines the
format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from headrace.errors import ModelError
from headrace.gguf_metadata import CONTROL_TOKEN, GgufMetadata
from headrace.tokenizer.vocabulary import Vocabulary, byte_level_bytes, sentence_piece_bytes

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, CONTROL_TOKEN, 4, 5
_SPACE = "\u2581"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


class _Split(NamedTuple):
    patterns: tuple[str, ...]  # applied one after the other, each to the pieces of the one before
    ignore_merges: bool = False  # a piece that is a token is taken whole
    adds_bos: bool = False  # where the file does not say


_SPLITS = {
    "default": _Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _Split((_GPT2,)),
    "smollm": _Split((r"\p{N}", _GPT2)),
    "llama-bpe": _Split((_LLAMA3,), ignore_merges=True, adds_bos=True),
    "qwen2": _Split((_QWEN2,)),
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "gpt2": "gpt-2"}


def read_vocabulary(metadata: GgufMetadata) -> Vocabulary:
    """Raises ModelError for a tokenizer that is not supported, or control tokens that the template could not use."""
    model = metadata.get("tokenizer.ggml.model", str)
    tokens = metadata.get_list("tokenizer.ggml.tokens", str)
    types = _token_types(metadata, len(tokens))
    if model == "gpt2":
        backend, adds_bos, to_bytes = *_byte_level(metadata, tokens), byte_level_bytes
    elif model == "llama":
        backend, adds_bos, to_bytes = _sentence_piece(metadata, tokens, types), True, sentence_piece_bytes
    else:
        raise ModelError(
            f"{metadata.path.name}: tokenizer {model!r} is not supported; supported: 'gpt2', 'llama'"
        )
    _add_tokens(backend, tokens, types)
    bos_id = metadata.find("tokenizer.ggml.bos_token_id", int)
    declared = metadata.find("tokenizer.ggml.add_bos_token", bool)
    return Vocabulary(
        backend=backend,
        token_bytes=_token_bytes(tokens, types, to_bytes),
        bos_id=bos_id,
        eos_id=metadata.find("tokenizer.ggml.eos_token_id", int),
        adds_bos=bos_id is not None and (adds_bos if declared is None else declared),
        strips_leading_space=model == "llama" and _adds_space(metadata),
        chat_template=metadata.find("tokenizer.chat_template", str),
    )


def _token_types(metadata: GgufMetadata, num_tokens: int) -> list[int]:
    if "tokenizer.ggml.token_type" not in metadata.fields:
        return [_NORMAL] * num_tokens
    types = metadata.get_list("tokenizer.ggml.token_type", int)
    if len(types) != num_tokens:
        raise ModelError(f"{metadata.path.name}: {num_tokens} tokens but {len(types)} token types")
    return types


def _byte_level(metadata: GgufMetadata, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    kind = metadata.find("tokenizer.ggml.pre", str) or "default"
    split = _SPLITS.get(_ALIASES.get(kind, kind))
    if split is None:
        supported = ", ".join((*_SPLITS, *_ALIASES))
        raise ModelError(
            f"{metadata.path.name}: pre-tokenizer {kind!r} is not supported; supported: {supported}"
        )
    merges = [_pair(merge) for merge in metadata.get_list("tokenizer.ggml.merges", str)]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = _backend(metadata, vocab, merges, ignore_merges=split.ignore_merges)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend, split.adds_bos


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentence_piece(metadata: GgufMetadata, tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    scores = metadata.get_list("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelError(f"{metadata.path.name}: {len(tokens)} tokens but {len(scores)} scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    backend = _backend(metadata, vocab, _merges_by_score(vocab, scores, types), unknown=unknown)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if _adds_space(metadata) else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    return backend


def _backend(
    metadata: GgufMetadata,
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    ignore_merges: bool = False,
    unknown: str | None = None,
) -> tokenizers.Tokenizer:
    try:
        # Byte fallback has no effect on a byte-level vocabulary, which knows every byte.
        return tokenizers.Tokenizer(
            models.BPE(
                vocab,
                merges,
                unk_token=unknown,
                byte_fallback=True,
                ignore_merges=ignore_merges,
            )
        )
    except Exception as error:  # the Rust library raises plain Exception
        raise ModelError(
            f"{metadata.path.name}: the vocabulary and its merges do not fit together: {error}"
        ) from error


def _merges_by_score(vocab: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """SentencePiece joins, of all neighbours, the pair whose joined piece scores highest.

    So every split of every piece is a merge, best score first.
    """
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, i in vocab.items():
        if types[i] not in (_NORMAL, _USER_DEFINED, _UNUSED):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[i], vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _adds_space(metadata: GgufMetadata) -> bool:
    declared = metadata.find("tokenizer.ggml.add_space_prefix", bool)
    return True if declared is None else declared


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control and user-defined tokens are found in text before anything else, so that each becomes its one id."""
    kinds = list(zip(tokens, types, strict=True))
    backend.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == _USER_DEFINED]
    )


def _token_bytes(tokens: list[str], types: list[int], to_bytes: Callable[[str], bytes]) -> list[bytes]:
    silent = (_UNKNOWN, _CONTROL, _UNUSED)
    table: list[bytes] = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in silent:
            table.append(b"")
        else:
            table.append(token.encode() if kind == _USER_DEFINED else to_bytes(token))
    return table
