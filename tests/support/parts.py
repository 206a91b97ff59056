"""Peers of one rank, whose blocks are read as they are."""

from __future__ import annotations

from kv_transfer.slices import Slice
from kv_transfer.transport import Part, Transport


def part(metadata: bytes, block_bytes: int) -> Part:
    return Part(metadata, Slice.whole(block_bytes))


def whole(owner: Transport) -> Part:
    return part(owner.metadata(), owner.regions[0].block_bytes)
