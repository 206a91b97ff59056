"""Who uses each KV block. The only module that changes a block's state; called by scheduler and engine, on one thread.

    FREE ──allocate──▶ ACTIVE ──store──▶ named in the prefix tree ──last user gone──▶ CACHED ──evict──▶ FREE
    owner side     ACTIVE, CACHED ──hold──▶ HELD ──release_hold (released or expired)──▶ CACHED, or FREE without a name
    reader side    FREE ──fill──▶ FILLING ──arrived──▶ ACTIVE
                   FREE ──begin_import──▶ FILLING ──finish_import──▶ CACHED under its name
                   FILLING ──quarantine, abandon_import──▶ QUARANTINED ──settle──▶ FREE
    host slots     FREE ──a named block is evicted──▶ CACHED ──share, hold──▶ HELD ──release──▶ CACHED ──evict──▶ FREE

A block may have several users (sequences with a common prefix) and be in several holds; while it is in any hold it
counts as HELD. free + active + cached + held + filling + quarantined = total, always.

Where the worker has lower tiers (`tiers.py`), a block that is evicted with a name goes to a slot of host memory, from
there to disk, and is copied back when a sequence needs it. Host slots are blocks like others, with the ids behind the
device's, so that holds and generations work for them as well; for them free + cached + held = total.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, auto

from headrace.engine.host_index import HostIndex
from headrace.engine.prefix_tree import PrefixTree
from headrace.engine.tiers import BlockFiles, BlockMemory, TierStats
from headrace.tier import Tier

# Files are read on the engine's thread: what a step needs beyond this is computed anew, so that the sequences that
# decode never wait for more.
_MAX_STEP_READ_BYTES = 32 << 20


class BlockState(Enum):
    FREE = auto()
    ACTIVE = auto()  # in the block table of at least one sequence
    CACHED = auto()  # nobody uses it, its content can be found by name
    HELD = auto()  # kept for a reader until released or expired
    FILLING = auto()  # somebody outside writes into it
    QUARANTINED = auto()  # given up, but somebody outside may still write into it


@dataclass(slots=True)
class _Block:
    state: BlockState = BlockState.FREE
    users: int = 0  # sequences whose block table has it
    holds: int = 0
    generation: int = 0
    digest: bytes | None = None  # its name, while the tree knows the block by it


@dataclass(slots=True)
class Hold:
    """Blocks kept for somebody outside. `expires_at_s` is on the engine's clock; a renewal adds `ttl_s` again."""

    owner: str
    reason: str
    block_ids: list[int]
    ttl_s: float
    expires_at_s: float
    reader: str = ""  # the only one who may renew or release it from outside
    generations: list[int] = field(default_factory=list)  # of the blocks when they were taken into the hold


@dataclass(frozen=True, slots=True)
class NamedBlock:
    """What a full block is called, and the one before it in its prompt."""

    digest: bytes
    parent_digest: bytes


@dataclass(frozen=True, slots=True)
class PoolAudit:
    """Blocks by state, and what does not add up."""

    total: int
    free: int
    active: int
    cached: int
    held: int
    filling: int
    quarantined: int
    problems: list[str]
    holds: list[Hold]
    host_total: int = 0  # slots of host memory, beside the above
    host_free: int = 0
    host_cached: int = 0
    host_held: int = 0


@dataclass(slots=True)
class _Counts:
    """Of one tier, in blocks, since the start."""

    hits: int = 0
    stores: int = 0
    evictions: int = 0
    dropped: int = 0


# A hold that is over is ended by the next step or idle round; one that is there for so much longer is a leak.
_STRAY_AFTER_S = 5.0

_AUDITED = ("users", "holds", "name", "times on the free list", "quarantined")


class BlockPool:
    """All blocks of one KV cache. Block tables are lists of block ids, in the order of the tokens."""

    def __init__(
        self,
        num_blocks: int,
        block_size_tokens: int,
        memory: BlockMemory | None = None,
        files: BlockFiles | None = None,
    ) -> None:
        """`memory` copies blocks between the tiers, and has the host's slots; `files` needs it."""
        assert files is None or memory is not None
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self._memory = memory
        self._files = files
        num_slots = memory.num_host_blocks if memory is not None else 0
        self._blocks = [_Block() for _ in range(num_blocks + num_slots)]
        self._free = list(range(num_blocks - 1, -1, -1))
        self._free_slots = list(range(num_blocks + num_slots - 1, num_blocks - 1, -1))
        self._tree = PrefixTree(max_retained=num_blocks // 2)
        self._host = HostIndex()
        self._num_reads_left = 0
        self._counts = {tier: _Counts() for tier in Tier}
        self._holds: dict[str, Hold] = {}
        self._quarantine: dict[str, list[int]] = {}
        self._imports: dict[str, list[int]] = {}
        # The tier of each block that changed it since last drained, as it was then. None: in no tier.
        self._changes: dict[bytes, Tier | None] = dict.fromkeys(files.digests() if files is not None else ())
        self.num_returned = (
            0  # times that a block became available; what did not fit may fit when this has grown
        )

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._tree.num_idle

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` and `fill` can give."""
        return len(self._free) + self._tree.num_idle

    @property
    def num_quarantined(self) -> int:
        return sum(map(len, list(self._quarantine.values())))

    @property
    def num_holds(self) -> int:
        return len(self._holds)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size_tokens)

    def state(self, block_id: int) -> BlockState:
        return self._blocks[block_id].state

    def generation(self, block_id: int) -> int:
        """Grows each time the block is recycled: equal numbers mean that its content was not given up in between."""
        return self._blocks[block_id].generation

    def is_generation(self, block_id: int, told: int) -> bool:
        """Whether the block exists and was not recycled since somebody was told its generation."""
        return 0 <= block_id < len(self._blocks) and self.generation(block_id) == told

    # --- sequences --------------------------------------------------------------------------------------------------

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Block ids of the longest prefix in the tree. Changes nothing: `share` what is to be used."""
        return self._tree.match(digests)

    def num_available_beside(self, block_ids: Sequence[int]) -> int:
        """What `num_available` will be once `block_ids`, matched in the tree, are shared."""
        return self.num_available - sum(self.state(i) is BlockState.CACHED for i in block_ids)

    def knows(self, digest: bytes) -> bool:
        """Whether a block of that name is in the tree."""
        return digest in self._tree

    def share(self, block_ids: Sequence[int], retention: int = 0) -> None:
        """One more user for each of these blocks, found by name. Raises the device's to that level of retention."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.digest is not None
            is_slot = block_id >= self.num_blocks
            if block.state is BlockState.CACHED:
                (self._host if is_slot else self._tree).mark_used(block.digest)
                block.state = BlockState.ACTIVE
            block.users += 1
            if retention and not is_slot:
                self._tree.retain(block.digest, retention)

    def share_in_use(self, block_ids: Sequence[int]) -> None:
        """One more user for each of these blocks of a sequence that runs, whether they have names or not."""
        for block_id in block_ids:
            assert self._blocks[block_id].users > 0
            self._blocks[block_id].users += 1

    def allocate(self, count: int) -> list[int]:
        """FREE to ACTIVE with one user; evicts from the tree as needed. The caller has looked at `num_available`."""
        return self._take(count, BlockState.ACTIVE, users=1)

    def store(self, block_id: int, digest: bytes, parent_digest: bytes, retention: int = 0) -> None:
        """A block is full and computed: let others find it. A twin of a block in the tree stays without a name.

        `retention`: blocks of a higher level are evicted later, see `prefix_tree.py`.
        """
        block = self._blocks[block_id]
        assert block.users > 0
        assert block.digest is None
        before = self.tier(digest)
        if self._tree.insert(digest, parent_digest, block_id, retention):
            block.digest = digest
            self._counts[Tier.DEVICE].stores += 1
            self._note_change(digest, before)

    def release(self, block_ids: Sequence[int]) -> None:
        """One user less for each."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.users > 0
            block.users -= 1
            self._place(block_id)

    # --- all tiers --------------------------------------------------------------------------------------------------

    def start_step(self) -> None:
        """What one step may read from files is there anew."""
        if self._files is not None and self._memory is not None:
            self._num_reads_left = max(1, _MAX_STEP_READ_BYTES // self._memory.block_bytes)
            self._note_lost()

    def tier(self, digest: bytes) -> Tier | None:
        """The nearest tier that holds the block."""
        if digest in self._tree:
            return Tier.DEVICE
        if self._host.find(digest) is not None:
            return Tier.HOST
        return Tier.DISK if self._files is not None and digest in self._files else None

    def num_cached_blocks(self, digests: Sequence[bytes]) -> int:
        """How many blocks of this prefix the tiers hold without a hole."""
        return next((i for i, digest in enumerate(digests) if self.tier(digest) is None), len(digests))

    def find_for_reader(self, digests: Sequence[bytes]) -> list[int]:
        """Ids of the blocks that others can read in place, for the leading names in device and host memory. Changes
        nothing: `hold` them.
        """
        block_ids: list[int] = []
        for digest in digests:
            block_id = self._find(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def take_cached(self, digests: Sequence[bytes], root: bytes, retention: int = 0) -> list[int]:
        """Device blocks with one more user each, for the longest prefix that the tiers hold. What lies below the device
        is copied into fresh blocks, which get its names; the caller has looked at `num_available`.

        `root` is the parent of the first. Shorter than found where a file turns out to be damaged.
        """
        found = [self._find(digest) for digest in digests[: self._num_within_reads(digests)]]
        # What is to be used is not evicted for what is copied before it.
        self.share([block_id for block_id in found if block_id is not None], retention)
        block_ids: list[int] = []
        for index, source in enumerate(found):
            if source is not None and source < self.num_blocks:
                block_ids.append(source)
                self._counts[Tier.DEVICE].hits += 1
            elif (block_id := self._restore(digests[index], source)) is not None:
                self.store(block_id, digests[index], digests[index - 1] if index else root, retention)
                block_ids.append(block_id)
            else:
                break
        unused = {block_id for block_id in found[len(block_ids) :] if block_id is not None}
        slots = {block_id for block_id in found if block_id is not None and block_id >= self.num_blocks}
        # The end of the prefix first: it is evicted before its beginning.
        self.release(
            [block_id for block_id in reversed(found) if block_id is not None and block_id in unused | slots]
        )
        return block_ids

    def tier_stats(self) -> list[TierStats]:
        """Of the device, and of what there is below. Plain counters: may be called from another thread."""
        block_bytes = self._memory.block_bytes if self._memory is not None else 0
        sizes = {Tier.DEVICE: len(self._tree), Tier.HOST: len(self._host)}
        if len(self._blocks) == self.num_blocks:
            del sizes[Tier.HOST]
        stats = [
            TierStats(
                tier, size, size * block_bytes, count.hits, count.stores, count.evictions, count.dropped
            )
            for tier, size in sizes.items()
            for count in (self._counts[tier],)
        ]
        return stats if self._files is None else [*stats, self._files.stats()]

    # --- holds ------------------------------------------------------------------------------------------------------

    def hold(self, hold: Hold) -> None:
        """Keep blocks of device or host until `release_hold(hold.owner)`: in use, held or cached ones, whoever stops
        using them.
        """
        assert hold.owner not in self._holds
        self._holds[hold.owner] = hold
        hold.generations = [self.generation(block_id) for block_id in hold.block_ids]
        for block_id in hold.block_ids:
            block = self._blocks[block_id]
            if block.state is BlockState.CACHED:
                assert block.digest is not None
                (self._tree if block_id < self.num_blocks else self._host).mark_used(block.digest)
            else:
                assert block.state in (BlockState.ACTIVE, BlockState.HELD)
            block.holds += 1
            block.state = BlockState.HELD

    def find_hold(self, owner: str) -> Hold | None:
        return self._holds.get(owner)

    def renew_hold(self, owner: str, now_s: float) -> bool:
        """Start the hold's time again. False when there is no such hold."""
        hold = self._holds.get(owner)
        if hold is None:
            return False
        hold.expires_at_s = now_s + hold.ttl_s
        return True

    def release_hold(self, owner: str) -> bool:
        """End a hold, released or expired. False when there is no such hold."""
        if owner not in self._holds:
            return False
        self.trim_hold(owner, 0)
        del self._holds[owner]
        return True

    def trim_hold(self, owner: str, num_blocks: int) -> None:
        """Let all but the first `num_blocks` of a hold go; nothing when there is no such hold."""
        hold = self._holds.get(owner)
        if hold is None:
            return
        for block_id in hold.block_ids[num_blocks:]:
            self._blocks[block_id].holds -= 1
            self._place(block_id)
        del hold.block_ids[num_blocks:]
        del hold.generations[num_blocks:]

    def expired_holds(self, now_s: float) -> list[str]:
        """Owners of the holds whose time is over."""
        return [hold.owner for hold in self._holds.values() if hold.expires_at_s <= now_s]

    # --- blocks that are filled from outside ------------------------------------------------------------------------

    def fill(self, count: int) -> list[int]:
        """FREE to FILLING: somebody outside will write them. Evicts as `allocate` does."""
        return self._take(count, BlockState.FILLING, users=0)

    def arrived(self, block_ids: Sequence[int]) -> None:
        """FILLING to ACTIVE with one user: their content is here and checked, nobody outside writes any more."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.state is BlockState.FILLING
            block.state = BlockState.ACTIVE
            block.users = 1

    def quarantine(self, owner: str, block_ids: Sequence[int]) -> None:
        """FILLING to QUARANTINED until `settle(owner)`: given up while somebody outside may still write."""
        assert owner not in self._quarantine
        for block_id in block_ids:
            assert self.state(block_id) is BlockState.FILLING
            self._blocks[block_id].state = BlockState.QUARANTINED
        if block_ids:
            self._quarantine[owner] = list(block_ids)

    def settle(self, owner: str) -> None:
        """Nobody outside can write any more: QUARANTINED to FREE. Nothing for an unknown owner."""
        block_ids = self._quarantine.pop(owner, [])
        for block_id in block_ids:
            self._recycle(block_id)
        self.num_returned += len(block_ids)

    def begin_import(self, owner: str, count: int) -> list[int]:
        """Blocks that `owner` fills with cached content of somebody else; until `finish_import` or `abandon_import`."""
        assert not self.owns(owner)
        self._imports[owner] = self.fill(count)
        return list(self._imports[owner])

    def finish_import(self, owner: str, names: Sequence[NamedBlock]) -> None:
        """The blocks are here, one for each name, and checked: FILLING to CACHED. What was news by then only."""
        block_ids = self._imports.pop(owner)
        self.arrived(block_ids)
        for block_id, name in zip(block_ids, names, strict=True):
            self.store(block_id, name.digest, name.parent_digest)
        self.release(block_ids)

    def abandon_import(self, owner: str) -> None:
        """Given up: quarantined until `settle(owner)`. Nothing for an unknown owner."""
        self.quarantine(owner, self._imports.pop(owner, []))

    # --- the pool as a whole ----------------------------------------------------------------------------------------

    def owns(self, owner: str) -> bool:
        """Whether blocks are held, quarantined or filled under this name."""
        return owner in self._holds or owner in self._quarantine or owner in self._imports

    def hottest(self, max_blocks: int) -> list[NamedBlock]:
        """Names of cached and used blocks, most recently used prompts first, each block behind its parent."""
        return [NamedBlock(*names) for names in self._tree.hottest(max_blocks)]

    def forget_cached(self) -> None:
        """CACHED to FREE, all of them, and what lies below. Blocks in use and held keep their names."""
        below = self._host.block_names().values()
        on_disk = self._files.digests() if self._files is not None else []
        before = {digest: self.tier(digest) for digest in (*below, *on_disk)}
        while self._tree.num_idle:
            block_id, digest = self._tree.evict()
            before[digest] = Tier.DEVICE
            self._recycle(block_id)
        while self._host.num_idle:
            block_id, _ = self._host.evict()
            self._recycle(block_id)
        if self._files is not None:
            self._files.clear()
        for digest, tier in before.items():
            self._note_change(digest, tier)

    @property
    def has_changes(self) -> bool:
        """Whether `drain_changes` has something to give."""
        return bool(self._changes)

    def drain_changes(self) -> tuple[dict[bytes, Tier], list[bytes]]:
        """Blocks that are in another tier than at the last call, by the one they are in now, and blocks that are in
        none any more. What was undone is not in it.
        """
        self._note_lost()
        changes, self._changes = self._changes, {}
        now = {digest: self.tier(digest) for digest in changes}
        stored = {digest: tier for digest, tier in now.items() if tier is not None}
        return stored, [digest for digest, tier in now.items() if tier is None]

    def audit(
        self,
        users: Mapping[int, int] | None = None,
        reserved: Set[int] | None = None,
        now_s: float = float("-inf"),
    ) -> PoolAudit:
        """Count everything anew; walks the whole pool. `users`: how many block tables have each block, `reserved`:
        those that are filled for a sequence, both where known. `now_s` finds the holds that should be over.
        """
        states = Counter(block.state for block in self._blocks[: self.num_blocks])
        slots = Counter(block.state for block in self._blocks[self.num_blocks :])
        return PoolAudit(
            total=self.num_blocks,
            free=states[BlockState.FREE],
            active=states[BlockState.ACTIVE],
            cached=states[BlockState.CACHED],
            held=states[BlockState.HELD],
            filling=states[BlockState.FILLING],
            quarantined=states[BlockState.QUARANTINED],
            problems=[
                *self._problems(users),
                *self._problems_outside(reserved, now_s),
                *self._tree.problems(),
            ],
            holds=list(self._holds.values()),
            host_total=len(self._blocks) - self.num_blocks,
            host_free=slots[BlockState.FREE],
            host_cached=slots[BlockState.CACHED],
            host_held=slots[BlockState.HELD],
        )

    def _take(self, count: int, state: BlockState, *, users: int) -> list[int]:
        assert count <= self.num_available
        while len(self._free) < count:
            self._evict()
        block_ids = [self._free.pop() for _ in range(count)]
        for block_id in block_ids:
            self._blocks[block_id].state = state
            self._blocks[block_id].users = users
        return block_ids

    def _place(self, block_id: int) -> None:
        """The state of a block that was given back, from who is left and whether it has a name."""
        block = self._blocks[block_id]
        if block.holds:
            block.state = BlockState.HELD
        elif block.users:
            block.state = BlockState.ACTIVE
        elif block.digest is not None:
            block.state = BlockState.CACHED
            if block_id >= self.num_blocks:
                self._host.mark_idle(block.digest)
            else:
                self._tree.mark_idle(block.digest)
                self.num_returned += 1
        else:
            self._recycle(block_id)
            self.num_returned += 1

    def _evict(self) -> None:
        block_id, digest = self._tree.evict()
        self._counts[Tier.DEVICE].evictions += 1
        # Noted before others make room for it: on disk that may cost its own file.
        self._changes.setdefault(digest, Tier.DEVICE)
        self._keep_below(digest, block_id)
        self._note_change(digest, Tier.DEVICE)
        self._recycle(block_id)

    # --- between the tiers ------------------------------------------------------------------------------------------

    def _find(self, digest: bytes) -> int | None:
        """The block of that name in device or host memory."""
        block_id = self._tree.find(digest)
        return self._host.find(digest) if block_id is None else block_id

    def _num_within_reads(self, digests: Sequence[bytes]) -> int:
        """How many blocks of this prefix the tiers hold, and the step may still read."""
        num_reads = 0
        for index, digest in enumerate(digests):
            tier = self.tier(digest)
            num_reads += tier is Tier.DISK
            if tier is None or num_reads > self._num_reads_left:
                return index
        return len(digests)

    def _restore(self, digest: bytes, slot: int | None) -> int | None:
        """A fresh block with the content of a slot, or of a file where there is none. None: the file is damaged."""
        assert self._memory is not None
        if slot is not None:
            [block_id] = self.allocate(1)
            self._memory.copy(slot, block_id)
            self._counts[Tier.HOST].hits += 1
            return block_id
        assert self._files is not None
        self._num_reads_left -= 1
        data = self._files.take(digest)
        self._note_lost()
        if data is None:
            return None
        [block_id] = self.allocate(1)
        self._memory.write(block_id, data)
        return block_id

    def _keep_below(self, digest: bytes, block_id: int) -> None:
        """A block of the device is about to go. Nobody uses it, so nobody writes it while it is copied."""
        if self._host.find(digest) is not None:
            self._host.touch(digest)
            return
        if not self._free_slots and self._host.num_idle:
            slot, evicted = self._host.evict()
            self._counts[Tier.HOST].evictions += 1
            if evicted not in self._tree:
                self._changes.setdefault(evicted, Tier.HOST)
                self._keep_on_disk(evicted, slot)
                self._note_change(evicted, Tier.HOST)
            self._recycle(slot)
        if not self._free_slots or self._memory is None:
            self._counts[Tier.HOST].dropped += len(self._blocks) > self.num_blocks
            self._keep_on_disk(digest, block_id)
            return
        slot = self._free_slots.pop()
        self._memory.copy(block_id, slot)
        self._blocks[slot].state = BlockState.CACHED
        self._blocks[slot].digest = digest
        self._host.insert(digest, slot)
        self._counts[Tier.HOST].stores += 1

    def _keep_on_disk(self, digest: bytes, block_id: int) -> None:
        if self._files is None or self._memory is None:
            return
        if digest in self._files:
            self._files.touch(digest)
        else:
            self._files.put(digest, self._memory.read(block_id))
            self._note_lost()

    def _note_lost(self) -> None:
        """Blocks that went from disk by themselves: not written, damaged, or evicted there."""
        for digest in self._files.drain_lost() if self._files is not None else ():
            nearer = self._tree.find(digest) is not None or self._host.find(digest) is not None
            if not nearer:
                self._note_change(digest, Tier.DISK)

    def _recycle(self, block_id: int) -> None:
        block = self._blocks[block_id]
        block.state = BlockState.FREE
        block.digest = None
        block.generation += 1
        (self._free if block_id < self.num_blocks else self._free_slots).append(block_id)

    def _note_change(self, digest: bytes, before: Tier | None) -> None:
        """The block's tier may have changed from that one."""
        if self._changes.setdefault(digest, before) is self.tier(digest):
            del self._changes[digest]  # as it was, before anybody was told

    def _problems(self, users: Mapping[int, int] | None) -> Iterable[str]:
        holds = Counter(block_id for hold in self._holds.values() for block_id in hold.block_ids)
        outside = {block_id for block_ids in self._quarantine.values() for block_id in block_ids}
        names = self._tree.block_names() | self._host.block_names()
        free = Counter([*self._free, *self._free_slots])
        for block_id, block in enumerate(self._blocks):
            is_free, is_outside = block.state is BlockState.FREE, block.state is BlockState.QUARANTINED
            noted = (block.users, block.holds, block.digest, int(is_free), is_outside)
            counted = (
                block.users if users is None else users.get(block_id, 0),
                holds.get(block_id, 0),
                names.get(block_id),
                free.get(block_id, 0),
                block_id in outside,
            )
            if noted != counted:
                for what, note, count in zip(_AUDITED, noted, counted, strict=True):
                    if note != count:
                        yield f"block {block_id} ({block.state.name}): {what} noted {note}, counted {count}"
            if not self._state_fits(block):
                yield f"block {block_id} is {block.state.name} with {block.users} users and {block.holds} holds"

    def _problems_outside(self, reserved: Set[int] | None, now_s: float) -> Iterable[str]:
        """What is wrong with holds and with blocks that are being filled."""
        for hold in self._holds.values():
            name = f"hold {hold.owner} ({hold.reason}, {len(hold.block_ids)} blocks, reader {hold.reader or 'none'})"
            if now_s - hold.expires_at_s > _STRAY_AFTER_S:
                yield f"{name} should have ended {now_s - hold.expires_at_s:.1f} s ago"
            if hold.generations != [self.generation(block_id) for block_id in hold.block_ids]:
                yield f"{name} has blocks that were recycled"
        if reserved is None:
            return
        known = {block_id for block_ids in self._imports.values() for block_id in block_ids} | reserved
        for block_id, block in enumerate(self._blocks):
            if (block.state is BlockState.FILLING) != (block_id in known):
                who = "somebody" if block_id in known else "nobody"
                yield f"block {block_id} is {block.state.name}, and {who} fills it"

    @staticmethod
    def _state_fits(block: _Block) -> bool:
        match block.state:
            case BlockState.HELD:
                return block.holds > 0
            case BlockState.ACTIVE:
                return block.users > 0 and block.holds == 0
            case BlockState.CACHED:
                return block.users == block.holds == 0 and block.digest is not None
            case _:
                return block.users == block.holds == 0 and block.digest is None
