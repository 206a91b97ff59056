"""The index answers as a plain model of sets does, and looks up no more than it has to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.directory.prefix_index import Match, PrefixIndex
from headrace.tier import Tier
from tests.support.directory_samples import digest, digests, in_tier, lengths, on_device


def index_of(**blocks: list[int]) -> PrefixIndex:
    index = PrefixIndex()
    for worker_id, numbers in blocks.items():
        index.store(worker_id, on_device(*numbers))
    return index


def test_longest_contiguous_prefix_of_each_worker():
    index = index_of(whole=[1, 2, 3, 4], half=[1, 2], hole=[1, 3, 4], tail=[2, 3, 4], other=[9])
    assert lengths(index.match(digests(1, 2, 3, 4, 5))) == {"whole": 4, "half": 2, "hole": 1}


def test_nothing_to_match():
    assert lengths(index_of(a=[1]).match([])) == {}
    assert lengths(PrefixIndex().match(digests(1))) == {}
    assert lengths(index_of(a=[1]).match(digests(2, 1))) == {}


def test_match_ends_at_the_end_of_the_prompt():
    assert lengths(index_of(a=[1, 2, 3]).match(digests(1, 2))) == {"a": 2}


def test_removed_block_ends_the_match():
    index = index_of(a=[1, 2, 3], b=[1, 2, 3])
    index.remove("a", digests(2))
    assert lengths(index.match(digests(1, 2, 3))) == {"a": 1, "b": 3}


def test_removing_what_is_not_there_changes_nothing():
    index = index_of(a=[1])
    index.remove("b", digests(1))
    index.remove("a", digests(2))
    assert lengths(index.match(digests(1))) == {"a": 1}


def test_the_run_goes_on_through_lower_tiers_and_the_device_part_is_told_apart():
    index = index_of(a=[1, 2, 4], b=[1, 2])
    index.store("a", in_tier(Tier.HOST, 3) | in_tier(Tier.DISK, 5))
    index.store("b", in_tier(Tier.HOST, 1))
    assert index.match(digests(1, 2, 3, 4, 5, 6)) == {"a": Match(5, 2), "b": Match(2, 0)}


def test_storing_twice_is_storing_once():
    index = index_of(a=[1])
    index.store("a", on_device(1))
    index.remove("a", digests(1))
    assert lengths(index.match(digests(1))) == {}
    assert len(index) == 0


def test_a_forgotten_workers_place_brings_nothing_to_the_next():
    index = index_of(a=[1], b=[1])
    index.forget("a")
    index.store("c", on_device(2))
    assert lengths(index.match(digests(1))) == {"b": 1}
    assert lengths(index.match(digests(2))) == {"c": 1}


def test_forgetting_everybody_leaves_nothing():
    index = index_of(a=[1, 2], b=[2, 3])
    for worker_id in ("a", "b", "never-seen"):
        index.forget(worker_id)
    assert len(index) == 0


def test_a_short_match_looks_at_few_hashes_of_a_long_prompt():
    index = index_of(**{f"worker-{i}": [1, 2, 3] for i in range(50)})
    matched = index.match(digests(*range(1, 10_000)))
    assert set(lengths(matched).values()) == {3}
    assert index.num_looked_up == 128


WORKERS = st.sampled_from(["a", "b", "c"])
BLOCKS = st.lists(st.integers(0, 7), max_size=6)
HELD = st.dictionaries(st.integers(0, 7), st.sampled_from(Tier), max_size=6)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("store"), WORKERS, HELD),
        st.tuples(st.just("remove"), WORKERS, BLOCKS),
        st.tuples(st.just("replace"), WORKERS, HELD),
        st.tuples(st.just("forget"), WORKERS, st.just([])),
    ),
    max_size=30,
)


def naive_match(model: dict[str, dict[int, Tier]], prompt: list[int]) -> dict[str, Match]:
    matched = {}
    for worker_id, held in model.items():
        length = next((i for i, number in enumerate(prompt) if number not in held), len(prompt))
        tiers = [held[number] for number in prompt[:length]]
        on_device = next((i for i, tier in enumerate(tiers) if tier is not Tier.DEVICE), length)
        if length:
            matched[worker_id] = Match(length, on_device)
    return matched


def named(held: dict[int, Tier]) -> dict[bytes, Tier]:
    return {digest(number): tier for number, tier in held.items()}


@given(CHANGES, st.lists(BLOCKS, min_size=1, max_size=5))
def test_equals_a_naive_model(changes, prompts):
    index, model = PrefixIndex(), {}
    for name, worker_id, blocks in changes:
        held = model.setdefault(worker_id, {})
        if name == "forget":
            index.forget(worker_id)
            held.clear()
        elif name == "replace":
            index.replace(worker_id, named(blocks))
            model[worker_id] = dict(blocks)
        elif name == "store":
            index.store(worker_id, named(blocks))
            held.update(blocks)
        else:
            index.remove(worker_id, digests(*blocks))
            for number in blocks:
                held.pop(number, None)
    for prompt in prompts:
        assert index.match(digests(*prompt)) == naive_match(model, prompt)
    assert len(index) == len(set().union(*model.values()))
    for worker_id, held in model.items():
        assert index.blocks(worker_id) == named(held)
