"""What is read of a model, what is refused, and when two models count as one."""

import json
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.errors import ModelError
from headrace.model_config import ModelConfig, RopeScaling
from headrace.model_reader import read_folder, read_gguf
from headrace.tokenizer import load_tokenizer
from tests.unit.tokenizer.small_gguf import CONTROL, HIDDEN, NORMAL, byte_level, write_gguf

CHATML = "{{ '<|im_start|>' }}{{ messages[0].content }}{{ '<|im_end|>' }}"
GEMMA_TEMPLATE = "{{ '<start_of_turn>user\\n' }}{{ messages[0].content }}{{ '<end_of_turn>' }}"
GEMMA_TOKENIZER = {"added_tokens": [{"id": 7, "content": "<end_of_turn>"}]}
GEMMA = byte_level({"<start_of_turn>": CONTROL, "<end_of_turn>": CONTROL}) | {
    "tokenizer.chat_template": GEMMA_TEMPLATE
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [{"id": 3, "content": "</s>"}, {"id": 4, "content": "<|im_end|>"}],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def gguf(tmp_path):
    """Writes a GGUF file of a byte-level vocabulary with these fields on top, and reads it."""

    def write_and_read(fields=None, tensors=None):
        path = write_gguf(tmp_path / "small.gguf", byte_level() | (fields or {}), tensors)
        return read_gguf(path, "small")

    return write_and_read


@pytest.fixture
def folder(tmp_path):
    """Writes a Hugging Face folder whose config has these fields on top; None takes one away."""

    def write(files=None, **config):
        path = tmp_path / "model"
        path.mkdir(exist_ok=True)
        merged = {key: value for key, value in (CONFIG | config).items() if value is not None}
        contents = {"config.json": merged, "tokenizer.json": TOKENIZER, **(files or {})}
        for name, content in contents.items():
            (path / name).write_text(json.dumps(content) if isinstance(content, dict) else content)
        save_file({"weight": np.arange(8, dtype=np.float32)}, path / "model.safetensors")
        return path

    return write


def test_the_default_model_is_what_its_authors_published(model_files):
    assert model_files.config == ModelConfig(
        architecture="llama",
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_model_tokens=8192,
        rope_theta=100000.0,
        rms_norm_eps=pytest.approx(1e-5),
        tie_word_embeddings=True,
    )
    assert model_files.eos_token_ids == {2}
    assert model_files.format == "gguf"


def test_gguf_fields_become_the_config(gguf):
    files = gguf({"llama.rope.freq_base": None, "llama.attention.head_count_kv": None})
    assert files.name == "small"
    assert files.config == ModelConfig(
        architecture="llama",
        num_layers=1,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        vocab_size=257,
        max_model_tokens=64,
        rope_theta=10000.0,
        rms_norm_eps=pytest.approx(1e-5),
        tie_word_embeddings=True,
    )


def test_gguf_tensors_say_what_the_fields_do_not(gguf):
    row = np.zeros(HIDDEN, np.float32)
    embedding = np.zeros((257, HIDDEN), np.float32)
    config = gguf(
        None,
        {
            "token_embd.weight": embedding,
            "output.weight": embedding,
            "blk.0.attn_q.bias": row,
            "blk.0.ffn_gate.bias": row,
        },
    ).config
    assert not config.tie_word_embeddings
    assert config.attention_bias
    assert config.mlp_bias


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.block_count": None}, r"no field 'llama\.block_count'"),
        ({"llama.block_count": 0}, "num_layers is 0"),
        ({"llama.block_count": "two"}, "is a str, not a int"),
        ({"llama.attention.head_count": 0, "llama.attention.head_count_kv": None}, "num_heads is 0"),
        ({"llama.attention.head_count_kv": 3}, "2 heads can not share 3 KV heads"),
        ({"llama.attention.key_length": 5}, "head_dim 5 is odd"),
        ({"llama.rope.dimension_count": 2}, "rotary embedding of 2 of 4 dimensions"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"tokenizer.ggml.eos_token_id": 257}, "end token 257 lies outside the vocabulary of 257"),
        ({"tokenizer.ggml.tokens": None}, r"no field 'tokenizer\.ggml\.tokens'"),
    ],
)
def test_gguf_files_that_can_not_be_served_say_why(gguf, fields, complaint):
    with pytest.raises(ModelError, match=complaint):
        gguf(fields)


def test_a_gguf_file_without_embeddings_or_of_another_architecture(gguf, tmp_path):
    with pytest.raises(ModelError, match=r"no tensor 'token_embd\.weight'"):
        gguf(None, {"other": np.zeros(4, np.float32)})
    path = write_gguf(tmp_path / "other.gguf", byte_level())
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0qwen9", 1))
    with pytest.raises(ModelError, match="architecture 'qwen9' is not supported; supported: 'llama'"):
        read_gguf(path, "other")


def test_gguf_linear_rope_scaling(gguf):
    scaled = gguf({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert scaled.config.rope_scaling == RopeScaling("linear", 4.0)


def llama3_divisors(factor: float, head_dim: int) -> np.ndarray:
    """As the converter to GGUF writes them: plain frequencies over those of transformers."""
    rope = {**LLAMA3, "factor": factor, "rope_theta": 500000.0}
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=131072, rope_parameters=rope
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** -(np.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled.numpy()).astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_gguf_llama_3_scaling_is_read_off_its_divisors(gguf, factor):
    fields = {
        "llama.embedding_length": 128,
        "llama.attention.head_count": 2,
        "llama.rope.freq_base": 500000.0,
    }
    tensors = {
        "token_embd.weight": np.zeros((257, 128), np.float32),
        "rope_freqs.weight": llama3_divisors(factor, 64),
    }
    scaling = gguf(fields, tensors).config.rope_scaling
    assert scaling == RopeScaling("llama3", pytest.approx(factor, rel=1e-5), 1.0, 4.0, 8192)
    tensors["rope_freqs.weight"][5] *= 1.01
    with pytest.raises(ModelError, match="does not follow Llama 3's rule"):
        gguf(fields, tensors)
    tensors["rope_freqs.weight"] = np.ones(5, np.float32)
    with pytest.raises(ModelError, match="does not follow Llama 3's rule"):
        gguf(fields, tensors)


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"tokenizer.ggml.token_type": None}, set()),
        ({}, {1}),  # without a template, what is a control token by such a name
        ({"tokenizer.ggml.eos_token_id": 5}, {1, 5}),
        ({"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 6}, {1, 5, 6}),
        (GEMMA | {"tokenizer.ggml.eos_token_id": 5}, {1, 5}),
        (GEMMA | {"tokenizer.ggml.eos_token_id": 5, "tokenizer.chat_template": None}, {1, 5}),
        (byte_level({"<|im_end|>": NORMAL}) | {"tokenizer.ggml.eos_token_id": 5}, {5}),
        ({"tokenizer.ggml.eos_token_id": 5, "tokenizer.chat_template": CHATML}, {5, 1}),
        ({"tokenizer.ggml.eos_token_id": 5, "tokenizer.chat_template": "{{ messages }}"}, {5}),
    ],
)
def test_md_01_gguf_every_declared_end_stops(gguf, fields, ids):
    vocabulary = byte_level({"<|im_start|>": CONTROL, "<|im_end|>": CONTROL})
    assert gguf(vocabulary | fields).eos_token_ids == ids


def test_flipped_bytes_never_crash_reader_or_tokenizer(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", byte_level({"<|im_end|>": CONTROL})).read_bytes()
    flipped, rng = tmp_path / "flipped.gguf", random.Random(0)
    num_refused = 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data) // 2)] = rng.choice([0, 1, 3, 0x7F, 0xFF])
        flipped.write_bytes(data)
        try:
            load_tokenizer(read_gguf(flipped, "flipped")).encode("hello", add_special=True)
        except ModelError:
            num_refused += 1
    assert 0 < num_refused < 500


def test_a_folder_becomes_the_config(folder):
    files = read_folder(folder(rope_theta=5e5, tie_word_embeddings=True, attention_bias=True), "mine")
    assert (files.name, files.format) == ("mine", "safetensors")
    assert files.config == ModelConfig(
        architecture="llama",
        num_layers=2,
        hidden_size=16,
        intermediate_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        vocab_size=100,
        max_model_tokens=64,
        rope_theta=5e5,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        attention_bias=True,
        output_bias=True,
    )


def test_a_folder_written_by_transformers_is_understood(folder):
    config = LlamaConfig(
        **{key: value for key, value in CONFIG.items() if key != "architectures"},
        rope_parameters=LLAMA3 | {"rope_theta": 5e5},
        architectures=["LlamaForCausalLM"],
    )
    read = read_folder(folder({"config.json": config.to_json_string()}), "theirs").config
    assert read.rope_theta == 5e5
    assert read.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert (read.num_layers, read.num_kv_heads, read.head_dim, read.max_model_tokens) == (2, 2, 4, 64)


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({}, None),
        ({"rope_scaling": {"rope_type": "default"}}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeScaling("linear", 2.0)),
        ({"rope_scaling": LLAMA3}, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, None),
    ],
)
def test_rope_scaling_of_a_folder(folder, config, scaling):
    assert read_folder(folder(**config), "x").config.rope_scaling == scaling


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"architectures": ["Qwen9"]}, "architecture 'Qwen9' is not supported; supported: LlamaForCausalLM"),
        ({"architectures": None}, r"architecture '\(none\)'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            {"hidden_act": "gelu"},
            "hidden_act 'gelu' is not supported; supported: 'silu', 'gelu_pytorch_tanh'",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope scaling 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "lacks a field.*low_freq_factor"),
        ({"rope_scaling": [1]}, "one of the wrong type"),
        ({"hidden_size": None}, "lacks a field.*hidden_size"),
        ({"hidden_size": "big"}, "one of the wrong type"),
        ({"num_attention_heads": 3}, "3 heads can not share 2 KV heads"),
        ({"vocab_size": -1}, "vocab_size is -1; it must be positive"),
        ({"head_dim": 3}, "head_dim 3 is odd"),
        ({"eos_token_id": 100}, "end token 100 lies outside"),
        ({"eos_token_id": "</s>"}, "end token '</s>' lies outside"),
    ],
)
def test_folders_that_can_not_be_served_say_why(folder, config, complaint):
    with pytest.raises(ModelError, match=complaint):
        read_folder(folder(**config), "x")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    path = folder()
    (path / name).unlink()
    with pytest.raises(ModelError, match=name.replace("model", "\\*")):
        read_folder(path, "x")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", '"text"'])
def test_damaged_json_is_named(folder, name, content):
    with pytest.raises(ModelError, match=f"{name}: "):
        read_folder(folder({name: content}), "x")


@pytest.mark.parametrize("kept", [0, 7, 8, 20, -1])
def test_safetensors_that_are_cut_short_are_named(folder, kept):
    weights = folder() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a safetensors file, or cut short"):
        read_folder(weights.parent, "x")


def test_safetensors_with_an_absurd_index_are_named(folder):
    weights = folder() / "model.safetensors"
    with weights.open("r+b") as file:
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**41)  # a hole: takes no disk
    with pytest.raises(ModelError, match="cut short"):
        read_folder(weights.parent, "x")


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, {2}),
        ({"generation_config.json": {"eos_token_id": [5, 6]}}, {2, 5, 6}),
        ({"tokenizer.json": GEMMA_TOKENIZER, "chat_template.jinja": GEMMA_TEMPLATE}, {2, 7}),
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, {2, 3}),
        ({"tokenizer_config.json": {"eos_token": {"content": "</s>"}}}, {2, 3}),
        ({"tokenizer_config.json": {"chat_template": CHATML}}, {2, 4}),
        ({"chat_template.jinja": CHATML}, {2, 4}),
    ],
)
def test_md_01_folder_every_declared_end_stops(folder, files, ids):
    assert read_folder(folder(files), "x").eos_token_ids == ids


def test_a_copy_has_the_same_fingerprints(folder, tmp_path):
    path = folder({"tokenizer_config.json": {"chat_template": CHATML}})
    copy = shutil.copytree(path, tmp_path / "copy")
    first, second = read_folder(path, "a"), read_folder(copy, "b")
    assert (first.fingerprint, first.tokenizer_fingerprint) == (
        second.fingerprint,
        second.tokenizer_fingerprint,
    )


def test_other_weights_or_config_are_another_model(folder):
    before = read_folder(folder(), "x")
    other_config = read_folder(folder(rms_norm_eps=1e-5), "x")
    path = folder()
    save_file({"weight": np.arange(1, 9, dtype=np.float32)}, path / "model.safetensors")
    other_weights = read_folder(path, "x")
    save_file({"renamed": np.arange(8, dtype=np.float32)}, path / "model.safetensors")
    other_names = read_folder(path, "x")
    models = [before, other_config, other_weights, other_names]
    assert len({files.fingerprint for files in models}) == 4
    assert len({files.tokenizer_fingerprint for files in models}) == 1


def test_another_vocabulary_or_template_is_another_tokenizer(folder):
    before = read_folder(folder(), "x")
    other_template = read_folder(folder({"chat_template.jinja": CHATML}), "x")
    other_tokens = read_folder(folder({"tokenizer.json": TOKENIZER | {"added_tokens": []}}), "x")
    models = [before, other_template, other_tokens]
    assert len({files.tokenizer_fingerprint for files in models}) == 3
    assert len({files.fingerprint for files in models}) == 1


def test_gguf_fingerprints_tell_weights_from_vocabulary(gguf):
    before = gguf()
    weights = gguf(None, {"token_embd.weight": np.ones((257, HIDDEN), np.float32)})
    template = gguf({"tokenizer.chat_template": CHATML})
    assert before.fingerprint != weights.fingerprint
    assert before.tokenizer_fingerprint == weights.tokenizer_fingerprint
    assert before.tokenizer_fingerprint != template.tokenizer_fingerprint


def test_a_change_far_into_a_large_file_is_seen(folder):
    """What lies behind the first MiB is sampled."""
    path = folder()
    fingerprints = set()
    for last in (0.0, 1.0):
        weights = np.zeros(2**20, np.float32)
        weights[-1] = last
        save_file({"weight": weights}, path / "model.safetensors")
        fingerprints.add(read_folder(path, "x").fingerprint)
    assert len(fingerprints) == 2


def test_a_tensor_index_behind_a_long_vocabulary_is_seen(gguf):
    fields = {"general.description": "x" * (2**22 + 2**16)}
    embedding, bias = np.zeros((257, HIDDEN), np.float32), np.zeros(2**20, np.float32)
    first = gguf(fields, {"token_embd.weight": embedding, "blk.0.a": bias})
    second = gguf(fields, {"token_embd.weight": embedding, "blk.0.b": bias})
    assert first.fingerprint != second.fingerprint


def test_a_limit_can_lower_what_the_model_takes_but_not_raise_it(gguf):
    files = gguf()
    assert files.with_limit(0).config.max_model_tokens == 64
    assert files.with_limit(10).config == replace(files.config, max_model_tokens=10)
    assert files.with_limit(10**6).config.max_model_tokens == 64
