"""The transport between workers inside one process: a copy. For tests and for workers of all roles in one process."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import TransferFailed
from kv_transfer.transport import BlockRegion, Read


class LocalFabric:
    """The regions that can be read, by incarnation. Shared by the transports of one process, each on its own thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[str, BlockRegion] = {}

    def add(self, incarnation: str, region: BlockRegion) -> None:
        with self._lock:
            self._regions[incarnation] = region

    def remove(self, incarnation: str) -> None:
        """After this, nobody is reading from the region any more."""
        with self._lock:
            self._regions.pop(incarnation, None)

    def copy(
        self, peer: str, remote_block_ids: Sequence[int], target: BlockRegion, local_block_ids: Sequence[int]
    ) -> None:
        """Raises TransferFailed if the peer is not there."""
        with self._lock:  # the owner can not go away in the middle
            source = self._regions.get(peer)
            if source is None:
                raise TransferFailed(f"peer {peer} is gone")
            for remote, local in zip(remote_block_ids, local_block_ids, strict=True):
                ctypes.memmove(
                    target.address + local * target.block_bytes,
                    source.address + remote * source.block_bytes,
                    source.block_bytes,
                )


# Workers of one process find each other here, as workers of one machine do through the kernel.
PROCESS_FABRIC = LocalFabric()


class LocalTransport:
    name = "local"

    def __init__(self, incarnation: str, region: BlockRegion, fabric: LocalFabric = PROCESS_FABRIC) -> None:
        self._incarnation = incarnation
        self._region = region
        self._fabric = fabric
        self._links: dict[str, _Link] = {}
        fabric.add(incarnation, region)

    def metadata(self) -> bytes:
        return f"{self._region.num_blocks} {self._region.block_bytes}".encode()

    def connect(self, peer: str, metadata: bytes) -> None:
        try:
            num_blocks, block_bytes = map(int, metadata.split())
        except ValueError:
            raise TransferFailed(f"peer {peer} sent metadata that is not of this transport") from None
        if block_bytes != self._region.block_bytes:
            raise TransferFailed(
                f"peer {peer} has blocks of {block_bytes} bytes, ours have {self._region.block_bytes}"
            )
        self._links.setdefault(peer, _Link(peer, num_blocks))

    def read(self, peer: str, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> Read:
        link = self._links.get(peer)
        if link is None:
            raise TransferFailed(f"peer {peer} is not connected")
        _check_ids("remote", remote_block_ids, link.num_blocks)
        _check_ids("local", local_block_ids, self._region.num_blocks)
        return _LocalRead(link, self._fabric, list(remote_block_ids), self._region, list(local_block_ids))

    def progress(self) -> None:
        pass

    def disconnect(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.torn = True

    def close(self) -> None:
        for peer in list(self._links):
            self.disconnect(peer)
        self._fabric.remove(self._incarnation)


@dataclass(slots=True)
class _Link:
    peer: str
    num_blocks: int
    torn: bool = False


class _LocalRead:
    """Copies when it is first polled, so that a READ which nobody polls stays under way."""

    def __init__(
        self,
        link: _Link,
        fabric: LocalFabric,
        remote_block_ids: list[int],
        region: BlockRegion,
        local_block_ids: list[int],
    ) -> None:
        self._link = link
        self._fabric = fabric
        self._remote_block_ids = remote_block_ids
        self._region = region
        self._local_block_ids = local_block_ids
        self._done = False

    def poll(self) -> bool:
        if not self._done:
            if self._link.torn:
                raise TransferFailed(f"peer {self._link.peer} was disconnected")
            self._fabric.copy(self._link.peer, self._remote_block_ids, self._region, self._local_block_ids)
            self._done = True
        return True

    def release(self) -> None:
        pass


def _check_ids(side: str, block_ids: Sequence[int], num_blocks: int) -> None:
    for block_id in block_ids:
        if not 0 <= block_id < num_blocks:
            raise TransferFailed(f"{side} block {block_id} does not exist; there are {num_blocks}")
