"""Which blocks can be reused, and which of those goes first when memory is needed. Used by the block pool only.

A radix tree at block granularity. A node is one full block; its key is the chained hash, which names the block and all
that came before it, so one dictionary finds any node and the links serve the order of eviction alone:

    root ─▶ A ─▶ B ─▶ C        idle leaves go first, least recently used first: C or D, then B, at last A
                 └──▶ D

A node that some sequence uses is not idle and never evicted. Whoever uses a block nearly always uses all before it. The
exception: a sequence that computed a twin of a block which was in the tree already, and then goes on below that block.

Retention: leaves of a higher level go only when no leaf of a lower one is left. Two things keep that from filling the
pool with what nobody asks for any more. Retained blocks are evicted like others when it comes to that; and while more
than `max_retained` idle ones are there, it is the retained ones that go first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.engine.sequence import MAX_RETENTION

_LEVELS = range(MAX_RETENTION + 1)


@dataclass(slots=True, eq=False)
class _Node:
    digest: bytes
    parent_digest: bytes
    block_id: int
    parent: _Node | None
    retention: int
    children: set[_Node] = field(default_factory=set)
    idle_since: int = 0  # number of the moment it became idle; 0 while somebody uses it


class PrefixTree:
    """An operation takes logarithmic time at most, `match` one look-up per block."""

    def __init__(self, max_retained: int) -> None:
        self._max_retained = max_retained
        self._nodes: dict[bytes, _Node] = {}
        self._moment = 0
        # By level, the idle leaf that was not used for longest first. Entries that are out of date are skipped when
        # they come up, and swept out when they are the greater part.
        self._leaves: list[list[tuple[int, bytes]]] = [[] for _ in _LEVELS]
        self._num_leaves = [0 for _ in _LEVELS]  # idle ones, by level
        self._idle_inner: dict[bytes, _Node] = {}
        self._num_retained = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._nodes

    def find(self, digest: bytes) -> int | None:
        """The block of that name."""
        node = self._nodes.get(digest)
        return None if node is None else node.block_id

    @property
    def num_idle(self) -> int:
        return sum(self._num_leaves) + len(self._idle_inner)

    @property
    def num_retained(self) -> int:
        """Idle nodes of a level over 0."""
        return self._num_retained

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Block ids of the longest known prefix. Changes nothing."""
        block_ids: list[int] = []
        for digest in digests:
            node = self._nodes.get(digest)
            if node is None:
                break
            block_ids.append(node.block_id)
        return block_ids

    def insert(self, digest: bytes, parent_digest: bytes, block_id: int, retention: int = 0) -> bool:
        """Name a block that is in use. False when another block has that name already, which is then retained."""
        if digest in self._nodes:
            self.retain(digest, retention)
            return False
        parent = self._nodes.get(parent_digest)
        node = _Node(digest, parent_digest, block_id, parent, retention)
        self._nodes[digest] = node
        if parent is not None:
            if parent.idle_since and not parent.children:
                self._num_leaves[parent.retention] -= 1
                self._idle_inner[parent_digest] = parent
            parent.children.add(node)
        return True

    def retain(self, digest: bytes, retention: int) -> None:
        """Raise a node to that level, if it is not there or higher."""
        node = self._nodes[digest]
        if retention <= node.retention:
            return
        since = node.idle_since
        if since:
            self._leave_idle(node)
        node.retention = retention
        if since:
            self._enter_idle(node, since)

    def mark_used(self, digest: bytes) -> None:
        """An idle node has a user again."""
        node = self._nodes[digest]
        assert node.idle_since
        self._leave_idle(node)

    def mark_idle(self, digest: bytes) -> None:
        """A node's last user has gone: it is now the most recently used idle one."""
        node = self._nodes[digest]
        assert not node.idle_since
        self._moment += 1
        self._enter_idle(node, self._moment)

    def evict(self) -> tuple[int, bytes]:
        """Remove the idle leaf that is to go first; its block id and digest. Needs `num_idle` over 0.

        Only when every idle node has a child in use (see twins above) an inner one goes; its children stay known, out
        of reach until their parent is computed again.
        """
        node = self._first_leaf() or next(iter(self._idle_inner.values()))
        self._leave_idle(node)
        del self._nodes[node.digest]
        for child in node.children:
            child.parent = None
        if node.parent is not None:
            self._unlink(node, node.parent)
        return node.block_id, node.digest

    def hottest(self, max_blocks: int) -> list[tuple[bytes, bytes]]:
        """(digest, parent's digest) of whole paths from a root, those used now or last first, up to `max_blocks`."""
        leaves = [node for node in self._nodes.values() if not node.children]
        leaves.sort(key=lambda node: node.idle_since or float("inf"), reverse=True)
        chosen: dict[bytes, bytes] = {}
        for leaf in leaves:
            path: list[_Node] = []
            node: _Node | None = leaf
            while node is not None and node.digest not in chosen:
                path.append(node)
                node = node.parent
            for step in reversed(path[max(0, len(path) + len(chosen) - max_blocks) :]):
                chosen[step.digest] = step.parent_digest
            if len(chosen) >= max_blocks:
                break
        return list(chosen.items())

    def block_names(self) -> dict[int, bytes]:
        """Digest by block id, of every node."""
        return {node.block_id: node.digest for node in self._nodes.values()}

    def problems(self) -> list[str]:
        """What is wrong inside the tree; empty when all is well. Walks the whole tree."""
        found: list[str] = []
        num_leaves = [0 for _ in _LEVELS]
        num_retained = 0
        entries = [set(leaves) for leaves in self._leaves]
        for node in self._nodes.values():
            name = f"tree node of block {node.block_id}"
            if node.parent is not None and self._nodes.get(node.parent.digest) is not node.parent:
                found.append(f"{name} has a parent that is gone")
            if any(self._nodes.get(child.digest) is not child for child in node.children):
                found.append(f"{name} has a child that is gone")
            if (node.digest in self._idle_inner) != bool(node.idle_since and node.children):
                found.append(f"{name} is on the wrong idle list")
            if node.idle_since and not node.children:
                num_leaves[node.retention] += 1
                if (node.idle_since, node.digest) not in entries[node.retention]:
                    found.append(f"{name} can not be evicted")
            num_retained += bool(node.idle_since and node.retention)
        if (num_leaves, num_retained) != (self._num_leaves, self._num_retained):
            found.append(
                f"idle leaves by level and retained nodes: noted {self._num_leaves}, {self._num_retained},"
                f" counted {num_leaves}, {num_retained}"
            )
        if len({node.block_id for node in self._nodes.values()}) != len(self._nodes):
            found.append("two tree nodes share a block")
        return found

    # --- idle nodes -------------------------------------------------------------------------------------------------

    def _enter_idle(self, node: _Node, since: int) -> None:
        node.idle_since = since
        self._num_retained += node.retention > 0
        if node.children:
            self._idle_inner[node.digest] = node
        else:
            self._add_leaf(node)

    def _leave_idle(self, node: _Node) -> None:
        node.idle_since = 0
        self._num_retained -= node.retention > 0
        if node.children:
            del self._idle_inner[node.digest]
        else:
            self._num_leaves[node.retention] -= 1

    def _add_leaf(self, node: _Node) -> None:
        leaves = self._leaves[node.retention]
        self._num_leaves[node.retention] += 1
        heapq.heappush(leaves, (node.idle_since, node.digest))
        if len(leaves) > 2 * self._num_leaves[node.retention] + 64:
            leaves[:] = [entry for entry in leaves if self._is_leaf(entry, node.retention)]
            heapq.heapify(leaves)

    def _is_leaf(self, entry: tuple[int, bytes], level: int) -> bool:
        """Whether the entry is of an idle leaf as it is now."""
        since, digest = entry
        node = self._nodes.get(digest)
        return node is not None and (node.idle_since, node.retention) == (since, level) and not node.children

    def _first_leaf(self) -> _Node | None:
        """The idle leaf that is to go next."""
        levels = [*_LEVELS[1:], 0] if self._num_retained > self._max_retained else _LEVELS
        for level in levels:
            leaves = self._leaves[level]
            while leaves:
                entry = heapq.heappop(leaves)
                if self._is_leaf(entry, level):
                    return self._nodes[entry[1]]
        return None

    def _unlink(self, node: _Node, parent: _Node) -> None:
        parent.children.remove(node)
        if parent.idle_since and not parent.children:
            del self._idle_inner[parent.digest]
            self._add_leaf(parent)
