"""Who uses each KV block. The only module that changes a block's state; called by scheduler and engine, on one thread.

    FREE ──allocate──▶ ACTIVE ──store──▶ named in the prefix tree ──last user gone──▶ CACHED ──evict──▶ FREE
    owner side     ACTIVE, CACHED ──hold──▶ HELD ──release_hold (released or expired)──▶ CACHED, or FREE without a name
    reader side    FREE ──fill──▶ FILLING ──arrived──▶ ACTIVE
                   FREE ──begin_import──▶ FILLING ──finish_import──▶ CACHED under its name
                   FILLING ──quarantine, abandon_import──▶ QUARANTINED ──settle──▶ FREE

A block may have several users (sequences with a common prefix) and be in several holds; while it is in any hold it
counts as HELD. free + active + cached + held + filling + quarantined = total, always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, auto

from headrace.engine.prefix_tree import PrefixTree


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


# A hold that is over is ended by the next step or idle round; one that is there for so much longer is a leak.
_STRAY_AFTER_S = 5.0

_AUDITED = ("users", "holds", "name", "times on the free list", "quarantined")


class BlockPool:
    """All blocks of one KV cache. Block tables are lists of block ids, in the order of the tokens."""

    def __init__(self, num_blocks: int, block_size_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free = list(range(num_blocks - 1, -1, -1))
        self._tree = PrefixTree(max_retained=num_blocks // 2)
        self._holds: dict[str, Hold] = {}
        self._quarantine: dict[str, list[int]] = {}
        self._imports: dict[str, list[int]] = {}
        self._changes: dict[bytes, bool] = {}  # since last drained: True stored, False removed
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

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size_tokens)

    def state(self, block_id: int) -> BlockState:
        return self._blocks[block_id].state

    def generation(self, block_id: int) -> int:
        """Grows each time the block is recycled: equal numbers mean that its content was not given up in between."""
        return self._blocks[block_id].generation

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
        """One more user for each of these blocks, found by `match`. Raises them to that level of retention."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.digest is not None
            if block.state is BlockState.CACHED:
                self._tree.mark_used(block.digest)
                block.state = BlockState.ACTIVE
            block.users += 1
            if retention:
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
        if self._tree.insert(digest, parent_digest, block_id, retention):
            block.digest = digest
            self._note_change(digest, is_stored=True)

    def release(self, block_ids: Sequence[int]) -> None:
        """One user less for each."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.users > 0
            block.users -= 1
            self._place(block_id)

    # --- holds ------------------------------------------------------------------------------------------------------

    def hold(self, hold: Hold) -> None:
        """Keep blocks that are in use, held or cached until `release_hold(hold.owner)`, whoever stops using them."""
        assert hold.owner not in self._holds
        self._holds[hold.owner] = hold
        hold.generations = [self.generation(block_id) for block_id in hold.block_ids]
        for block_id in hold.block_ids:
            block = self._blocks[block_id]
            if block.state is BlockState.CACHED:
                assert block.digest is not None
                self._tree.mark_used(block.digest)
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
        """CACHED to FREE, all of them. Blocks in use keep their names."""
        while self._tree.num_idle:
            self._evict()

    @property
    def has_changes(self) -> bool:
        """Whether `drain_changes` has something to give."""
        return bool(self._changes)

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Digests stored and removed since the last call; what was both cancels out."""
        changes, self._changes = self._changes, {}
        return (
            [digest for digest, is_stored in changes.items() if is_stored],
            [digest for digest, is_stored in changes.items() if not is_stored],
        )

    def audit(
        self,
        users: Mapping[int, int] | None = None,
        reserved: Set[int] | None = None,
        now_s: float = float("-inf"),
    ) -> PoolAudit:
        """Count everything anew; walks the whole pool. `users`: how many block tables have each block, `reserved`:
        those that are filled for a sequence, both where known. `now_s` finds the holds that should be over.
        """
        states = Counter(block.state for block in self._blocks)
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
            self._tree.mark_idle(block.digest)
            self.num_returned += 1
        else:
            self._recycle(block_id)
            self.num_returned += 1

    def _evict(self) -> None:
        block_id, digest = self._tree.evict()
        self._note_change(digest, is_stored=False)
        self._recycle(block_id)

    def _recycle(self, block_id: int) -> None:
        block = self._blocks[block_id]
        block.state = BlockState.FREE
        block.digest = None
        block.generation += 1
        self._free.append(block_id)

    def _note_change(self, digest: bytes, *, is_stored: bool) -> None:
        if self._changes.get(digest) is (not is_stored):
            del self._changes[digest]  # there again, or gone again, before anybody was told
        else:
            self._changes[digest] = is_stored

    def _problems(self, users: Mapping[int, int] | None) -> Iterable[str]:
        holds = Counter(block_id for hold in self._holds.values() for block_id in hold.block_ids)
        outside = {block_id for block_ids in self._quarantine.values() for block_id in block_ids}
        names = self._tree.block_names()
        free = Counter(self._free)
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
