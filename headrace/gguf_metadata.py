"""Reads the head of a GGUF file: key/value fields and the tensor index, not the weights.

Called by the model store and the tokenizer loader. `gguf.GGUFReader` makes an array object per vocabulary entry (1.6 s for
49 k tokens); this makes plain lists in one pass (under 0.1 s), so that a router starts quickly.

    "GGUF" version u32 | tensor count u64 | field count u64 | fields … | tensor infos … | padding | weights
    field = key string, type u32, value          string = length u64, UTF-8 bytes
    tensor info = name string, number of dimensions u32, dimensions u64 …, type u32, offset u64

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from headrace.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 8
_F32 = 0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor index. `shape` is in file order: fastest dimension first."""

    name: str
    shape: tuple[int, ...]
    type_id: int  # a gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def get(self, key: str, kind: type[T]) -> T:
        """The field's value. Raises ModelError if it is missing or of another type."""
        value = self.find(key, kind)
        if value is None:
            raise ModelError(f"{self.path.name}: the file has no field {key!r}")
        return value

    def find(self, key: str, kind: type[T]) -> T | None:
        """The field's value, or None. Raises ModelError if it is of another type."""
        value = self.fields.get(key)
        if kind is float and isinstance(value, int):
            value = float(value)
        if value is not None and not isinstance(value, kind):
            raise ModelError(
                f"{self.path.name}: field {key!r} is a {type(value).__name__}, not a {kind.__name__}"
            )
        return value

    def read_f32(self, name: str) -> np.ndarray:
        """A small one-dimensional fp32 tensor, such as `rope_freqs.weight`."""
        tensor = self.tensors[name]
        if tensor.type_id != _F32 or len(tensor.shape) != 1:
            raise ModelError(f"{self.path.name}: tensor {name!r} is not a vector of fp32")
        return np.fromfile(self.path, dtype="<f4", count=tensor.shape[0], offset=tensor.offset)


def read(path: Path) -> GgufMetadata:
    """Fields and tensor index of a GGUF file. Raises ModelError for a file that is none, or is cut short."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except (struct.error, UnicodeDecodeError, ValueError, OSError) as error:
        raise ModelError(f"{path}: not a GGUF file, or cut short ({error})") from None


def _parse(path: Path, data: mmap.mmap) -> GgufMetadata:
    if data[:4] != _MAGIC:
        raise ModelError(f"{path}: not a GGUF file")
    (version,) = struct.unpack_from("<I", data, 4)
    if version not in _VERSIONS:
        raise ModelError(f"{path}: GGUF version {version} is not supported (only {_VERSIONS}, little-endian)")
    cursor = _Cursor(data, 8)
    num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string()
        fields[key] = cursor.value(cursor.scalar("I"))
    index = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment!r}")
    start = -(-cursor.offset // alignment) * alignment
    tensors = {name: GgufTensor(name, shape, type_id, start + at) for name, shape, type_id, at in index}
    if any(tensor.offset >= len(data) for tensor in tensors.values()):
        raise ModelError(f"{path}: the file is cut short: {len(data)} bytes do not reach its last tensor")
    return GgufMetadata(path, fields, tensors)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dimensions = cursor.scalar("I")
    if num_dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dimensions))
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


class _Cursor:
    """A read position in the file; every method moves it on."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self._data = data
        self.offset = offset

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.offset)
        self.offset += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        # Vocabularies come through here: local names and one precompiled unpacker, since this is the whole parse time.
        data, offset, length_at = self._data, self.offset, struct.Struct("<Q").unpack_from
        values: list[str] = []
        for _ in range(count):
            start = offset + 8
            offset = start + length_at(data, offset)[0]
            if offset > len(data):
                raise ValueError("a string ends behind the end of the file")
            values.append(data[start:offset].decode())
        self.offset = offset
        return values

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ValueError(f"field type {kind} is unknown")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > len(self._data):
            raise ValueError(f"an array claims {count} entries")
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            return [self._array() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"array type {kind} is unknown")
        layout = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(layout, self._data, self.offset)
        self.offset += struct.calcsize(layout)
        return list(values)
