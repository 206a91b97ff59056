"""Weights of a folder in Hugging Face layout: one or several safetensors files."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headrace.engine.weights.stored_matrix import Cut
from headrace.engine.weights.tensor_names import TensorNames
from headrace.errors import ModelError


class SafetensorsFiles:
    """Use as a context manager. Where a tensor is, the files themselves say; an index file is not needed."""

    def __init__(self, folder: Path, names: TensorNames) -> None:
        self._folder = folder
        self._names = names
        self._opened = ExitStack()
        self._where: dict[str, tuple[Any, str]] = {}  # by name: the file, and what it says there

    def __enter__(self) -> SafetensorsFiles:
        for path in sorted(self._folder.glob("*.safetensors")):
            try:
                file = self._opened.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: can not be read: {error}") from None
            self._where.update({_text_name(key): (file, key) for key in file.keys()})  # noqa: SIM118 - no dict
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._opened.close()

    def stored_name(self, name: str) -> str:
        return self._names.of(name)

    def __contains__(self, stored_name: str) -> bool:
        return stored_name in self._where

    def __len__(self) -> int:
        return len(self._where)

    def shape(self, stored_name: str) -> tuple[int, ...]:
        file, key = self._where[stored_name]
        return tuple(file.get_slice(key).get_shape())

    def read(self, stored_name: str, cut: Cut | None = None) -> torch.Tensor:
        file, key = self._where[stored_name]
        if cut is None:
            return file.get_tensor(key)
        some = slice(cut.part.start, cut.part.stop)
        return file.get_slice(key)[:, some] if cut.axis else file.get_slice(key)[some]


def _text_name(key: str) -> str:
    """Models that also see images keep the decoder behind one more name, once in front and now in the middle:
    `language_model.model.norm.weight`, `model.language_model.norm.weight`.
    """
    return key.replace("language_model.", "", 1)
