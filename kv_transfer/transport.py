"""The transport seam: one-sided READs of KV blocks from a peer's registered memory into ours.

A transport is created around a list of regions, the device's pool first. Block ids number through them: with n0 blocks
in region 0 and n1 in region 1, ids 0 .. n0-1 lie in region 0 and n0 .. n0+n1-1 in region 1. Block `i` of a region lies
at `address + i * block_bytes`. A READ takes blocks of any region of the peer and lands in region 0 of ours. With equal
tensor parallelism one block is one descriptor; else each rank of the peer gives its slice of a block.

Used by one thread only (`kv_transfer.transfer_thread`); nothing here is thread-safe.

Implementations: `nixl` (UCX: NVLink, RDMA, shared memory, TCP), `local` (in-process), `faulty` (wraps another one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.errors import TransferFailed
from kv_transfer.slices import Slice


@dataclass(frozen=True, slots=True)
class BlockRegion:
    """Host or device memory that holds `num_blocks` blocks of `block_bytes` each. The owner keeps it alive.

    Behind them lie `num_scratch` more that peers never see and no pool hands out: targets of READs whose bytes nobody
    wants.
    """

    address: int
    num_blocks: int
    block_bytes: int
    device: str = "cpu"  # "cpu" or "cuda:N"
    num_scratch: int = 0

    @property
    def nbytes(self) -> int:
        return (self.num_blocks + self.num_scratch) * self.block_bytes


@dataclass(frozen=True, slots=True)
class Part:
    """One rank of a peer: its metadata, and which bytes of its blocks go where in ours."""

    metadata: bytes
    slice: Slice


class Read(Protocol):
    """One READ that was posted. It can not be called back: until it is over, it may still write into our blocks."""

    def poll(self) -> bool:
        """True once all bytes are here, False while under way. Raises TransferFailed when it ended without them."""
        ...

    def release(self) -> None:
        """Free the handle. Only after `poll` returned True or raised, or after the peer was disconnected."""
        ...


class Transport(Protocol):
    name: str
    regions: Sequence[BlockRegion]

    def metadata(self) -> bytes:
        """What a peer needs in order to read from our regions."""
        ...

    def connect(self, peer: str, parts: Sequence[Part]) -> None:
        """Make the peer's regions readable. `peer` is its incarnation. Raises TransferFailed."""
        ...

    def read(self, peer: str, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> Read:
        """Post a READ of equally many blocks. May block while it copies. Raises TransferFailed."""
        ...

    def progress(self) -> None:
        """Let peers read from us; called regularly, also when we read nothing."""
        ...

    def disconnect(self, peer: str) -> None:
        """Tear the peer down. After this no READ from it can write into our blocks any more."""
        ...

    def close(self) -> None: ...


def check_ids(side: str, block_ids: Sequence[int], num_blocks: int) -> None:
    """Raises TransferFailed naming the first block that does not exist."""
    for block_id in block_ids:
        if not 0 <= block_id < num_blocks:
            raise TransferFailed(f"{side} block {block_id} does not exist; there are {num_blocks}")


def num_local_blocks(region: BlockRegion) -> int:
    """How many blocks a READ of ours may name as targets."""
    return region.num_blocks + region.num_scratch
