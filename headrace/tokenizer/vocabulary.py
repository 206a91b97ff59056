"""What both file formats are turned into before a `Tokenizer` is made of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True, slots=True)
class Vocabulary:
    backend: tokenizers.Tokenizer
    token_bytes: list[bytes]  # by id: what a token adds to the answer's text; b"" for control tokens
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool  # whether a prompt has to begin with BOS
    strips_leading_space: bool  # whether the first word's leading space is an artefact of the encoding
    chat_template: str | None


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (`bytes_to_unicode` in openai/gpt-2), the other way round."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token. With a character outside the alphabet it stands for itself, as in `tokenizers`."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def sentence_piece_bytes(token: str) -> bytes:
    """Bytes of a SentencePiece token: ▁ is a space, <0x0A> is one byte."""
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(byte[1])
    return token.replace("\u2581", " ").encode()
