"""Reads the head of a GGUF file: key/value fields and the tensor index, not the weights.

Called by the model reader and the tokenizer loader. `gguf.GGUFReader` makes an array object per vocabulary entry (1.6 s
for 49 k tokens); this makes plain lists in one pass (under 0.1 s), so that a router starts quickly.

A file can be damaged or hostile: every count and length is held against a limit and the file's own size before anything
is allocated for it.

    "GGUF" version u32 | tensor count u64 | field count u64 | fields … | tensor infos … | padding | weights
    field = key string, type u32, value          string = length u64, UTF-8 bytes
    tensor info = name string, number of dimensions u32, dimensions u64 …, type u32, offset u64

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from headrace.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 8
_MAX_ENTRIES = 1 << 22  # of an array: four million, several times the largest vocabulary with its merges
_MAX_STRING_BYTES = 1 << 24
_F32 = 0
# Weights per block and bytes per block of the types that Llama files use, by gguf.GGMLQuantizationType.
_BLOCKS = {
    _F32: (1, 4),
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    30: (1, 2),  # BF16
}

CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor index. `shape` is in file order: fastest dimension first."""

    name: str
    shape: tuple[int, ...]
    type_id: int  # a gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file

    @property
    def num_bytes(self) -> int:
        """Size in the file; 0 for a type whose layout is not known here."""
        block_weights, block_bytes = _BLOCKS.get(self.type_id, (1, 0))
        return -(-math.prod(self.shape) // block_weights) * block_bytes


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
            return cast("T", float(value))
        if value is not None and not isinstance(value, kind):
            raise ModelError(
                f"{self.path.name}: field {key!r} is a {type(value).__name__}, not a {kind.__name__}"
            )
        return value

    def get_list(self, key: str, kind: type[T]) -> list[T]:
        """The field's array. Raises ModelError if it is missing or of another type."""
        values = self.get(key, list)
        # An array has one type, so its first entry speaks for all.
        if values and not isinstance(values[0], kind):
            raise ModelError(f"{self.path.name}: field {key!r} is no array of {kind.__name__}")
        return values

    def read_f32(self, name: str) -> np.ndarray:
        """A small one-dimensional fp32 tensor, such as `rope_freqs.weight`."""
        tensor = self.tensors[name]
        if tensor.type_id != _F32 or len(tensor.shape) != 1:
            raise ModelError(f"{self.path.name}: tensor {name!r} is not a vector of fp32")
        return np.fromfile(self.path, dtype="<f4", count=tensor.shape[0], offset=tensor.offset)


def read(path: Path) -> GgufMetadata:
    """Fields and tensor index of a GGUF file. Raises ModelError for a file that is none, is damaged or is cut short."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except (struct.error, ValueError, OSError) as error:
        raise ModelError(f"{path}: not a GGUF file, or damaged or cut short ({error})") from None


def _parse(path: Path, data: mmap.mmap) -> GgufMetadata:
    if data[:4] != _MAGIC:
        raise ModelError(f"{path}: not a GGUF file")
    (version,) = struct.unpack_from("<I", data, 4)
    if version not in _VERSIONS:
        raise ModelError(f"{path}: GGUF version {version} is not supported (only {_VERSIONS}, little-endian)")
    cursor = _Cursor(data, 8)
    num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
    fields = _fields(cursor, num_fields)
    # Offsets count from the end of the index, which is known only once it is read.
    index = _tensors(cursor, num_tensors)
    alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment!r}")
    start = -(-cursor.offset // alignment) * alignment
    tensors = {name: replace(tensor, offset=start + tensor.offset) for name, tensor in index.items()}
    for tensor in tensors.values():
        if tensor.offset + tensor.num_bytes > len(data):
            raise ValueError(f"tensor {tensor.name!r} ends behind the end of the file")
    return GgufMetadata(path, fields, tensors)


def _fields(cursor: _Cursor, count: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        if key in fields:  # also ends the reading of a run of zeros, which looks like endless empty fields
            raise ValueError(f"field {key!r} occurs twice")
        fields[key] = cursor.value(cursor.scalar("I"))
    return fields


def _tensors(cursor: _Cursor, count: int) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for _ in range(count):
        name, num_dimensions = cursor.string(), cursor.scalar("I")
        if name in tensors:
            raise ValueError(f"tensor {name!r} occurs twice")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(cursor.scalar("Q") for _ in range(num_dimensions))
        tensors[name] = GgufTensor(name, shape, cursor.scalar("I"), cursor.scalar("Q"))
    return tensors


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
            length = length_at(data, offset)[0]
            offset = start + length
            if length > _MAX_STRING_BYTES or offset > len(data):
                raise ValueError(f"a string claims {length} bytes")
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
        if count > _MAX_ENTRIES:
            raise ValueError(f"an array claims {count} entries")
        if kind == _STRING:
            return self.strings(count)
        if kind not in _SCALARS:
            raise ValueError(
                f"array type {kind} is unknown"
            )  # arrays of arrays among them: no known file has one
        layout = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(layout, self._data, self.offset)
        self.offset += struct.calcsize(layout)
        return list(values)
