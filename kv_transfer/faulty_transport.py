"""Wraps a transport and makes it fail the way networks do. For tests, switched while it runs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import TransferFailed
from kv_transfer.transport import BlockRegion, Read, Transport


@dataclass(slots=True)
class Faults:
    """Set by a test, read by the transport's thread at each call."""

    stall: bool = False  # READs make no progress while this is set; their bytes arrive when it ends
    fail_next: int = 0  # so many READs fail from now on
    corrupt: bool = False  # a byte of each block that arrives is wrong


class FaultyTransport:
    def __init__(self, inner: Transport, faults: Faults, region: BlockRegion) -> None:
        self.name = inner.name
        self._inner = inner
        self._faults = faults
        self._region = region

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def connect(self, peer: str, metadata: bytes) -> None:
        self._inner.connect(peer, metadata)

    def read(self, peer: str, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> Read:
        if self._faults.fail_next > 0:
            self._faults.fail_next -= 1
            raise TransferFailed(f"injected: READ from {peer} failed")
        inner = self._inner.read(peer, remote_block_ids, local_block_ids)
        return _FaultyRead(
            inner,
            self._faults,
            [self._region.address + i * self._region.block_bytes for i in local_block_ids],
        )

    def progress(self) -> None:
        self._inner.progress()

    def disconnect(self, peer: str) -> None:
        self._inner.disconnect(peer)

    def close(self) -> None:
        self._inner.close()


class _FaultyRead:
    def __init__(self, inner: Read, faults: Faults, addresses: list[int]) -> None:
        self._inner = inner
        self._faults = faults
        self._addresses = addresses

    def poll(self) -> bool:
        if self._faults.stall or not self._inner.poll():
            return False
        if self._faults.corrupt:
            for address in self._addresses:
                byte = ctypes.c_uint8.from_address(address)
                byte.value ^= 0xFF
        self._addresses = []
        return True

    def release(self) -> None:
        self._inner.release()
