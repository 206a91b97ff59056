"""Tokens to bytes, against the decoders of the tokenizers library."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers

from headrace.tokenizer.vocabulary import byte_level_bytes, sentence_piece_bytes

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def test_the_byte_level_alphabet_stands_for_all_bytes():
    assert sorted(byte_level_bytes(character) for character in ALPHABET) == [bytes([b]) for b in range(256)]


@given(token=st.text(st.sampled_from([*ALPHABET, " ", "世", "\n"]), min_size=1))
def test_byte_level_tokens_decode_as_in_tokenizers(token):
    assert byte_level_bytes(token).decode("utf-8", "replace") == decoders.ByteLevel().decode([token])


@pytest.mark.parametrize(
    ("token", "data"),
    [
        ("▁hello", b" hello"),
        ("a▁b", b"a b"),
        ("<0x0A>", b"\n"),
        ("<0xff>", b"\xff"),
        ("<0xZZ>", b"<0xZZ>"),
        ("<0x+1>", b"<0x+1>"),
        ("<0x0A> ", b"<0x0A> "),
        ("é", "é".encode()),
    ],
)
def test_sentence_piece_tokens(token, data):
    assert sentence_piece_bytes(token) == data
