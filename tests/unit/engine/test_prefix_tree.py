"""Which blocks the tree finds, and in which order it lets them go."""

from __future__ import annotations

import pytest

from headrace.engine.prefix_tree import PrefixTree


def name(text: str) -> bytes:
    return text.encode()


def tree_of(*paths: str, retention: int = 0) -> PrefixTree:
    """A tree from paths of letters; block ids are given in order of insertion. All nodes are in use."""
    tree = PrefixTree(max_retained=4)
    for path in paths:
        grow(tree, path, retention)
    return tree


def grow(tree: PrefixTree, path: str, retention: int = 0) -> None:
    for end in range(1, len(path) + 1):
        tree.insert(name(path[:end]), name(path[: end - 1] or "root"), len(tree), retention)


def let_go(tree: PrefixTree, *digests: str) -> None:
    for digest in digests:
        tree.mark_idle(name(digest))


def evict_all(tree: PrefixTree) -> list[str]:
    evicted = []
    while tree.num_idle:
        evicted.append(tree.evict()[1].decode())
        assert tree.problems() == []
    return evicted


def test_match_ends_at_the_first_unknown_block():
    tree = tree_of("abc")
    assert tree.match([name("a"), name("ab"), name("x"), name("abc")]) == [0, 1]
    assert tree.match([name("x"), name("a")]) == []
    assert tree.match([]) == []


def test_a_twin_is_not_inserted():
    tree = tree_of("a")
    assert not tree.insert(name("a"), name("root"), 7)
    assert tree.match([name("a")]) == [0]
    assert len(tree) == 1


def test_used_nodes_are_never_evicted():
    tree = tree_of("ab")
    tree.mark_idle(name("ab"))
    assert tree.num_idle == 1
    assert tree.evict() == (1, name("ab"))
    assert tree.num_idle == 0
    assert tree.match([name("a"), name("ab")]) == [0]


def test_leaves_go_before_what_they_hang_on():
    tree = tree_of("abc", "abd")
    # The inner nodes were given back first, which a sequence does not do; still they go last.
    for digest in ("a", "ab", "abc", "abd"):
        tree.mark_idle(name(digest))
    assert evict_all(tree) == ["abc", "abd", "ab", "a"]


def test_the_leaf_unused_for_longest_goes_first():
    tree = tree_of("a", "b", "c")
    for digest in ("a", "b", "c"):
        tree.mark_idle(name(digest))
    tree.mark_used(name("a"))
    tree.mark_idle(name("a"))
    assert evict_all(tree) == ["b", "c", "a"]


def test_a_parent_takes_the_place_of_its_last_child():
    tree = tree_of("ab", "c")
    for digest in ("ab", "a", "c"):
        tree.mark_idle(name(digest))
    assert evict_all(tree) == ["ab", "a", "c"]


def test_idle_parent_of_a_used_child_goes_only_when_there_is_no_leaf():
    tree = tree_of("a", "x")
    tree.mark_idle(name("a"))
    tree.insert(name("ab"), name("a"), 5)
    tree.mark_idle(name("x"))
    assert tree.evict()[1] == name("x")
    assert tree.evict()[1] == name("a")
    assert tree.problems() == []
    assert tree.match([name("a"), name("ab")]) == []
    # Its child is found again once the parent is.
    tree.insert(name("a"), name("root"), 6)
    assert tree.match([name("a"), name("ab")]) == [6, 5]
    for digest in ("a", "ab"):
        tree.mark_idle(name(digest))
    assert sorted(evict_all(tree)) == ["a", "ab"]


def test_a_parent_that_was_used_after_its_last_child_keeps_its_later_place():
    tree = tree_of("ab", "c")
    let_go(tree, "ab", "c", "a")
    assert evict_all(tree) == ["ab", "c", "a"]


def test_retained_leaves_go_last_and_among_them_the_lower_level_first():
    tree = tree_of("a", retention=2)
    grow(tree, "b", retention=1)
    grow(tree, "c")
    let_go(tree, "a", "b", "c")
    assert tree.num_retained == 2
    assert evict_all(tree) == ["c", "b", "a"]
    assert tree.num_retained == 0


def test_what_hangs_on_a_retained_block_goes_by_its_own_level():
    tree = tree_of("s", retention=3)
    grow(tree, "sx")
    grow(tree, "t", retention=3)
    let_go(tree, "t", "s", "sx")
    assert evict_all(tree) == ["sx", "t", "s"], "s was used after t, so its place is behind it"


def test_a_block_under_a_retained_one_that_is_less_retained_protects_nobody():
    tree = tree_of("a")
    grow(tree, "ab", retention=3)
    grow(tree, "c")
    let_go(tree, "a", "ab", "c")
    assert evict_all(tree) == ["c", "ab", "a"], "a leaf comes before what it hangs on"


def test_a_level_can_be_raised_and_is_not_lowered():
    tree = tree_of("a", "b", "c")
    let_go(tree, "a", "b", "c")
    tree.retain(name("a"), 2)
    tree.retain(name("a"), 1)
    assert not tree.insert(name("b"), name("root"), 9, retention=1), "a twin raises the block that is there"
    assert tree.problems() == []
    assert evict_all(tree) == ["c", "b", "a"]


def test_more_retained_blocks_than_allowed_go_before_others():
    tree = tree_of("a", "b", "c", "d", "e", "f", retention=1)
    grow(tree, "x")
    let_go(tree, "a", "b", "c", "d", "e", "f", "x")
    assert evict_all(tree) == ["a", "b", "x", "c", "d", "e", "f"]


def test_many_uses_of_one_node_leave_nothing_behind():
    tree = tree_of("a")
    let_go(tree, "a")
    for _ in range(1000):
        tree.mark_used(name("a"))
        tree.mark_idle(name("a"))
    assert sum(len(leaves) for leaves in tree._leaves) < 100
    assert evict_all(tree) == ["a"]


def test_nothing_idle_means_nothing_to_evict():
    with pytest.raises(StopIteration):
        tree_of("a").evict()
