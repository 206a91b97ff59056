"""One block's life: every arrow of the drawing in the pool's docstring, and an audit that notices damage."""

from __future__ import annotations

import pytest

from headrace.engine.block_pool import BlockPool, BlockState, Hold
from headrace.tier import Tier
from tests.support.audit import assert_idle_pool, assert_sound

ROOT = b"root"


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(4, 32)


def stored(pool: BlockPool, *digests: bytes) -> list[int]:
    """A chain of named blocks in use."""
    block_ids = pool.allocate(len(digests))
    for block_id, digest, parent in zip(block_ids, digests, [ROOT, *digests], strict=False):
        pool.store(block_id, digest, parent)
    return block_ids


def hold_of(block_ids: list[int], owner: str = "reader", ttl_s: float = 5.0) -> Hold:
    return Hold(owner, "test", block_ids, ttl_s, expires_at_s=ttl_s)


def test_a_new_pool_is_free(pool: BlockPool):
    audit = pool.audit()
    assert_idle_pool(audit)
    assert audit.free == audit.total == 4


def test_blocks_for_rounds_up(pool: BlockPool):
    assert [pool.blocks_for(n) for n in (0, 1, 32, 33)] == [0, 1, 1, 2]


def test_unnamed_blocks_become_free_and_get_a_new_generation(pool: BlockPool):
    [block] = pool.allocate(1)
    assert pool.state(block) is BlockState.ACTIVE
    before = pool.generation(block)
    pool.release([block])
    assert pool.state(block) is BlockState.FREE
    assert pool.generation(block) == before + 1
    assert pool.drain_changes() == ({}, [])


def test_named_blocks_become_cached_and_keep_their_generation(pool: BlockPool):
    a, b = stored(pool, b"a", b"b")
    before = pool.generation(a)
    pool.release([a, b])
    assert pool.state(a) is BlockState.CACHED
    assert pool.generation(a) == before
    assert pool.match([b"a", b"b", b"c"]) == [a, b]
    assert (pool.num_free, pool.num_cached, pool.num_available) == (2, 2, 4)
    assert_idle_pool(pool.audit())


def test_shared_blocks_stay_until_the_last_user_goes(pool: BlockPool):
    [a] = stored(pool, b"a")
    pool.share([a])
    pool.release([a])
    assert pool.state(a) is BlockState.ACTIVE
    pool.release([a])
    assert pool.state(a) is BlockState.CACHED
    pool.share([a])
    assert pool.state(a) is BlockState.ACTIVE
    assert_sound(pool.audit({a: 1}))


def test_allocation_evicts_the_end_of_the_oldest_prefix(pool: BlockPool):
    a, b = stored(pool, b"a", b"b")
    pool.release([a, b])
    pool.drain_changes()
    taken = pool.allocate(3)
    assert b in taken
    assert a not in taken
    assert pool.drain_changes() == ({}, [b"b"])
    assert pool.match([b"a", b"b"]) == [a]


def test_allocation_beyond_what_is_available_is_a_fault(pool: BlockPool):
    pool.allocate(3)
    with pytest.raises(AssertionError):
        pool.allocate(2)


def test_availability_beside_blocks_that_will_be_shared(pool: BlockPool):
    a, b = stored(pool, b"a", b"b")
    pool.release([b])
    assert pool.num_available_beside([a, b]) == pool.num_available - 1


def test_a_twin_stays_without_a_name_and_becomes_free(pool: BlockPool):
    [a] = stored(pool, b"a")
    [twin] = stored(pool, b"a")
    pool.release([twin])
    assert pool.state(twin) is BlockState.FREE
    assert pool.match([b"a"]) == [a]
    assert pool.drain_changes() == ({b"a": Tier.DEVICE}, [])


def test_changes_that_cancel_out_are_not_reported(pool: BlockPool):
    pool.release(stored(pool, b"a"))
    pool.forget_cached()
    assert not pool.has_changes
    pool.release(stored(pool, b"a"))
    assert pool.drain_changes() == ({b"a": Tier.DEVICE}, [])
    pool.forget_cached()
    pool.release(stored(pool, b"a"))
    assert pool.drain_changes() == ({}, [])


def test_held_blocks_outlive_their_users_and_return_to_cache_or_free_list(pool: BlockPool):
    [named] = stored(pool, b"a")
    [partial] = pool.allocate(1)
    pool.hold(hold_of([named, partial]))
    pool.release([named, partial])
    assert pool.state(named) is pool.state(partial) is BlockState.HELD
    assert pool.num_available == 2
    assert_sound(pool.audit({}))
    assert pool.release_hold("reader")
    assert pool.state(named) is BlockState.CACHED
    assert pool.state(partial) is BlockState.FREE
    assert not pool.release_hold("reader")
    assert_idle_pool(pool.audit())


def test_a_block_in_two_holds_and_in_use(pool: BlockPool):
    [a] = stored(pool, b"a")
    pool.hold(hold_of([a], "one"))
    pool.hold(hold_of([a], "two"))
    pool.release_hold("one")
    assert pool.state(a) is BlockState.HELD
    pool.release_hold("two")
    assert pool.state(a) is BlockState.ACTIVE
    pool.hold(hold_of([a], "three"))
    pool.release([a])
    pool.share([a])  # found in the tree while held
    pool.release_hold("three")
    assert pool.state(a) is BlockState.ACTIVE
    assert_sound(pool.audit({a: 1}))


def test_trimming_a_hold_lets_the_end_go(pool: BlockPool):
    block_ids = pool.allocate(3)
    pool.hold(hold_of(list(block_ids)))
    pool.release(block_ids)
    pool.trim_hold("reader", 1)
    assert [pool.state(i) for i in block_ids] == [BlockState.HELD, BlockState.FREE, BlockState.FREE]
    pool.trim_hold("nobody", 0)
    assert_sound(pool.audit({}))


def test_holds_expire_unless_renewed(pool: BlockPool):
    pool.hold(hold_of(pool.allocate(1), "short", ttl_s=5.0))
    pool.hold(hold_of(pool.allocate(1), "renewed", ttl_s=5.0))
    assert pool.expired_holds(4.9) == []
    assert pool.renew_hold("renewed", now_s=4.0)
    assert not pool.renew_hold("nobody", now_s=4.0)
    assert pool.expired_holds(5.0) == ["short"]
    assert pool.expired_holds(9.0) == ["short", "renewed"]


def test_blocks_filled_from_outside_become_active_on_arrival(pool: BlockPool):
    block_ids = pool.fill(2)
    assert pool.audit().filling == 2
    pool.arrived(block_ids)
    pool.store(block_ids[0], b"a", ROOT)
    assert pool.audit(dict.fromkeys(block_ids, 1)).active == 2
    pool.release(block_ids)
    assert_idle_pool(pool.audit())


def test_quarantined_blocks_are_not_handed_out_before_they_settle(pool: BlockPool):
    block_ids = pool.fill(3)
    pool.quarantine("reader", block_ids)
    assert pool.num_available == 1
    assert pool.audit().quarantined == 3
    assert pool.owns("reader")
    pool.settle("somebody else")
    assert pool.audit().quarantined == 3
    pool.settle("reader")
    pool.settle("reader")
    assert not pool.owns("reader")
    assert_idle_pool(pool.audit())


def test_forgetting_the_cache_leaves_what_is_in_use(pool: BlockPool):
    [used] = stored(pool, b"a")
    pool.release(stored(pool, b"x", b"y"))
    pool.drain_changes()
    pool.forget_cached()
    assert sorted(pool.drain_changes()[1]) == [b"x", b"y"]
    assert pool.match([b"a"]) == [used]
    assert pool.num_free == 3


def test_a_retained_prefix_outlives_later_ones(pool: BlockPool):
    [a] = pool.allocate(1)
    pool.store(a, b"a", ROOT, retention=1)
    pool.release([a])
    pool.release(stored(pool, b"b"))
    pool.drain_changes()
    pool.allocate(3)
    assert pool.drain_changes() == ({}, [b"b"])
    pool.allocate(1)
    assert pool.drain_changes() == ({}, [b"a"]), "retained is not pinned"


def test_using_a_cached_block_can_retain_it(pool: BlockPool):
    [a] = stored(pool, b"a")
    pool.share([a], retention=2)
    pool.release([a])
    pool.release([a])
    pool.release(stored(pool, b"b"))
    pool.drain_changes()
    pool.allocate(3)
    assert pool.drain_changes() == ({}, [b"b"])


def test_what_was_forgotten_while_in_use_elsewhere_stays_known(pool: BlockPool):
    a, b = stored(pool, b"a", b"b")
    pool.share([a])
    pool.release([a, b])
    pool.drain_changes()
    pool.forget_cached()
    assert pool.drain_changes() == ({}, [b"b"])
    assert (pool.match([b"a", b"b"]), pool.state(b)) == ([a], BlockState.FREE)
    assert_sound(pool.audit({a: 1}))


def test_returned_blocks_are_counted_once_for_each_time(pool: BlockPool):
    block_ids = [*stored(pool, b"a"), *pool.allocate(1)]
    pool.hold(hold_of(list(block_ids)))
    pool.release(block_ids)
    assert pool.num_returned == 0, "they are held"
    pool.release_hold("reader")
    assert pool.num_returned == 2
    pool.quarantine("writer", pool.fill(3))
    assert pool.num_returned == 2, "an eviction gives nothing back"
    pool.settle("writer")
    assert pool.num_returned == 5


def damage_users(pool: BlockPool) -> None:
    pool._blocks[0].users = 2


def damage_state(pool: BlockPool) -> None:
    pool._blocks[0].state = BlockState.CACHED


def damage_free_list(pool: BlockPool) -> None:
    pool._free.append(0)


def damage_name(pool: BlockPool) -> None:
    pool._blocks[0].digest = b"another"


def damage_hold(pool: BlockPool) -> None:
    pool._holds["reader"] = hold_of([0])


@pytest.mark.parametrize(
    "damage",
    [damage_users, damage_state, damage_free_list, damage_name, damage_hold],
    ids=lambda f: f.__name__,
)
def test_the_audit_notices_damage(pool: BlockPool, damage):
    assert stored(pool, b"a") == [0]
    assert_sound(pool.audit({0: 1}))
    damage(pool)
    assert any("block 0" in problem for problem in pool.audit({0: 1}).problems)


def test_the_audit_names_the_owner_and_the_reason_of_a_hold_that_should_be_over():
    """A hold that no step and no idle round has ended: what a leak looks like."""
    pool = BlockPool(4, 4)
    pool.hold(Hold("h", "hand-off", pool.allocate(2), 5.0, 5.0, reader="r"))
    assert not [p for p in pool.audit(now_s=9.0).problems if "hold" in p]
    [problem] = [p for p in pool.audit(now_s=104.0).problems if "hold" in p]
    assert problem == "hold h (hand-off, 2 blocks, reader r) should have ended 99.0 s ago"
