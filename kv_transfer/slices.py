"""Which bytes of a peer's block go where in ours, when the two sides split the heads over different numbers of ranks.

A block of rank r of R holds the KV heads [r*H/R, (r+1)*H/R) as [layers, 2, heads/R, block_size, row]; with more ranks
than heads, R/H ranks have copies of one. A plane is one layer's keys or values in a block; the heads that two ranks
share are one piece of each plane, so a slice is one run with strides. H = 4, owner TP 2, reader TP 1:

    owner rank 0   │h0 h1│h0 h1│…            ─▶   reader   │h0 h1 ·· ··│h0 h1 ·· ··│…
    owner rank 1   │h2 h3│h2 h3│…            ─▶            │·· ·· h2 h3│·· ·· h2 h3│…
                    plane 0, plane 1                        plane 0     plane 1
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kv_transfer.layout import KvLayout


@dataclass(frozen=True, slots=True)
class Slice:
    """`count` pieces of `nbytes` in every block: piece i lies at offset + i * stride, on each side. Bytes."""

    owner_rank: int
    remote_offset: int
    local_offset: int
    nbytes: int
    count: int
    remote_stride: int
    local_stride: int

    @classmethod
    def whole(cls, block_bytes: int, owner_rank: int = 0) -> Slice:
        """A block as it is: one piece."""
        return cls(owner_rank, 0, 0, block_bytes, 1, block_bytes, block_bytes)

    @property
    def remote_block_bytes(self) -> int:
        """The size of a block at the owner."""
        return self.count * self.remote_stride

    @property
    def local_block_bytes(self) -> int:
        """The size of a block here."""
        return self.count * self.local_stride


def pairing(reader: KvLayout, owner: KvLayout) -> list[Slice]:
    """What rank `reader.tp_rank` reads, by owner rank: together the whole of its block, nothing twice.

    `owner.tp_rank` does not matter. Raises LayoutMismatch.
    """
    reader.check(owner)
    if reader.tp_size == owner.tp_size:
        return [Slice.whole(reader.block_bytes, reader.tp_rank)]
    head_bytes = reader.block_size_tokens * reader.row_bytes
    ours = reader.heads
    num_copies = max(1, owner.tp_size // owner.num_kv_heads)
    slices: list[Slice] = []
    for first_copy in range(0, owner.tp_size, num_copies):
        theirs = replace(owner, tp_rank=first_copy).heads
        begin, end = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
        if begin < end:
            slices.append(
                Slice(
                    owner_rank=first_copy + reader.tp_rank % num_copies,
                    remote_offset=(begin - theirs.start) * head_bytes,
                    local_offset=(begin - ours.start) * head_bytes,
                    nbytes=(end - begin) * head_bytes,
                    count=2 * reader.num_layers,
                    remote_stride=len(theirs) * head_bytes,
                    local_stride=len(ours) * head_bytes,
                )
            )
    return slices
