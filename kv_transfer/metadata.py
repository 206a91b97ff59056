"""What a rank tells its peers so that they can read its blocks: its name, its regions, the transport's own bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import TransferFailed
from kv_transfer.slices import Slice
from kv_transfer.transport import BlockRegion, Part

_HEAD = struct.Struct("<4sI")  # version, length of the description
_VERSION = b"hrx2"


@dataclass(frozen=True, slots=True)
class Metadata:
    transport: str
    name: str
    regions: tuple[BlockRegion, ...]  # without scratch
    own: bytes = b""  # the transport's

    def pack(self) -> bytes:
        regions = [(each.address, each.num_blocks, each.block_bytes, each.device) for each in self.regions]
        text = json.dumps({"transport": self.transport, "name": self.name, "regions": regions}).encode()
        return _HEAD.pack(_VERSION, len(text)) + text + self.own

    @classmethod
    def unpack(cls, raw: bytes) -> Metadata:
        """Raises ValueError for what `pack` did not make."""
        if len(raw) < _HEAD.size:
            raise ValueError("too short")
        version, length = _HEAD.unpack_from(raw)
        if version != _VERSION or len(raw) < _HEAD.size + length:
            raise ValueError("another version")
        try:
            said = json.loads(raw[_HEAD.size : _HEAD.size + length])
            regions = tuple(
                BlockRegion(int(a), int(n), int(size), str(device)) for a, n, size, device in said["regions"]
            )
            return cls(str(said["transport"]), str(said["name"]), regions, raw[_HEAD.size + length :])
        except (KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
            raise ValueError(f"{error!r}") from None


@dataclass(frozen=True, slots=True)
class RemotePart:
    """One rank of a peer, understood and found readable."""

    name: str
    regions: tuple[BlockRegion, ...]
    slice: Slice
    own: bytes

    @property
    def num_blocks(self) -> int:
        return sum(region.num_blocks for region in self.regions)


def understood(transport: str, peer: str, parts: Sequence[Part], region: BlockRegion) -> list[RemotePart]:
    """The peer's ranks, for READs into `region`. Raises TransferFailed for what does not fit together."""
    found = [_understood(transport, peer, part, region) for part in parts]
    if len({tuple(each.num_blocks for each in part.regions) for part in found}) != 1:
        raise TransferFailed(f"the ranks of peer {peer} differ in their numbers of blocks, or there are none")
    return found


def _understood(transport: str, peer: str, part: Part, region: BlockRegion) -> RemotePart:
    try:
        said = Metadata.unpack(part.metadata)
    except ValueError:
        said = None
    if said is None or said.transport != transport:
        raise TransferFailed(f"peer {peer} sent metadata that is not of this transport or version")
    if said.name.partition("/")[0] != peer:  # a rank is called incarnation/rank
        raise TransferFailed(f"peer {peer} sent the metadata of {said.name}")
    expected = (part.slice.remote_block_bytes, part.slice.local_block_bytes)
    for theirs in said.regions:
        if (theirs.block_bytes, region.block_bytes) != expected:
            raise TransferFailed(
                f"peer {peer} has blocks of {theirs.block_bytes} bytes, ours have {region.block_bytes};"
                f" expected were {expected[0]} and {expected[1]}"
            )
    return RemotePart(said.name, said.regions, part.slice, said.own)
