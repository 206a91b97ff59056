"""Turns what a user calls a model into files on this machine's disk.

Called once per process, by composition roots and the CLI.

resolve("smollm2-135m-instruct")    the catalogue: fetched once into the cache folder
resolve("/models/x.gguf")           a GGUF file
resolve("/models/folder")           a Hugging Face folder: config.json, *.safetensors, tokenizer.json
resolve("org/name")                 the Hugging Face hub, through its own cache (~/.cache/huggingface)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from headrace.config import DEFAULT_CACHE_DIR
from headrace.errors import ModelError
from headrace.model_catalogue import CATALOGUE, Progress, ensure, is_cached
from headrace.model_config import ModelFiles
from headrace.model_reader import read_folder, read_gguf

_HUB_NAME = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
_HUB_IGNORED = ["*/*"]  # the same weights in other formats


@dataclass(frozen=True, slots=True)
class ListedModel:
    name: str
    description: str
    license: str
    size_bytes: int
    path: Path
    cached: bool


def resolve(ref: str, *, cache_dir: Path = DEFAULT_CACHE_DIR, progress: Progress | None = None) -> ModelFiles:
    """The model's files, fetched first if need be. Raises ModelError that says what to do."""
    if ref in CATALOGUE:
        path = ensure(CATALOGUE[ref], cache_dir.expanduser(), progress or _ignore_progress)
        return read_gguf(path, ref)
    local = Path(ref).expanduser()
    if local.is_file():
        return read_gguf(local.resolve(), local.stem)
    if local.is_dir():
        return read_folder(local.resolve(), local.resolve().name)
    if _HUB_NAME.fullmatch(ref) and not ref.endswith(".gguf"):
        return read_folder(_from_hub(ref), ref)
    raise ModelError(
        f"model {ref!r}: no such file or folder, nor a name of the catalogue ({', '.join(CATALOGUE)}),"
        f" nor a hub name of the form org/name"
    )


def list_models(cache_dir: Path = DEFAULT_CACHE_DIR) -> list[ListedModel]:
    """The catalogue, and what of it is on this machine."""
    folder = cache_dir.expanduser()
    return [
        ListedModel(
            name=model.name,
            description=model.description,
            license=model.license,
            size_bytes=model.size_bytes,
            path=model.path_in(folder),
            cached=is_cached(model, folder),
        )
        for model in CATALOGUE.values()
    ]


def _from_hub(ref: str) -> Path:
    from huggingface_hub import snapshot_download  # half a second to import, and rarely needed

    try:
        return Path(snapshot_download(ref, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED))
    except Exception as error:  # the hub client raises the errors of several HTTP libraries
        raise ModelError(
            f"model {ref!r}: not on this machine, and the Hugging Face hub answered {type(error).__name__}: {error}."
            f" Check name, network and access, or pass the path of a folder or a GGUF file in its place"
        ) from error


def _ignore_progress(stage: str, done_bytes: int, total_bytes: int) -> None:
    pass
