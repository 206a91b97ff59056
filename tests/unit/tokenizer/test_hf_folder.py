"""Vocabularies of Hugging Face folders, written here with the tokenizers library itself."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headrace.errors import ModelError
from headrace.tokenizer import ChatMessage, IncrementalDetokenizer
from headrace.tokenizer import Tokenizer as OurTokenizer
from headrace.tokenizer.hf_folder import read_vocabulary
from tests.unit.tokenizer.small_gguf import ALPHABET


def byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool é>", special=False)])
    return backend


def sentence_piece() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return backend


def write(folder, backend, **config):
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@pytest.mark.parametrize("text", ["", "a", " a  a", "é 🙂\n", "a<s>a</s>", "<tool é>"])
def test_ids_and_answers_are_those_of_the_folders_own_tokenizer(tmp_path, make, text):
    backend = make()
    ours = OurTokenizer(read_vocabulary(write(tmp_path, backend)))
    token_ids = ours.encode(text, add_special=False)
    assert token_ids == backend.encode(text, add_special_tokens=False).ids
    answer = IncrementalDetokenizer(ours)
    # Control tokens give no text; tokenizers' own decoder takes the letters of an added token for bytes.
    expected = backend.decode(token_ids).replace("<tool \ufffd>", "<tool é>")
    assert "".join(answer.push([token_id]) for token_id in token_ids) + answer.finish() == expected


@pytest.mark.parametrize("bos", ["<s>", {"content": "<s>", "lstrip": False}])
@pytest.mark.parametrize(("declared", "adds_bos"), [(True, True), (False, False), (None, False)])
def test_md_03_bos_is_added_where_the_config_says(tmp_path, bos, declared, adds_bos):
    config = {"bos_token": bos} if declared is None else {"bos_token": bos, "add_bos_token": declared}
    vocabulary = read_vocabulary(write(tmp_path, byte_level(), **config))
    assert (vocabulary.bos_id, vocabulary.adds_bos) == (256, adds_bos)


def test_md_03_bos_is_added_where_the_post_processor_does_and_only_once(tmp_path):
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    template = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = OurTokenizer(
        read_vocabulary(write(tmp_path, backend, bos_token="<s>", chat_template=template))
    )
    assert tokenizer.encode("a", add_special=True).count(256) == 1
    assert tokenizer.encode_chat([ChatMessage("user", "a")]).count(256) == 1
    assert 256 not in tokenizer.encode("a", add_special=False)


@pytest.mark.parametrize(
    ("config", "source"),
    [
        ({}, None),
        ({"chat_template": "in the config"}, "in the config"),
        (
            {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]},
            "d",
        ),
        ({"chat_template": [{"name": "tool_use", "template": "t"}]}, None),
    ],
)
def test_the_chat_template_stands_in_the_config(tmp_path, config, source):
    assert read_vocabulary(write(tmp_path, byte_level(), **config)).chat_template == source


def test_a_template_file_wins_over_the_config(tmp_path):
    write(tmp_path, byte_level(), chat_template="in the config")
    (tmp_path / "chat_template.jinja").write_text("in its file", encoding="utf-8")
    assert read_vocabulary(tmp_path).chat_template == "in its file"


def test_a_folder_without_config_has_ids_and_no_template(tmp_path):
    write(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").unlink()
    vocabulary = read_vocabulary(tmp_path)
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.chat_template) == (None, None, None)


def test_truncation_and_padding_of_the_file_are_not_taken_over(tmp_path):
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    tokenizer = OurTokenizer(read_vocabulary(write(tmp_path, backend)))
    assert len(tokenizer.encode("hello", add_special=False)) == 5


def test_a_decoder_that_is_not_understood_is_named(tmp_path):
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="decoder \\['WordPiece'\\] is not supported"):
        read_vocabulary(write(tmp_path, backend))


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"version": "1.0"}'])
def test_a_damaged_tokenizer_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json: can not be read"):
        read_vocabulary(tmp_path)


def test_a_damaged_config_is_named(tmp_path):
    write(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: can not be read"):
        read_vocabulary(tmp_path)
