"""What a rank tells its peers, read back: anything else is a ValueError, whatever it is."""

from __future__ import annotations

import struct

import pytest

from kv_transfer.metadata import Metadata
from kv_transfer.transport import BlockRegion


def _packed(text: bytes) -> bytes:
    return struct.pack("<4sI", b"hrx2", len(text)) + text


def test_what_was_packed_comes_back():
    metadata = Metadata("local", "a", (BlockRegion(4096, 8, 256), BlockRegion(0, 2, 256)), b"own")
    assert Metadata.unpack(metadata.pack()) == metadata


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"regions": [[1, 2]]}',
        b'{"regions": [[Infinity, 1, 1, "cpu"]], "transport": "local", "name": "a"}',
        b'{"regions": [[NaN, 1, 1, "cpu"]], "transport": "local", "name": "a"}',
    ],
    ids=range(8),
)
def test_anything_else_is_a_value_error(text):
    with pytest.raises(ValueError):
        Metadata.unpack(_packed(text))
