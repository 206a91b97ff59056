"""The index answers as a plain model of sets does, and looks up no more than it has to."""

from __future__ import annotations

import tracemalloc
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from headrace.directory.prefix_index import Match, PrefixIndex
from headrace.tier import Tier
from tests.support.directory_samples import digests, in_tier, lengths, on_device


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


def test_the_run_goes_on_through_lower_tiers():
    index = index_of(a=[1, 2, 4], b=[1, 2])
    index.store("a", in_tier(Tier.HOST, 3) | in_tier(Tier.DISK, 5))
    index.store("b", in_tier(Tier.HOST, 1))
    assert index.match(digests(1, 2, 3, 4, 5, 6)) == {"a": Match(5), "b": Match(2)}


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


def test_a_full_index_passes_over_new_blocks_and_still_notes_holders_of_known_ones():
    index = PrefixIndex(max_blocks=3)
    index.store("a", on_device(1, 2))
    index.store("b", on_device(1, 2, 3, 4, 5))
    assert lengths(index.match(digests(1, 2, 3, 4, 5))) == {"a": 2, "b": 3}
    assert (len(index), index.num_entries, index.num_dropped) == (3, 5, 2)
    index.remove("b", digests(3, 4))
    index.store("a", on_device(6))
    assert lengths(index.match(digests(6))) == {"a": 1}
    assert index.num_dropped == 2


def test_an_entry_takes_at_most_sixty_bytes():
    random = Random(0)
    blocks = [random.randbytes(16) for _ in range(150_000)]
    tracemalloc.start()
    index = PrefixIndex()
    for number in range(64):
        own = blocks[number::64]
        for start in range(0, len(own), 500):
            index.store(f"worker-{number}", dict.fromkeys(own[start : start + 500], Tier.DEVICE))
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.num_entries == len(blocks)
    assert num_bytes / len(blocks) < 60
    assert index.num_bytes / len(blocks) < 60


def test_what_comes_and_goes_leaves_no_memory_behind():
    """A million changes in an index of a thousand blocks: neither the table nor the sets of holders grow."""
    index, random = PrefixIndex(), Random(0)
    held: list[list[bytes]] = []
    for round_number in range(500):
        worker_id = f"worker-{round_number % 7}"
        index.store(
            worker_id, dict.fromkeys(blocks := [random.randbytes(16) for _ in range(200)], Tier.DEVICE)
        )
        held.append(blocks)
        if len(held) > 5:
            index.remove(f"worker-{(round_number - 5) % 7}", held.pop(0))
        if round_number == 50:
            before = index.num_bytes
    assert len(index) == 1000
    assert index.num_bytes <= before
    index.replace("worker-0", {})
    for number in range(7):
        index.forget(f"worker-{number}")
    assert (len(index), index.num_entries) == (0, 0)


def test_digests_that_share_half_of_their_bytes_are_different():
    low, high = [bytes([i]) * 8 for i in range(1, 30)], [bytes([255 - i]) * 8 for i in range(1, 30)]
    index = PrefixIndex()
    index.store("a", dict.fromkeys([low[0] + end for end in high], Tier.DEVICE))
    index.store("b", dict.fromkeys([start + high[0] for start in low], Tier.HOST))
    for end in high[1:]:
        assert lengths(index.match([low[0] + end])) == {"a": 1}
    index.remove("a", [low[0] + end for end in high[1::2]])
    for position, end in enumerate(high[1:]):
        assert lengths(index.match([low[0] + end])) == ({"a": 1} if position % 2 else {})
    for start in low[1:]:
        assert lengths(index.match([start + high[0]])) == {"b": 1}
    assert lengths(index.match([low[0] + high[0]])) == {"a": 1, "b": 1}


def test_a_prompt_that_every_worker_holds_to_another_length():
    index, blocks = PrefixIndex(), digests(*range(1, 1001))
    for number in range(1000):
        index.store(f"worker-{number}", dict.fromkeys(blocks[: number + 1], Tier.DEVICE))
    assert index.match(blocks) == {f"worker-{n}": Match(n + 1) for n in range(1000)}
    for number in range(0, 1000, 2):
        index.forget(f"worker-{number}")
    assert lengths(index.match(blocks)) == {f"worker-{n}": n + 1 for n in range(1, 1000, 2)}


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


def naive_match(model: dict[str, set[int]], prompt: list[int]) -> dict[str, Match]:
    matched = {}
    for worker_id, held in model.items():
        length = next((i for i, number in enumerate(prompt) if number not in held), len(prompt))
        if length:
            matched[worker_id] = Match(length)
    return matched


@given(CHANGES, st.lists(BLOCKS, min_size=1, max_size=5))
def test_equals_a_naive_model(changes, prompts):
    index, model = PrefixIndex(), {}
    for name, worker_id, blocks in changes:
        held = model.setdefault(worker_id, set())
        if name == "forget":
            index.forget(worker_id)
            held.clear()
        elif name == "replace":
            index.replace(worker_id, digests(*blocks))
            model[worker_id] = set(blocks)
        elif name == "store":
            index.store(worker_id, digests(*blocks))
            held.update(blocks)
        else:
            index.remove(worker_id, digests(*blocks))
            held.difference_update(blocks)
    for prompt in prompts:
        matches = index.match(digests(*prompt))
        assert matches == naive_match(model, prompt)
        assert len(matches) == len(list(matches))
    assert len(index) == len(set().union(*model.values()))
    for worker_id, held in model.items():
        assert index.blocks(worker_id) == set(digests(*held))
