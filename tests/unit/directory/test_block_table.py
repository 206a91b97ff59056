"""The table answers as a dictionary does, however it is used."""

from __future__ import annotations

from random import Random

import numpy as np

from headrace.directory.block_table import BlockTable, words_of


def contents(table: BlockTable) -> dict[bytes, int]:
    slots, values = table.entries()
    return dict(zip(table.digests(slots), values.tolist(), strict=True))


def looked_up(table: BlockTable, digests: list[bytes]) -> list[int]:
    return table.values(table.find(words_of(digests))).tolist()


def test_equals_a_dictionary_through_growth_and_removals():
    """Digests with few different bits, so that buckets overflow into their neighbours."""
    random, table, model = Random(0), BlockTable(), {}
    universe = [bytes([*random.choices(range(3), k=8), *random.choices(range(3), k=8)]) for _ in range(4000)]
    universe = list(dict.fromkeys(universe))
    for _ in range(300):
        batch = random.sample(universe, 60)
        new = [digest for digest in batch if digest not in model]
        values = [random.randrange(1, 1000) for _ in new]
        table.put(words_of(new), np.array(values, np.int32))
        model.update(zip(new, values, strict=True))
        gone = random.sample(sorted(model), min(len(model), random.randrange(50)))
        table.free(table.find(words_of(gone)))
        for digest in gone:
            del model[digest]
        asked = random.sample(universe, 200)
        assert looked_up(table, asked) == [model.get(digest, 0) for digest in asked]
        assert len(table) == len(model)
    assert len(model) > 1000
    assert contents(table) == model
    table.free(table.find(words_of(list(model))))
    assert contents(table) == {}
    assert not table._overflows.any()


def test_digests_of_one_home_bucket_find_each_other():
    """Equal in what the home bucket is made of (low ^ high), different in both halves."""
    digests = [(number | number << 64).to_bytes(16, "little") for number in range(1, 300)]
    table = BlockTable()
    table.put(words_of(digests), np.arange(1, 300, dtype=np.int32))
    assert looked_up(table, digests) == list(range(1, 300))
    table.free(table.find(words_of(digests[::2])))
    assert looked_up(table, digests) == [0 if n % 2 else n for n in range(1, 300)]
    table.put(words_of(digests[::2]), np.full(150, 7, np.int32))
    assert looked_up(table, digests) == [7 if n % 2 else n for n in range(1, 300)]


def test_of_nothing():
    table = BlockTable()
    none = words_of([])
    table.put(none, np.zeros(0, np.int32))
    table.free(table.find(none))
    assert looked_up(table, [b"x" * 16]) == [0]
    assert len(table) == 0
