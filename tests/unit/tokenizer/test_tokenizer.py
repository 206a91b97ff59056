"""The default model's tokenizer against the one that Hugging Face makes of the same file."""

import json
import random
from dataclasses import replace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidRequest, ModelError
from headrace.model_store import resolve
from headrace.tokenizer import (
    ChatMessage,
    ChatOptions,
    IncrementalDetokenizer,
    Tokenizer,
    hf_folder,
    load_tokenizer,
)
from tests.unit.tokenizer.small_gguf import CONTROL, USER_DEFINED, byte_level, sentence_piece, write_gguf

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   and\ttabs\t\tand\n\nlines\r\n \n x ",
    "I'm can't WE'LL they'd o'clock '' 's",
    "1 22 333 4444 3.14159 1e-9 10² ½ ٣٤ Ⅷ 2026-12-01",
    "naïve façade Ærøskøbing ἄνθρωπος Привет мир שלום عليكم नमस्ते สวัสดี",
    "삼겹살 日本語の文章です。中文,标点。",
    "🙂👍🏽👩‍👩‍👧‍👦🏳️‍🌈 flags 🇩🇪🇯🇵",
    "é vs e\u0301, \u200b\u00a0\u3000\ufeff\x00\x1f\x7f",
    "def f(x: int) -> None:\n    return {'a': [x ** 2 for _ in range(10)]}  # why?\n",
    '<a href="x">&amp;</a> $\\alpha$ ```py\nprint(1)\n``` https://example.org/?q=1&r=a%20b#x',
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_end|><|endoftext|> <|im_end|>a<|im_end|",
    "a" * 3000,
    "\n" * 500 + " " * 500,
]


@pytest.fixture(scope="module")
def tokenizer(model_files):
    return load_tokenizer(model_files)


@pytest.fixture(scope="module")
def transformers_tokenizer(model_files):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_files.path.parent, gguf_file=model_files.path.name)


@pytest.fixture(scope="module")
def reference(transformers_tokenizer):
    """Transformers drops the file's rule that each digit stands alone; here it is put back as SmolLM2's own
    tokenizer.json has it.
    """
    description = json.loads(transformers_tokenizer.backend_tokenizer.to_str())
    digits = {"type": "Digits", "individual_digits": True}
    description["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [digits, description["pre_tokenizer"]],
    }
    return tokenizers.Tokenizer.from_str(json.dumps(description))


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_texts_give_the_ids_of_hugging_face(tokenizer, reference, text):
    assert tokenizer.encode(text, add_special=False) == reference.encode(text, add_special_tokens=False).ids


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_gives_the_ids_of_hugging_face(tokenizer, reference, text):
    assert tokenizer.encode(text, add_special=False) == reference.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_survives_the_way_there_and_back(tokenizer, text):
    written = text.replace("<|im_start|>", "").replace("<|im_end|>", "").replace("<|endoftext|>", "")
    token_ids = tokenizer.encode(text, add_special=False)
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == written


def test_every_token_has_the_bytes_of_hugging_face(tokenizer, reference):
    assert tokenizer.vocab_size == reference.get_vocab_size(with_added_tokens=True)
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        assert text == reference.decode([token_id], skip_special_tokens=True)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 200))
def test_an_answer_of_any_ids_reads_as_hugging_face_decodes_it(tokenizer, reference, seed, count):
    token_ids = random.Random(seed).choices(range(tokenizer.vocab_size), k=count)
    text = IncrementalDetokenizer(tokenizer)
    pieces = [text.push([token_id]) for token_id in token_ids]
    assert "".join(pieces) + text.finish() == reference.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("token_id", [-1, 49152, 2**63])
def test_ids_without_a_text_give_none(tokenizer, token_id):
    assert tokenizer.token_bytes(token_id) == b""


@pytest.mark.parametrize(
    "chat",
    [
        [("user", "Hi")],
        [("system", "Be brief."), ("user", "Hi")],
        [("user", "1 < 2 & 3 > 2?"), ("assistant", "Yes.\n"), ("user", " 👍 ")],
        [("user", "")],
    ],
)
def test_chats_are_written_and_tokenized_as_by_transformers(
    tokenizer, transformers_tokenizer, reference, chat
):
    messages = [ChatMessage(role, content) for role, content in chat]
    as_dicts = [{"role": role, "content": content} for role, content in chat]
    expected = transformers_tokenizer.apply_chat_template(
        as_dicts, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.apply_chat_template(messages) == expected
    assert tokenizer.encode_chat(messages) == reference.encode(expected, add_special_tokens=False).ids
    closed = transformers_tokenizer.apply_chat_template(as_dicts, tokenize=False)
    assert tokenizer.apply_chat_template(messages, ChatOptions(add_generation_prompt=False)) == closed


def test_md_01_control_tokens_in_a_chat_are_one_id_each(tokenizer):
    token_ids = tokenizer.encode_chat([ChatMessage("user", "Hi")])
    assert token_ids.count(1) == 3  # <|im_start|>: the default system turn, the user's, the assistant's
    assert token_ids.count(2) == 2  # <|im_end|>


def test_a_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode("a\ud800b", add_special=True)
    assert caught.value.field == "prompt"
    str(caught.value).encode()  # and the message can be sent


def load(tmp_path, fields):
    return load_tokenizer(resolve(str(write_gguf(tmp_path / "small.gguf", fields))))


def test_md_01_control_tokens_marked_as_text_are_refused_where_the_template_needs_them(tmp_path):
    words = {"<|im_start|>": CONTROL, "<|im_end|>": 1}
    with pytest.raises(ModelError, match=r"<\|im_end\|>.*not marked as a control token"):
        load(tmp_path, byte_level(words) | {"tokenizer.chat_template": CHATML})


GEMMA_TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def test_md_01_and_md_03_turns_of_gemma(tmp_path):
    """BOS comes from the template and from the file, and once; each turn's ends are one id."""
    words = {"<start_of_turn>": CONTROL, "<end_of_turn>": CONTROL, "\n": USER_DEFINED}
    pieces = {"m": -1.0, "o": -2.0, "d": -3.0, "e": -4.0, "l": -5.0, "u": -6.0, "s": -7.0, "r": -8.0}
    fields = sentence_piece(pieces, words) | {
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": GEMMA_TEMPLATE,
    }
    tokenizer = load(tmp_path, fields)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False)

    found = tokenizer.encode_chat([ChatMessage("user", " mu ")])
    assert found == [1, 3, *ids("user"), 5, *ids("mu"), 4, 5, 3, *ids("model"), 5]
    assert [tokenizer.token_bytes(i) for i in (1, 3, 4, 5)] == [b"", b"", b"", b"\n"]


def test_md_01_turns_of_gemma_marked_as_text_are_refused(tmp_path):
    words = {"<start_of_turn>": CONTROL, "<end_of_turn>": 1}
    with pytest.raises(ModelError, match=r"<end_of_turn>.*not marked as a control token"):
        load(tmp_path, sentence_piece({"a": -1.0}, words) | {"tokenizer.chat_template": GEMMA_TEMPLATE})


def test_md_01_a_template_may_name_what_is_no_token_at_all(tmp_path):
    template = "{% if false %}<|eot_id|>{% endif %}{{ messages[0].content }}"
    tokenizer = load(tmp_path, byte_level() | {"tokenizer.chat_template": template})
    assert tokenizer.apply_chat_template([ChatMessage("user", "x")]) == "x"


def test_md_01_without_a_template_chats_are_refused_and_texts_are_served(tmp_path):
    tokenizer = load(tmp_path, byte_level())
    with pytest.raises(InvalidRequest, match="no chat template; send text"):
        tokenizer.encode_chat([ChatMessage("user", "hi")])
    assert tokenizer.encode("hi", add_special=True)


BOS_MODEL = sentence_piece({"a": -1.0, "▁": -2.0, "▁a": -3.0})


def test_md_03_bos_comes_exactly_once_in_texts_and_chats(tmp_path):
    with_bos = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    written = load(tmp_path, BOS_MODEL | {"tokenizer.chat_template": with_bos})
    plain = load(tmp_path, BOS_MODEL | {"tokenizer.chat_template": with_bos.removeprefix("{{ bos_token }}")})
    expected = [1, *plain.encode("a", add_special=False)]
    assert written.encode_chat([ChatMessage("user", "a")]) == expected
    assert plain.encode_chat([ChatMessage("user", "a")]) == expected
    assert plain.encode("a", add_special=True) == expected
    assert plain.encode("<s>a", add_special=True) == expected


def test_md_03_the_same_text_with_and_without_bos_does_not_mix(tmp_path):
    tokenizer = load(tmp_path, BOS_MODEL)
    for _ in range(2):
        assert tokenizer.encode("a a", add_special=True)[0] == 1
        assert 1 not in tokenizer.encode("a a", add_special=False)


def test_md_03_a_model_that_wants_no_bos_gets_none(tmp_path):
    tokenizer = load(tmp_path, BOS_MODEL | {"tokenizer.ggml.add_bos_token": False})
    assert 1 not in tokenizer.encode("a", add_special=True)
    assert tokenizer.encode("<s>a", add_special=True).count(1) == 1  # as the text says


def test_pa_02_an_empty_prompt_is_bos_alone_or_nothing(tmp_path):
    assert load(tmp_path, BOS_MODEL).encode("", add_special=True) == [1]
    assert load(tmp_path, byte_level()).encode("", add_special=True) == []


def test_more_tokens_than_embeddings_are_refused(tmp_path):
    files = resolve(str(write_gguf(tmp_path / "small.gguf", byte_level())))
    short = replace(files, config=replace(files.config, vocab_size=files.config.vocab_size - 1))
    with pytest.raises(ModelError, match="257 tokens, but embeddings for 256 only"):
        load_tokenizer(short)


def test_both_formats_of_one_vocabulary_give_the_same_tokenizer(tmp_path, tokenizer, reference):
    reference.save(str(tmp_path / "tokenizer.json"))
    from_folder = Tokenizer(hf_folder.read_vocabulary(tmp_path))
    assert from_folder.vocab_size == tokenizer.vocab_size
    assert all(from_folder.token_bytes(i) == tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size))
    for text in TEXTS:
        assert from_folder.encode(text, add_special=True) == tokenizer.encode(text, add_special=True)
