"""From a GGUF file or a Hugging Face folder to `ModelFiles`: config, end tokens, fingerprints.

Called by `headrace.model_store`. Configs are read by `headrace.gguf_config` and `headrace.hf_config`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headrace import gguf_config, gguf_metadata, hf_config
from headrace.errors import ModelError
from headrace.gguf_metadata import CONTROL_TOKEN, GgufMetadata
from headrace.model_config import ModelFiles
from headrace.model_fingerprint import tokenizer_fingerprint, weights_fingerprint

# Some files name only the end of a text, not the end of a turn. A template that uses one of these ends turns with it;
# without a template all that are control tokens do.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>")
_MAX_SAFETENSORS_INDEX_BYTES = 100_000_000  # the limit of the safetensors library
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def read_gguf(path: Path, name: str) -> ModelFiles:
    """Raises ModelError for a file that is damaged or of a model that is not supported."""
    metadata = gguf_metadata.read(path)
    config = gguf_config.read_config(metadata)
    tokens = metadata.get_list("tokenizer.ggml.tokens", str)
    index = "\n".join(f"{t.name} {t.type_id} {t.shape} {t.offset}" for t in metadata.tensors.values())
    return ModelFiles(
        name=name,
        path=path,
        format="gguf",
        config=config,
        fingerprint=weights_fingerprint(config, [(path, index.encode())]),
        tokenizer_fingerprint=tokenizer_fingerprint(
            {key: value for key, value in metadata.fields.items() if key.startswith("tokenizer.")}
        ),
        eos_token_ids=_checked_ids(_gguf_eos_ids(metadata, tokens), config.vocab_size),
    )


def _gguf_eos_ids(metadata: GgufMetadata, tokens: list[str]) -> set[int]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = {token_id for key in keys if (token_id := metadata.find(key, int)) is not None}
    ends = {token: tokens.index(token) for token in _END_OF_TURN if token in tokens}
    template = metadata.find("tokenizer.chat_template", str)
    if template is not None:
        return ids | {i for token, i in ends.items() if token in template}
    types = metadata.find("tokenizer.ggml.token_type", list) or []
    return ids | {i for i in ends.values() if types[i : i + 1] == [CONTROL_TOKEN]}


def read_folder(path: Path, name: str) -> ModelFiles:
    """Raises ModelError for a folder that lacks a file, or of a model that is not supported."""
    raw = read_json(path / "config.json")
    config = hf_config.read_config(raw, name)
    weight_files = sorted(path.glob("*.safetensors"))
    if not weight_files:
        raise ModelError(f"{path}: there are no *.safetensors files")
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"{path}: there is no tokenizer.json (other tokenizer formats are not supported)")
    present = {file: (path / file) for file in _TOKENIZER_FILES if (path / file).is_file()}
    return ModelFiles(
        name=name,
        path=path,
        format="safetensors",
        config=config,
        fingerprint=weights_fingerprint(config, [(file, _safetensors_index(file)) for file in weight_files]),
        tokenizer_fingerprint=tokenizer_fingerprint(
            {file: where.read_text(encoding="utf-8") for file, where in present.items()}
        ),
        eos_token_ids=_checked_ids(_hf_eos_ids(path, raw), config.vocab_size),
    )


def _hf_eos_ids(path: Path, raw_config: dict[str, Any]) -> set[int]:
    ids = _as_ids(raw_config.get("eos_token_id"))
    if (path / "generation_config.json").is_file():
        ids |= _as_ids(read_json(path / "generation_config.json").get("eos_token_id"))
    # The tokenizer can end a chat turn with another token than the model's config says.
    config = read_tokenizer_config(path)
    template = chat_template(path, config) or ""
    ends = {token for token in _END_OF_TURN if token in template} | {token_text(config.get("eos_token"))}
    added = read_json(path / "tokenizer.json").get("added_tokens") or []
    return ids | {token["id"] for token in added if token["content"] in ends}


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, or nothing where there is none."""
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """A folder's chat template: a file of its own since transformers 4.50, a field of tokenizer_config.json before."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several, by name
        return next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template


def token_text(token: str | dict[str, Any] | None) -> str:
    """A special token's text. In tokenizer_config.json it is plain, an object with its matching rules, or absent."""
    return token["content"] if isinstance(token, dict) else token or ""


def _as_ids(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {value}


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object. Raises ModelError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: can not be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: does not hold a JSON object")
    return content


def _safetensors_index(path: Path) -> bytes:
    """The file's index: 8 bytes with its size, then JSON that says where behind it each tensor begins and ends."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        index = file.read(size) if size <= _MAX_SAFETENSORS_INDEX_BYTES else b""
    try:
        tensors = json.loads(index)
        end = max(
            (entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"), default=0
        )
        complete = path.stat().st_size >= 8 + size + end
    except (ValueError, LookupError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise ModelError(f"{path}: not a safetensors file, or cut short")
    return index


def _checked_ids(ids: Iterable[int], vocab_size: int) -> frozenset[int]:
    for token_id in ids:
        if not (isinstance(token_id, int) and 0 <= token_id < vocab_size):
            raise ModelError(f"end token {token_id!r} lies outside the vocabulary of {vocab_size} tokens")
    return frozenset(ids)
