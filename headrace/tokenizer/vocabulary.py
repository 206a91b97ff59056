"""What both file formats are turned into before a `Tokenizer` is made of it."""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True, slots=True)
class Vocabulary:
    backend: tokenizers.Tokenizer
    token_bytes: list[bytes]  # by id: what a token adds to the answer's text; b"" for control tokens
    special_ids: frozenset[int]  # control tokens
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool  # whether a prompt has to begin with BOS
    strips_leading_space: bool  # whether the first word's leading space is an artefact of the encoding
    chat_template: str | None


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (`bytes_to_unicode` in openai/gpt-2), the other way round."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; a character outside the alphabet stands for itself."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return b"".join(bytes([_ALPHABET[c]]) if c in _ALPHABET else c.encode() for c in token)


def sentence_piece_bytes(token: str) -> bytes:
    """Bytes of a SentencePiece token: ▁ is a space, <0x0A> is one byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()
