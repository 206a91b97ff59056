"""Vocabularies of GGUF files against tokenizers that are built independently of the reader."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers

from headrace import gguf_metadata
from headrace.errors import ModelError
from headrace.tokenizer.gguf import read_vocabulary
from tests.unit.tokenizer.small_gguf import (
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    byte_level,
    sentence_piece,
    write_gguf,
)

MERGES = [
    "h e",
    "l l",
    "he ll",
    "hell o",
    "Ġ hello",
    "Ġ Ġ",
    "Ġ ĠĠ",
    "1 2",
    "12 3",
    "123 4",
    "Ġ 1",
    ". Ċ",
    "' s",
]
# As published in the tokenizer.json of gpt2, SmolLM2, Meta-Llama-3 and Qwen2.
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PUBLISHED = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]),
    "qwen2": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), BYTES]
    ),
}
ODD_TEXT = st.text(st.sampled_from("hello 1234.\n\r\t'sS²é🙂"), max_size=30)


def read(folder, fields):
    return read_vocabulary(gguf_metadata.read(write_gguf(folder / "small.gguf", fields)))


@pytest.fixture(scope="module", params=sorted(PUBLISHED))
def pair(request, tmp_path_factory):
    """Ours from a file, and one put together by hand, for the same small vocabulary and the same named rule."""
    fields = byte_level(merges=MERGES) | {"tokenizer.ggml.pre": request.param}
    ours = read(tmp_path_factory.mktemp("gguf"), fields).backend
    vocab = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    by_hand = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=request.param == "llama-bpe"))
    by_hand.pre_tokenizer = PUBLISHED[request.param]
    return ours, by_hand


@given(text=ODD_TEXT)
def test_named_rules_split_as_the_published_tokenizers(pair, text):
    ours, by_hand = pair
    assert ours.encode(text).ids == by_hand.encode(text).ids


def test_the_default_rule_keeps_punctuation_digits_and_words_apart(tmp_path):
    backend = read(tmp_path, byte_level() | {"tokenizer.ggml.pre": None}).backend
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("hello, x=12345")]
    assert pieces == ["hello", ",", "Ġx", "=", "123", "45"]


PIECES = {
    "▁": -1.0,
    "abab": -10.0,
    "a": -2.0,
    "▁▁": -9.0,
    "b": -3.0,
    "ba": -6.0,
    "ab": -5.0,
    "aba": -8.0,
    "▁ab": -7.0,
    "▁a": -4.0,
}


def joined_by_score(text: str) -> list[str]:
    """What SentencePiece is defined to do: join the best-scored neighbours, leftmost first, until none is left."""
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (-PIECES[pieces[i] + pieces[i + 1]], i)
            for i in range(len(pieces) - 1)
            if pieces[i] + pieces[i + 1] in PIECES
        ]
        if not pairs:
            return [
                token
                for piece in pieces
                for token in ([piece] if piece in PIECES else [f"<0x{byte:02X}>" for byte in piece.encode()])
            ]
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@pytest.fixture(scope="module")
def sentence_piece_vocabulary(tmp_path_factory):
    return read(tmp_path_factory.mktemp("gguf"), sentence_piece(PIECES))


@given(text=st.text(st.sampled_from("ab é🙂\n"), min_size=1, max_size=20))
def test_sentence_piece_joins_the_best_scored_neighbours(sentence_piece_vocabulary, text):
    assert sentence_piece_vocabulary.backend.encode(text).tokens == joined_by_score(" " + text)


def test_sentence_piece_without_a_space_in_front(tmp_path):
    vocabulary = read(tmp_path, sentence_piece(PIECES) | {"tokenizer.ggml.add_space_prefix": False})
    assert vocabulary.backend.encode("ab a").tokens == ["ab", "▁a"]
    assert not vocabulary.strips_leading_space


def test_sentence_piece_takes_the_longest_word_of_the_users_first(tmp_path):
    """Gemma's runs of spaces and line ends. They are written with plain spaces, and joined by no score."""
    words = {" " * n: USER_DEFINED for n in range(2, 5)} | {"\n" * n: USER_DEFINED for n in range(1, 3)}
    fields = sentence_piece(PIECES, words) | {"tokenizer.ggml.add_space_prefix": False}
    vocabulary = read(tmp_path, fields)
    tokens = vocabulary.backend.encode("a  b" + " " * 7 + "a b\n\n\nb").tokens
    assert tokens == ["a", " " * 2, "b", " " * 4, " " * 3, "a", "▁", "b", "\n\n", "\n", "b"]
    ids = vocabulary.backend.encode("a   b\n").ids
    assert b"".join(vocabulary.token_bytes[i] for i in ids) == b"a   b\n"


def test_sentence_piece_bytes_are_the_text(sentence_piece_vocabulary):
    token_ids = sentence_piece_vocabulary.backend.encode("ab é🙂\n a").ids
    text = b"".join(sentence_piece_vocabulary.token_bytes[i] for i in token_ids).decode()
    assert text == " ab é🙂\n a"
    assert sentence_piece_vocabulary.strips_leading_space


def test_md_01_every_type_of_token_is_found_and_written_as_its_type_says(tmp_path):
    words = {"<|end|>": CONTROL, "<toolé>": USER_DEFINED, "<none>": UNUSED, "<text>": NORMAL}
    vocabulary = read(tmp_path, byte_level(words))
    encode = vocabulary.backend.encode
    assert encode("a<|end|>b").ids.count(0) == 1
    assert encode("a<toolé>b").ids.count(1) == 1
    assert not {2, 3} & set(encode("a<none>b<text>").ids)
    assert vocabulary.token_bytes[:3] == [b"", "<toolé>".encode(), b""]


@pytest.mark.parametrize(
    ("kind", "fields", "adds_bos"),
    [
        ("llama", {}, True),
        ("llama", {"tokenizer.ggml.add_bos_token": False}, False),
        ("gpt2", {"tokenizer.ggml.bos_token_id": 0}, False),
        ("gpt2", {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.pre": "llama-bpe"}, True),
        ("gpt2", {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True}, True),
        ("gpt2", {"tokenizer.ggml.add_bos_token": True}, False),  # there is no BOS to add
    ],
)
def test_md_03_bos_is_added_where_the_file_says_or_its_kind_does(tmp_path, kind, fields, adds_bos):
    base = sentence_piece(PIECES) if kind == "llama" else byte_level()
    assert read(tmp_path, base | fields).adds_bos is adds_bos


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' is not supported; supported: 'gpt2', 'llama'"),
        ({"tokenizer.ggml.model": None}, "no field 'tokenizer.ggml.model'"),
        ({"tokenizer.ggml.pre": "klingon"}, "pre-tokenizer 'klingon' is not supported; supported: default,"),
        ({"tokenizer.ggml.merges": None}, "no field 'tokenizer.ggml.merges'"),
        ({"tokenizer.ggml.merges": ["x yy"]}, "do not fit together"),
        ({"tokenizer.ggml.merges": ["he"]}, "do not fit together"),
        ({"tokenizer.ggml.merges": [1, 2]}, "'tokenizer.ggml.merges' is no array of str"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "'tokenizer.ggml.tokens' is no array of str"),
        ({"tokenizer.ggml.tokens": "abc"}, "'tokenizer.ggml.tokens' is a str, not a list"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "257 tokens but 2 token types"),
        ({"tokenizer.ggml.token_type": [0.5] * 257}, "is no array of int"),
    ],
)
def test_vocabularies_that_can_not_be_used_say_why(tmp_path, fields, complaint):
    with pytest.raises(ModelError, match=complaint):
        read(tmp_path, byte_level() | fields)


def test_sentence_piece_needs_a_score_for_each_token(tmp_path):
    with pytest.raises(ModelError, match="269 tokens but 1 scores"):
        read(tmp_path, sentence_piece(PIECES) | {"tokenizer.ggml.scores": [0.0]})


def test_without_types_all_tokens_are_text(tmp_path):
    vocabulary = read(tmp_path, byte_level({"<|end|>": CONTROL}) | {"tokenizer.ggml.token_type": None})
    assert 0 not in vocabulary.backend.encode("<|end|>").ids
