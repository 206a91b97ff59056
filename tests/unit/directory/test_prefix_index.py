"""The index answers as a plain model of sets does, and looks up no more than it has to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.directory.prefix_index import PrefixIndex
from tests.support.directory_samples import digest, digests


def index_of(**blocks: list[int]) -> PrefixIndex:
    index = PrefixIndex()
    for worker_id, numbers in blocks.items():
        index.store(worker_id, digests(*numbers))
    return index


def test_longest_contiguous_prefix_of_each_worker():
    index = index_of(whole=[1, 2, 3, 4], half=[1, 2], hole=[1, 3, 4], tail=[2, 3, 4], other=[9])
    assert index.match(digests(1, 2, 3, 4, 5)) == {"whole": 4, "half": 2, "hole": 1}


def test_nothing_to_match():
    assert index_of(a=[1]).match([]) == {}
    assert PrefixIndex().match(digests(1)) == {}
    assert index_of(a=[1]).match(digests(2, 1)) == {}


def test_match_ends_at_the_end_of_the_prompt():
    assert index_of(a=[1, 2, 3]).match(digests(1, 2)) == {"a": 2}


def test_removed_block_ends_the_match():
    index = index_of(a=[1, 2, 3], b=[1, 2, 3])
    index.remove("a", digests(2))
    assert index.match(digests(1, 2, 3)) == {"a": 1, "b": 3}


def test_removing_what_is_not_there_changes_nothing():
    index = index_of(a=[1])
    index.remove("b", digests(1))
    index.remove("a", digests(2))
    assert index.match(digests(1)) == {"a": 1}


def test_storing_twice_is_storing_once():
    index = index_of(a=[1])
    index.store("a", digests(1))
    index.remove("a", digests(1))
    assert index.match(digests(1)) == {}
    assert len(index) == 0


def test_a_forgotten_workers_place_brings_nothing_to_the_next():
    index = index_of(a=[1], b=[1])
    index.forget("a")
    index.store("c", digests(2))
    assert index.match(digests(1)) == {"b": 1}
    assert index.match(digests(2)) == {"c": 1}


def test_forgetting_everybody_leaves_nothing():
    index = index_of(a=[1, 2], b=[2, 3])
    for worker_id in ("a", "b", "never-seen"):
        index.forget(worker_id)
    assert len(index) == 0


def test_no_hash_behind_the_longest_match_is_looked_at():
    class Counted(bytes):
        num_hashed = 0

        def __hash__(self) -> int:
            Counted.num_hashed += 1
            return super().__hash__()

    index = index_of(**{f"worker-{i}": [1, 2, 3] for i in range(50)})
    matched = index.match([Counted(digest(number)) for number in range(1, 1000)])
    assert set(matched.values()) == {3}
    assert Counted.num_hashed == 4


WORKERS = st.sampled_from(["a", "b", "c"])
BLOCKS = st.lists(st.integers(0, 7), max_size=6)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("store"), WORKERS, BLOCKS),
        st.tuples(st.just("remove"), WORKERS, BLOCKS),
        st.tuples(st.just("replace"), WORKERS, BLOCKS),
        st.tuples(st.just("forget"), WORKERS, st.just([])),
    ),
    max_size=30,
)


def naive_match(model: dict[str, set[int]], prompt: list[int]) -> dict[str, int]:
    matched = {}
    for worker_id, held in model.items():
        length = next((i for i, number in enumerate(prompt) if number not in held), len(prompt))
        if length:
            matched[worker_id] = length
    return matched


@given(CHANGES, st.lists(BLOCKS, min_size=1, max_size=5))
def test_equals_a_naive_model(changes, prompts):
    index, model = PrefixIndex(), {}
    for name, worker_id, numbers in changes:
        held = model.setdefault(worker_id, set())
        if name == "forget":
            index.forget(worker_id)
            held.clear()
        elif name == "replace":
            index.replace(worker_id, frozenset(digests(*numbers)))
            model[worker_id] = set(numbers)
        else:
            getattr(index, name)(worker_id, digests(*numbers))
            (held.update if name == "store" else held.difference_update)(numbers)
    for prompt in prompts:
        assert index.match(digests(*prompt)) == naive_match(model, prompt)
    assert len(index) == len(set().union(*model.values()))
    for worker_id, held in model.items():
        assert index.blocks(worker_id) == frozenset(digests(*held))
