"""Pool and prefix tree against a model that is too simple to be wrong: the same states, the same evictions, always."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from headrace.block_hash import extend
from headrace.engine.block_pool import BlockPool, BlockState, Hold
from tests.property.operations import Choices, Operation, run_seeds
from tests.support.audit import assert_idle_pool, assert_sound

B = 1
NUM_BLOCKS = 9
ROOT = b"root"
TTL_S = 5.0


@dataclass
class Name:
    """A named block in the model."""

    block_id: int
    parent: Name | None
    retention: int
    digest: bytes
    idle_since: int = 0


@dataclass
class Model:
    """What is known of each block, by looking at everybody who has it. Every question walks through everything."""

    names: dict[bytes, Name] = field(default_factory=dict)
    tables: list[list[int]] = field(default_factory=list)
    holds: dict[str, list[int]] = field(default_factory=dict)
    filling: list[list[int]] = field(default_factory=list)
    quarantined: dict[str, list[int]] = field(default_factory=dict)
    moment: int = 0

    def name_of(self, block_id: int) -> Name | None:
        return next((name for name in self.names.values() if name.block_id == block_id), None)

    def state(self, block_id: int) -> BlockState:
        for state, whose in (
            (BlockState.HELD, self.holds.values()),
            (BlockState.ACTIVE, self.tables),
            (BlockState.FILLING, self.filling),
            (BlockState.QUARANTINED, self.quarantined.values()),
        ):
            for block_ids in whose:
                if block_id in block_ids:
                    return state
        return BlockState.FREE if self.name_of(block_id) is None else BlockState.CACHED

    def match(self, digests: list[bytes]) -> list[int]:
        found = [self.names[digest].block_id for digest in digests if digest in self.names]
        known = [digest in self.names for digest in [*digests, b""]]
        return found[: known.index(False)]

    def idle(self) -> list[Name]:
        return [name for name in self.names.values() if self.state(name.block_id) is BlockState.CACHED]

    def given_back(self, block_ids: list[int]) -> None:
        """Named blocks that became idle by this, in order."""
        for block_id in dict.fromkeys(block_ids):
            name = self.name_of(block_id)
            if name is not None and self.state(block_id) is BlockState.CACHED:
                self.moment += 1
                name.idle_since = self.moment

    def next_evicted(self) -> list[bytes]:
        """Whoever may be evicted next; one, unless all idle blocks have others below them that are in use."""
        idle = self.idle()
        parents = [name.parent for name in self.names.values()]
        leaves = [name for name in idle if name not in parents]
        if not leaves:
            return [name.digest for name in idle]
        num_retained = sum(name.retention > 0 for name in idle)
        too_many = num_retained > NUM_BLOCKS // 2
        return [
            min(
                leaves,
                key=lambda name: (too_many and not name.retention, name.retention, name.idle_since),
            ).digest
        ]

    def evict(self, digest: bytes) -> None:
        gone = self.names.pop(digest)
        for name in self.names.values():
            if name.parent is gone:
                name.parent = None


class Comparison:
    """Does each operation on both, and compares."""

    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS, B)
        self.model = Model()
        self.counter = 0

    def run(self, operations: list[Operation]) -> None:
        for name, number in operations:
            getattr(self, name)(Choices(number))
            self.compare()
        self.end()

    def compare(self) -> None:
        assert_sound(self.pool.audit({i: self.num_users(i) for i in range(NUM_BLOCKS)}))
        states = [self.pool.state(block_id) for block_id in range(NUM_BLOCKS)]
        assert states == [self.model.state(block_id) for block_id in range(NUM_BLOCKS)]
        assert self.pool._tree.block_names() == {n.block_id: n.digest for n in self.model.names.values()}
        assert self.pool.num_cached == len(self.model.idle())
        assert self.pool.num_free == states.count(BlockState.FREE)
        assert not self.pool.has_changes

    def num_users(self, block_id: int) -> int:
        return sum(block_ids.count(block_id) for block_ids in self.model.tables)

    def end(self) -> None:
        while self.model.tables:
            self.release(Choices(0))
        while self.model.holds:
            self.release_hold(Choices(0))
        while self.model.filling:
            self.quarantine(Choices(0))
        while self.model.quarantined:
            self.settle(Choices(0))
        self.compare()
        assert_idle_pool(self.pool.audit({}))
        self.forget(Choices(0))
        assert self.pool.num_free == NUM_BLOCKS

    def taken(self, count: int, block_ids: list[int]) -> None:
        """Blocks were allocated: only those that had to be evicted were, each the one whose turn it was."""
        num_free = NUM_BLOCKS - len(self.model.names) - len(self.others())
        stored, removed = self.pool.drain_changes()
        assert stored == []
        assert len(removed) == max(0, count - num_free)
        for digest in removed:
            assert digest in self.model.next_evicted()
            self.model.evict(digest)
        assert len(set(block_ids)) == count
        assert all(self.model.state(block_id) is BlockState.FREE for block_id in block_ids)

    def others(self) -> set[int]:
        """Blocks without a name that somebody has."""
        parts = [*self.model.tables, *self.model.holds.values(), *self.model.filling]
        parts += self.model.quarantined.values()
        return {i for part in parts for i in part if self.model.name_of(i) is None}

    # --- operations -------------------------------------------------------------------------------------------------

    def use(self, choices: Choices) -> None:
        """A sequence comes: it shares what is cached, computes the rest, and names its full blocks."""
        path = [choices.below(2) for _ in range(1 + choices.below(4))]
        retention = choices.of([0, 0, 0, 1, 3])
        num_unnamed = choices.below(2)
        digests = extend(ROOT, path, B)
        looked_at = digests[: len(digests) - choices.below(2)]  # the last token is computed anew
        matched = self.pool.match(looked_at)
        assert matched == self.model.match(looked_at)
        num_new = len(digests) - len(matched) + num_unnamed
        if num_new > self.pool.num_available_beside(matched):
            return
        self.pool.share(matched, retention)
        for digest in digests[: len(matched)]:
            name = self.model.names[digest]
            name.retention = max(name.retention, retention)
        table = list(matched)
        self.model.tables.append(table)
        new = self.pool.allocate(num_new)
        self.taken(num_new, new)
        table += new
        for index in range(len(matched), len(digests)):
            self.name(table[index], digests[index], digests[index - 1] if index else ROOT, retention)

    def name(self, block_id: int, digest: bytes, parent: bytes, retention: int) -> None:
        self.pool.store(block_id, digest, parent, retention)
        known = self.model.names.get(digest)
        assert self.pool.drain_changes() == ([] if known else [digest], [])
        if known:
            known.retention = max(known.retention, retention)
        else:
            parent_name = self.model.names.get(parent)
            self.model.names[digest] = Name(block_id, parent_name, retention, digest)

    def release(self, choices: Choices) -> None:
        if self.model.tables:
            table = self.model.tables.pop(choices.below(len(self.model.tables)))
            self.pool.release(table)
            self.model.given_back(table)

    def hold(self, choices: Choices) -> None:
        if self.model.tables:
            self.counter += 1
            table = choices.of(self.model.tables)
            owner = f"reader {self.counter}"
            self.pool.hold(Hold(owner, "test", list(table), TTL_S, TTL_S))
            self.model.holds[owner] = list(table)

    def trim_hold(self, choices: Choices) -> None:
        if self.model.holds:
            owner = choices.of(list(self.model.holds))
            blocks = self.model.holds[owner]
            count = choices.below(len(blocks) + 1)
            self.pool.trim_hold(owner, count)
            self.model.holds[owner] = blocks[:count]
            self.model.given_back(blocks[count:])

    def release_hold(self, choices: Choices) -> None:
        if self.model.holds:
            owner = choices.of(list(self.model.holds))
            assert self.pool.release_hold(owner)
            self.model.given_back(self.model.holds.pop(owner))
        assert not self.pool.release_hold("nobody")

    def fill(self, choices: Choices) -> None:
        count = 1 + choices.below(3)
        if count <= self.pool.num_available:
            block_ids = self.pool.fill(count)
            self.taken(count, block_ids)
            self.model.filling.append(block_ids)

    def arrive(self, choices: Choices) -> None:
        if self.model.filling:
            block_ids = self.model.filling.pop(choices.below(len(self.model.filling)))
            self.pool.arrived(block_ids)
            self.model.tables.append(block_ids)

    def quarantine(self, choices: Choices) -> None:
        if self.model.filling:
            self.counter += 1
            block_ids = self.model.filling.pop(choices.below(len(self.model.filling)))
            owner = f"reader {self.counter}"
            self.pool.quarantine(owner, block_ids)
            assert self.pool.owns(owner)
            self.model.quarantined[owner] = block_ids

    def settle(self, choices: Choices) -> None:
        if self.model.quarantined:
            owner = choices.of(list(self.model.quarantined))
            self.pool.settle(owner)
            del self.model.quarantined[owner]
        self.pool.settle("nobody")

    def forget(self, _: Choices) -> None:
        idle = {name.digest for name in self.model.idle()}
        self.pool.forget_cached()
        stored, removed = self.pool.drain_changes()
        assert (stored, set(removed)) == ([], idle)
        for digest in idle:
            self.model.evict(digest)


NAMES = ["use"] * 6 + ["release"] * 5 + ["hold", "trim_hold", "release_hold"]
NAMES += ["fill", "fill", "arrive", "quarantine", "settle", "forget"]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 10_000, 2_500))
def test_ten_thousand_sequences_of_operations(first: int):
    run_seeds(lambda operations: Comparison().run(operations), NAMES, 40, range(first, first + 2_500))
