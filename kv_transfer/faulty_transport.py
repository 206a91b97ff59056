"""Wraps a transport and makes it fail the way networks do. For tests, switched while it runs."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.errors import TransferFailed
from kv_transfer.transport import BlockRegion, Read, Transport


@dataclass(slots=True)
class Faults:
    """Set by a test, read by the transport's thread at each call."""

    stall: bool = False  # READs do not begin while this is set; their bytes arrive when it ends
    delay_s: float = 0.0  # READs begin only so long after they were asked for
    fail_next: int = 0  # so many READs fail from now on
    corrupt: bool = False  # a byte of each block that arrives is wrong


class FaultyTransport:
    """`region` is the one that `inner` was made around."""

    def __init__(self, inner: Transport, faults: Faults, region: BlockRegion) -> None:
        self.name = inner.name
        self._inner = inner
        self._faults = faults
        self._region = region
        self._reads: list[_FaultyRead] = []  # not over

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def connect(self, peer: str, metadata: bytes) -> None:
        self._inner.connect(peer, metadata)

    def read(self, peer: str, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> Read:
        if self._faults.fail_next > 0:
            self._faults.fail_next -= 1
            raise TransferFailed(f"injected: READ from {peer} failed")
        local = [self._region.address + i * self._region.block_bytes for i in local_block_ids]
        read = _FaultyRead(
            peer, lambda: self._inner.read(peer, remote_block_ids, local_block_ids), self._faults, local
        )
        read.begin_unless_held_up()
        self._reads = [other for other in self._reads if not other.over] + [read]
        return read

    def progress(self) -> None:
        self._inner.progress()

    def disconnect(self, peer: str) -> None:
        self._inner.disconnect(peer)
        for read in self._reads:
            if read.peer == peer:
                read.give_up(f"peer {peer} was disconnected")

    def close(self) -> None:
        self._inner.close()
        for read in self._reads:
            read.give_up("the transport is closed")


class _FaultyRead:
    """Posted only once nothing holds it up, so that its bytes really come late."""

    def __init__(self, peer: str, post: Callable[[], Read], faults: Faults, addresses: list[int]) -> None:
        self.peer = peer
        self.over = False
        self._post = post
        self._faults = faults
        self._addresses = addresses
        self._asked_at = time.monotonic()
        self._inner: Read | None = None
        self._given_up: str | None = None

    def begin_unless_held_up(self) -> None:
        held_up = self._faults.stall or time.monotonic() - self._asked_at < self._faults.delay_s
        if self._inner is None and not held_up:
            self._inner = self._post()

    def poll(self) -> bool:
        if self.over:
            return True
        if self._inner is None:
            if self._given_up is not None:
                raise TransferFailed(self._given_up)
            self.begin_unless_held_up()
        if self._inner is None or self._faults.stall or not self._inner.poll():
            return False
        self.over = True
        if self._faults.corrupt:
            for address in self._addresses:
                ctypes.c_uint8.from_address(address).value ^= 0xFF
        return True

    def give_up(self, reason: str) -> None:
        self._given_up = reason

    def release(self) -> None:
        self.over = True
        if self._inner is not None:
            self._inner.release()
