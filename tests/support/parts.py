"""Transports without the thread around them, and peers of one rank, whose blocks are read as they are."""

from __future__ import annotations

import time

from kv_transfer.slices import Slice
from kv_transfer.transport import Part, Read, Transport

_DEADLINE_S = 30.0


def part(metadata: bytes, block_bytes: int) -> Part:
    return Part(metadata, Slice.whole(block_bytes))


def whole(owner: Transport) -> Part:
    return part(owner.metadata(), owner.regions[0].block_bytes)


def finish(read: Read, *transports: Transport) -> None:
    """Poll to the end, while all that take part make progress."""
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        for transport in transports:
            transport.progress()
        if read.poll():
            break
        assert time.monotonic() < deadline, "the READ does not end"
    read.release()
