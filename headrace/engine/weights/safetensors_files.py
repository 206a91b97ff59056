"""Weights of a folder in Hugging Face layout: one or several safetensors files."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headrace.errors import ModelError


class SafetensorsFiles:
    """Use as a context manager. Where a tensor is, the files themselves say; an index file is not needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened = ExitStack()
        self._where: dict[str, Any] = {}

    def __enter__(self) -> SafetensorsFiles:
        for path in sorted(self._folder.glob("*.safetensors")):
            try:
                file = self._opened.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: can not be read: {error}") from None
            self._where.update(dict.fromkeys(file.keys(), file))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._opened.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __len__(self) -> int:
        return len(self._where)

    def read(self, name: str) -> torch.Tensor:
        return self._where[name].get_tensor(name)
