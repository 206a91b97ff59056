"""Fingerprints: equal names for equal content, wherever it lies on disk. Called by `headrace.model_reader`.

A model's fingerprint is part of every block hash and of the handshake between workers. Hashing all weights would take
seconds per gigabyte at each start, so a model is told from another by its config, file sizes, tensor index (names,
types, shapes) and samples of its content: the first 1 MiB of every file and 64 pieces of 4 KiB spread over it. Files
that are equal in all of these and differ elsewhere get one fingerprint: a fine-tune changes all weights and is seen, a
patched byte is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.model_config import ModelConfig

_HEAD_BYTES = 1 << 20
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


def weights_fingerprint(config: ModelConfig, files: Iterable[tuple[Path, bytes]]) -> str:
    """`files`: each weight file and its tensor index, in a fixed order. Hexadecimal SHA-256."""
    sha = hashlib.sha256(b"headrace.model.v1")
    _update(sha, json.dumps(asdict(config), sort_keys=True).encode())
    for path, tensor_index in files:
        _update(sha, tensor_index)
        size = path.stat().st_size
        _update(sha, str(size).encode())
        with path.open("rb") as file:
            _update(sha, file.read(_HEAD_BYTES))
            for i in range(_NUM_SAMPLES):
                # The last sample ends with the file.
                file.seek(max(0, size - _SAMPLE_BYTES) * (i + 1) // _NUM_SAMPLES)
                _update(sha, file.read(_SAMPLE_BYTES))
    return sha.hexdigest()


def tokenizer_fingerprint(parts: Mapping[str, Any]) -> str:
    """`parts`: all that decides how text becomes ids (vocabulary, merges, template, special ids), as plain data."""
    sha = hashlib.sha256(b"headrace.tokenizer.v1")
    for key in sorted(parts):
        _update(sha, key.encode())
        _update(sha, json.dumps(parts[key], sort_keys=True).encode())
    return sha.hexdigest()


def _update(sha: Any, data: bytes) -> None:
    sha.update(len(data).to_bytes(8, "little"))
    sha.update(data)
