"""Pool, prefix tree, holds and tiers against a model that is too simple to be wrong: the same states, the same
evictions, the same content, always.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.block_hash import extend
from headrace.engine.block_pool import BlockPool, BlockState, Hold, NamedBlock
from headrace.tier import Tier
from tests.property.operations import MAX_NUMBER, Choices, Operation, run_seeds
from tests.support.audit import assert_idle_pool, assert_sound
from tests.support.tiered import DictFiles

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
    imports: dict[str, list[int]] = field(default_factory=dict)
    quarantined: dict[str, list[int]] = field(default_factory=dict)
    moment: int = 0

    def name_of(self, block_id: int) -> Name | None:
        return next((name for name in self.names.values() if name.block_id == block_id), None)

    def state(self, block_id: int) -> BlockState:
        for state, whose in (
            (BlockState.HELD, self.holds.values()),
            (BlockState.ACTIVE, self.tables),
            (BlockState.FILLING, [*self.filling, *self.imports.values()]),
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


class Contents:
    """Implements `BlockMemory`: a block's content is the name it was given. Nobody's content is lost or overwritten."""

    block_bytes = 16

    def __init__(self, num_host_blocks: int) -> None:
        self.num_host_blocks = num_host_blocks
        self.by_id: dict[int, bytes] = {}

    def copy(self, source_id: int, target_id: int) -> None:
        self.by_id[target_id] = self.by_id[source_id]

    def read(self, block_id: int) -> bytes:
        return self.by_id[block_id]

    def write(self, block_id: int, data: bytearray) -> None:
        self.by_id[block_id] = bytes(data)


class Comparison:
    """Does each operation on both, and compares."""

    def __init__(self, num_slots: int, num_files: int) -> None:
        self.num_slots = num_slots
        self.contents = Contents(num_slots)
        self.files = DictFiles(num_files)
        self.pool = BlockPool(NUM_BLOCKS, B, self.contents, self.files)
        self.model = Model()
        self.counter = 0
        self.told: dict[bytes, Tier] = {}
        self.readers: dict[str, list[int]] = {}  # slots of the host that somebody reads
        self.generations: dict[str, list[int]] = {}

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
        self.listen()
        self.compare_tiers()

    def listen(self) -> list[bytes]:
        """What a listener is told adds up to what there is. Returns what left the device."""
        before = set(self.told)
        was_on_device = {digest for digest in before if self.told[digest] is Tier.DEVICE}
        stored, removed = self.pool.drain_changes()
        assert all(self.told.get(digest) is not tier for digest, tier in stored.items())
        assert before >= set(removed)
        self.told |= stored
        for digest in removed:
            del self.told[digest]
        assert not self.pool.has_changes
        return [digest for digest in was_on_device if self.told.get(digest) is not Tier.DEVICE]

    def compare_tiers(self) -> None:
        """Everything that has a name holds what the name says, and is told to be where it is."""
        slots = self.pool._host.block_names()
        for block_id, digest in (slots | self.pool._tree.block_names()).items():
            assert self.contents.by_id[block_id] == digest
        for digest, data in self.files.data.items():
            assert data == digest
        on_device, on_host = set(self.model.names), set(slots.values())
        assert self.told == (
            dict.fromkeys(self.files.data, Tier.DISK)
            | dict.fromkeys(on_host, Tier.HOST)
            | dict.fromkeys(on_device, Tier.DEVICE)
        )
        read = {block_id for block_ids in self.readers.values() for block_id in block_ids}
        for slot in range(NUM_BLOCKS, NUM_BLOCKS + self.num_slots):
            named = BlockState.CACHED if slot in slots else BlockState.FREE
            assert self.pool.state(slot) is (BlockState.HELD if slot in read else named)
        for owner, block_ids in self.readers.items():
            assert [self.pool.generation(i) for i in block_ids] == self.generations[owner]

    def num_users(self, block_id: int) -> int:
        return sum(block_ids.count(block_id) for block_ids in self.model.tables)

    def end(self) -> None:
        while self.model.tables:
            self.release(Choices(0))
        while self.model.holds:
            self.release_hold(Choices(0))
        while self.model.filling:
            self.quarantine(Choices(0))
        while self.model.imports:
            self.abandon_import(Choices(0))
        while self.model.quarantined:
            self.settle(Choices(0))
        self.compare()
        assert_idle_pool(self.pool.audit({}))
        self.forget(Choices(0))
        assert self.pool.num_free == NUM_BLOCKS

    def taken(self, count: int, block_ids: list[int]) -> None:
        """Blocks were allocated: only those that had to be evicted were, each the one whose turn it was."""
        num_free = NUM_BLOCKS - len(self.model.names) - len(self.others())
        gone = set(self.listen())
        assert len(gone) == max(0, count - num_free)
        while gone:
            digest = next(digest for digest in self.model.next_evicted() if digest in gone)
            gone.remove(digest)
            self.model.evict(digest)
        assert len(set(block_ids)) == count
        assert all(self.model.state(block_id) is BlockState.FREE for block_id in block_ids)

    def others(self) -> set[int]:
        """Blocks without a name that somebody has."""
        parts = [*self.model.tables, *self.model.holds.values(), *self.model.filling]
        parts += self.model.imports.values()
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
        if self.num_slots or self.files.max_blocks:
            self.use_tiers(digests, looked_at, retention)
            return
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

    def use_tiers(self, digests: list[bytes], looked_at: list[bytes], retention: int) -> None:
        """As `use`, where blocks come back from below. Evictions come one by one, between the blocks that come back."""
        matched = self.model.match(looked_at)
        assert self.pool.match(looked_at) == matched
        if len(digests) - len(matched) > self.pool.num_available_beside(matched):
            return
        num_found = next((i for i, digest in enumerate(looked_at) if digest not in self.told), len(looked_at))
        # A file can be damaged, or give way to what is evicted meanwhile.
        may_fail = [self.told[digest] is Tier.DISK for digest in looked_at[:num_found]]
        all_is_well = not self.files.damaged and self.files.max_blocks > 2 * NUM_BLOCKS
        self.pool.start_step()
        table = self.pool.take_cached(looked_at, ROOT, retention)
        assert [*may_fail, True].index(True) <= len(table) <= num_found
        if all_is_well:
            assert len(table) == num_found
        assert [self.contents.by_id[block_id] for block_id in table] == digests[: len(table)]
        num_cached = len(table)
        table += self.pool.allocate(len(digests) - num_cached)
        for index in range(num_cached, len(digests)):
            self.contents.by_id[table[index]] = digests[index]
            self.pool.store(table[index], digests[index], digests[index - 1] if index else ROOT, retention)
        self.model.tables.append(table)
        self.adopt_names()

    def adopt_names(self) -> None:
        """Take over what the tree holds now: which block went first is held against the model without tiers."""
        nodes = self.pool._tree._nodes
        names = {d: Name(n.block_id, None, n.retention, d, n.idle_since) for d, n in nodes.items()}
        for digest, name in names.items():
            parent = nodes[digest].parent
            name.parent = names[parent.digest] if parent is not None else None
            known = self.model.names.get(digest)
            assert known is None or known.idle_since == name.idle_since or not name.idle_since
        self.model.names = names
        self.model.moment = self.pool._tree._moment

    def name(self, block_id: int, digest: bytes, parent: bytes, retention: int) -> None:
        self.contents.by_id.setdefault(block_id, digest)
        self.pool.store(block_id, digest, parent, retention)
        known = self.model.names.get(digest)
        if not known:
            self.contents.by_id[block_id] = digest
        assert self.listen() == []
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
        owners = [owner for owner in self.model.holds if owner not in self.readers]
        if owners:
            owner = choices.of(owners)
            blocks = self.model.holds[owner]
            count = choices.below(len(blocks) + 1)
            self.pool.trim_hold(owner, count)
            self.model.holds[owner] = blocks[:count]
            self.model.given_back(blocks[count:])

    def release_hold(self, choices: Choices) -> None:
        if self.model.holds:
            self.end_hold(choices.of(list(self.model.holds)))
        assert not self.pool.release_hold("nobody")

    def read_elsewhere(self, choices: Choices) -> None:
        """Somebody outside finds blocks by hash and reads them where they are, on the device or in a slot."""
        digests = extend(ROOT, [choices.below(2) for _ in range(4)], B)
        block_ids = self.pool.find_for_reader(digests)
        assert [self.contents.by_id[block_id] for block_id in block_ids] == digests[: len(block_ids)]
        if block_ids:
            self.counter += 1
            owner = f"reader {self.counter}"
            self.pool.hold(Hold(owner, "test", list(block_ids), TTL_S, TTL_S))
            self.model.holds[owner] = [block_id for block_id in block_ids if block_id < NUM_BLOCKS]
            self.readers[owner] = [block_id for block_id in block_ids if block_id >= NUM_BLOCKS]
            self.generations[owner] = [self.pool.generation(i) for i in self.readers[owner]]

    def stop_reading(self, choices: Choices) -> None:
        if self.readers:
            self.end_hold(choices.of(list(self.readers)))

    def end_hold(self, owner: str) -> None:
        assert self.pool.release_hold(owner)
        self.readers.pop(owner, None)
        self.generations.pop(owner, None)
        self.model.given_back(self.model.holds.pop(owner))

    def lose_file(self, choices: Choices) -> None:
        if self.files.data:
            digest = choices.of(list(self.files.data))
            if choices.below(2):
                self.files.lose(digest)
            else:
                self.files.damaged.add(digest)

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

    def begin_import(self, choices: Choices) -> None:
        count = 1 + choices.below(3)
        if count <= self.pool.num_available:
            self.counter += 1
            owner = f"import {self.counter}"
            block_ids = self.pool.begin_import(owner, count)
            self.taken(count, block_ids)
            self.model.imports[owner] = block_ids

    def finish_import(self, choices: Choices) -> None:
        """Blocks of somebody else's cache get their names here: those that are news."""
        if not self.model.imports:
            return
        owner = choices.of(list(self.model.imports))
        block_ids = self.model.imports[owner]
        start = choices.below(2)
        digests = extend(ROOT, [choices.below(2) for _ in range(start + len(block_ids))], B)
        names = [
            NamedBlock(digest, parent) for digest, parent in zip(digests, [ROOT, *digests], strict=False)
        ]
        del names[:start]
        for block_id, name in zip(block_ids, names, strict=True):
            self.contents.by_id[block_id] = name.digest
        self.pool.finish_import(owner, names)
        assert self.listen() == []
        del self.model.imports[owner]
        for block_id, name in zip(block_ids, names, strict=True):
            if name.digest not in self.model.names:
                parent = self.model.names.get(name.parent_digest)
                self.model.names[name.digest] = Name(block_id, parent, 0, name.digest)
        self.model.given_back(block_ids)

    def abandon_import(self, choices: Choices) -> None:
        if self.model.imports:
            owner = choices.of(list(self.model.imports))
            self.pool.abandon_import(owner)
            self.model.quarantined[owner] = self.model.imports.pop(owner)
        self.pool.abandon_import("nobody")

    def settle(self, choices: Choices) -> None:
        if self.model.quarantined:
            owner = choices.of(list(self.model.quarantined))
            self.pool.settle(owner)
            del self.model.quarantined[owner]
        self.pool.settle("nobody")

    def forget(self, _: Choices) -> None:
        idle = {name.digest for name in self.model.idle()}
        self.pool.forget_cached()
        assert set(self.listen()) == idle
        assert self.pool._host.num_idle == 0
        assert not self.files.data
        for digest in idle:
            self.model.evict(digest)


NAMES = ["use"] * 6 + ["release"] * 5 + ["hold", "trim_hold", "release_hold"]
NAMES += ["fill", "fill", "arrive", "quarantine", "settle", "forget"]
NAMES += ["begin_import", "begin_import", "finish_import", "abandon_import"]
NAMES += ["read_elsewhere", "read_elsewhere", "stop_reading", "lose_file"]
TIERS = [(0, 0), (4, 0), (1, 2), (2, 40)]  # slots of the host, files


@pytest.mark.slow
@pytest.mark.parametrize(("first", "tiers"), list(zip(range(0, 10_000, 2_500), TIERS, strict=True)))
def test_ten_thousand_sequences_of_operations(first: int, tiers: tuple[int, int]):
    run_seeds(lambda operations: Comparison(*tiers).run(operations), NAMES, 40, range(first, first + 2_500))


@given(
    st.integers(0, 6),
    st.integers(0, 6),
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, MAX_NUMBER - 1)), max_size=60),
)
@settings(max_examples=200, deadline=None)
def test_sequences_that_hypothesis_finds(num_slots: int, num_files: int, operations: list[Operation]):
    Comparison(num_slots, num_files).run(operations)
