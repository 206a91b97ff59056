"""The transport seam: one-sided READs of KV blocks from a peer's registered memory into ours.

One block is one descriptor: block `i` lies at `base + i * block_bytes`, contiguous, on both sides. A transport is
created around one registered region and used by one thread only (`kv_transfer.transfer_thread`); nothing here is
thread-safe.

Implementations: `nixl` (UCX: NVLink, RDMA, shared memory, TCP), `local` (in-process), `faulty` (wraps another one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BlockRegion:
    """Host or device memory that holds `num_blocks` blocks of `block_bytes` each. The owner keeps it alive."""

    address: int
    num_blocks: int
    block_bytes: int
    device: str = "cpu"  # "cpu" or "cuda:N"

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes


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

    def metadata(self) -> bytes:
        """What a peer needs in order to read from our region."""
        ...

    def connect(self, peer: str, metadata: bytes) -> None:
        """Make the peer's region readable. `peer` is its incarnation. Raises TransferFailed."""
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
