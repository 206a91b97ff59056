"""Which blocks can be reused, and which of those goes first when memory is needed. Used by the block pool only.

A radix tree at block granularity. A node is one full block; its key is the chained hash, which names the block and all
that came before it, so one dictionary finds any node and the links serve the order of eviction alone:

    root ─▶ A ─▶ B ─▶ C        idle leaves go first, least recently used first: C or D, then B, at last A
                 └──▶ D

A node that some sequence uses is not idle and never evicted. Whoever uses a block nearly always uses all before it. The
exception: a sequence that computed a twin of a block which was in the tree already, and then goes on below that block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Node:
    digest: bytes
    block_id: int
    parent: _Node | None
    children: set[_Node] = field(default_factory=set)
    idle: bool = False


class PrefixTree:
    """All operations take constant time, `match` one look-up per block."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, _Node] = {}
        self._idle_leaves: OrderedDict[bytes, _Node] = OrderedDict()  # least recently used first
        self._idle_inner: dict[bytes, _Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_idle(self) -> int:
        return len(self._idle_leaves) + len(self._idle_inner)

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Block ids of the longest known prefix. Changes nothing."""
        block_ids: list[int] = []
        for digest in digests:
            node = self._nodes.get(digest)
            if node is None:
                break
            block_ids.append(node.block_id)
        return block_ids

    def insert(self, digest: bytes, parent_digest: bytes, block_id: int) -> bool:
        """Name a block that is in use. False, and no change, when another block has that name already."""
        if digest in self._nodes:
            return False
        parent = self._nodes.get(parent_digest)
        node = _Node(digest, block_id, parent)
        self._nodes[digest] = node
        if parent is not None:
            parent.children.add(node)
            if self._idle_leaves.pop(parent_digest, None) is not None:
                self._idle_inner[parent_digest] = parent
        return True

    def mark_used(self, digest: bytes) -> None:
        """An idle node has a user again."""
        node = self._nodes[digest]
        assert node.idle
        node.idle = False
        del (self._idle_inner if node.children else self._idle_leaves)[digest]

    def mark_idle(self, digest: bytes) -> None:
        """A node's last user has gone: it is now the most recently used idle one."""
        node = self._nodes[digest]
        assert not node.idle
        node.idle = True
        (self._idle_inner if node.children else self._idle_leaves)[digest] = node

    def evict(self) -> tuple[int, bytes]:
        """Remove the idle leaf that was not used for longest; its block id and digest. Needs `num_idle` over 0.

        Only when every idle node has a child in use (see twins above) an inner one goes; its children stay known, out
        of reach until their parent is computed again.
        """
        if self._idle_leaves:
            _, node = self._idle_leaves.popitem(last=False)
        else:
            node = self._idle_inner.pop(next(iter(self._idle_inner)))
        del self._nodes[node.digest]
        for child in node.children:
            child.parent = None
        if node.parent is not None:
            self._unlink(node, node.parent)
        return node.block_id, node.digest

    def _unlink(self, node: _Node, parent: _Node) -> None:
        parent.children.remove(node)
        if parent.idle and not parent.children:
            # The parent was last used when its last child was, so it takes that child's place in the order.
            self._idle_leaves[parent.digest] = self._idle_inner.pop(parent.digest)
            self._idle_leaves.move_to_end(parent.digest, last=False)

    def block_names(self) -> dict[int, bytes]:
        """Digest by block id, of every node."""
        return {node.block_id: node.digest for node in self._nodes.values()}

    def problems(self) -> list[str]:
        """What is wrong inside the tree; empty when all is well. Walks the whole tree."""
        found: list[str] = []
        for node in self._nodes.values():
            name = f"tree node of block {node.block_id}"
            if node.parent is not None and self._nodes.get(node.parent.digest) is not node.parent:
                found.append(f"{name} has a parent that is gone")
            if any(self._nodes.get(child.digest) is not child for child in node.children):
                found.append(f"{name} has a child that is gone")
            expected = (node.idle and not node.children, node.idle and bool(node.children))
            if (node.digest in self._idle_leaves, node.digest in self._idle_inner) != expected:
                found.append(f"{name} is on the wrong idle list")
        if len({node.block_id for node in self._nodes.values()}) != len(self._nodes):
            found.append("two tree nodes share a block")
        return found
