"""The transport between workers inside one process: a copy. For tests and for workers of all roles in one process."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.errors import TransferFailed
from kv_transfer.metadata import Metadata, RemotePart, understood
from kv_transfer.slices import Slice
from kv_transfer.transport import BlockRegion, Part, Read, check_ids, num_local_blocks


class LocalFabric:
    """The regions that can be read, by name. Shared by the transports of one process, each on its own thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[str, Sequence[BlockRegion]] = {}

    def add(self, name: str, regions: Sequence[BlockRegion]) -> None:
        with self._lock:
            self._regions[name] = regions

    def remove(self, name: str) -> None:
        """After this, nobody is reading from the regions any more."""
        with self._lock:
            self._regions.pop(name, None)

    def copy(self, name: str, piece: Slice, pairs: Sequence[tuple[int, int]], target: BlockRegion) -> None:
        """`pairs`: a block of the other, the one of `target` that gets its slice. Raises TransferFailed."""
        with self._lock:  # the owner can not go away in the middle
            regions = self._regions.get(name)
            if regions is None:
                raise TransferFailed(f"peer {name} is gone")
            for remote, local in pairs:
                source, destination = _address(regions, remote), target.address + local * target.block_bytes
                for remote_offset, local_offset in _offsets(piece):
                    ctypes.memmove(destination + local_offset, source + remote_offset, piece.nbytes)


# Workers of one process find each other here, as workers of one machine do through the kernel.
PROCESS_FABRIC = LocalFabric()


class LocalTransport:
    name = "local"

    def __init__(
        self, incarnation: str, regions: Sequence[BlockRegion], fabric: LocalFabric = PROCESS_FABRIC
    ) -> None:
        self.regions = regions
        self._incarnation = incarnation
        self._fabric = fabric
        self._links: dict[str, _Link] = {}
        fabric.add(incarnation, regions)

    def metadata(self) -> bytes:
        return Metadata(self.name, self._incarnation, tuple(self.regions)).pack()

    def connect(self, peer: str, parts: Sequence[Part]) -> None:
        found = understood(self.name, peer, parts, self.regions[0])
        self._links.setdefault(peer, _Link(peer, found))

    def read(self, peer: str, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> Read:
        link = self._links.get(peer)
        if link is None:
            raise TransferFailed(f"peer {peer} is not connected")
        check_ids("remote", remote_block_ids, link.parts[0].num_blocks)
        check_ids("local", local_block_ids, num_local_blocks(self.regions[0]))
        pairs = list(zip(remote_block_ids, local_block_ids, strict=True))
        return _LocalRead(link, self._fabric, pairs, self.regions[0])

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
    parts: list[RemotePart]
    torn: bool = False


class _LocalRead:
    """Copies when it is first polled, so that a READ which nobody polls stays under way."""

    def __init__(
        self, link: _Link, fabric: LocalFabric, pairs: list[tuple[int, int]], region: BlockRegion
    ) -> None:
        self._link = link
        self._fabric = fabric
        self._pairs = pairs
        self._region = region
        self._done = False

    def poll(self) -> bool:
        if not self._done:
            if self._link.torn:
                raise TransferFailed(f"peer {self._link.peer} was disconnected")
            for part in self._link.parts:
                self._fabric.copy(part.name, part.slice, self._pairs, self._region)
            self._done = True
        return True

    def release(self) -> None:
        pass


def _address(regions: Sequence[BlockRegion], block_id: int) -> int:
    for region in regions:
        if block_id < region.num_blocks:
            return region.address + block_id * region.block_bytes
        block_id -= region.num_blocks
    raise TransferFailed("a block that its owner no longer has")


def _offsets(piece: Slice) -> Iterator[tuple[int, int]]:
    """Of each run in a block: there, here."""
    for i in range(piece.count):
        yield piece.remote_offset + i * piece.remote_stride, piece.local_offset + i * piece.local_stride
