"""Names of blocks, against stored vectors and in fresh processes."""

import hashlib
import json
import struct
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.block_hash import DIGEST_BYTES, HashRoot, block_hashes, extend

ROOT_FOLDER = Path(__file__).parents[3]
VECTORS = json.loads(Path(__file__).with_name("block_hash_vectors.json").read_text(encoding="utf-8"))
ROOT = HashRoot("model", "tokenizer", 4, "float32")
PROMPT = list(range(1000, 1011))

IN_A_FRESH_PROCESS = """
import json, sys
from headrace.block_hash import HashRoot, block_hashes
print(json.dumps([
    [digest.hex() for digest in block_hashes(HashRoot(**vector["root"]), vector["token_ids"])]
    for vector in json.load(sys.stdin)
]))
"""


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["what"])
def test_pc_05_stored_vectors(vector):
    root = HashRoot(**vector["root"])
    assert root.digest().hex() == vector["root_digest"]
    assert [digest.hex() for digest in block_hashes(root, vector["token_ids"])] == vector["block_hashes"]


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_pc_05_fresh_processes_give_the_stored_vectors(seed):
    fresh = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS],
        input=json.dumps(VECTORS),
        env={"PYTHONHASHSEED": seed},
        cwd=ROOT_FOLDER,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(fresh.stdout) == [vector["block_hashes"] for vector in VECTORS]


def test_pc_05_the_definition_written_out_gives_the_same():
    sha = hashlib.sha256(b"headrace.block.v1")
    for tag, value in (
        ("model", "m é"),
        ("tokenizer", "t"),
        ("block_size", "2"),
        ("kv_dtype", "bfloat16"),
        ("adapter", "a"),
        ("salt", "s"),
    ):
        sha.update(tag.encode() + b"\0" + struct.pack("<Q", len(value.encode())) + value.encode())
    root = sha.digest()[:16]
    first = hashlib.sha256(root + struct.pack("<2I", 1, 2**32 - 1)).digest()[:16]
    second = hashlib.sha256(first + struct.pack("<2I", 3, 4)).digest()[:16]
    made = HashRoot("m é", "t", 2, "bfloat16", adapter="a", salt="s")
    assert made.digest() == root
    assert block_hashes(made, [1, 2**32 - 1, 3, 4, 5]) == [first, second]


@pytest.mark.parametrize(
    "change",
    [
        {"model_fingerprint": "other"},
        {"tokenizer_fingerprint": "other"},
        {"block_size_tokens": 8},
        {"kv_dtype": "bfloat16"},
        {"adapter": "x"},
        {"salt": "x"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_pc_05_each_field_changes_every_hash(change):
    changed = replace(ROOT, **change)
    assert changed.digest() != ROOT.digest()
    assert not set(block_hashes(changed, PROMPT)) & set(block_hashes(ROOT, PROMPT))


def test_pc_05_the_same_text_in_another_field_is_another_root():
    fields = [name for name, value in asdict(ROOT).items() if isinstance(value, str)]
    empty = HashRoot("", "", 4, "")
    assert len({replace(empty, **{name: "x"}).digest() for name in fields}) == len(fields) == 5


def test_pc_05_text_can_not_move_from_one_field_into_the_next():
    assert HashRoot("ab", "c", 4, "float32").digest() != HashRoot("a", "bc", 4, "float32").digest()
    forged = HashRoot("model", "tokenizer", 4, "float32", adapter="x\0salt\0y")
    assert forged.digest() != HashRoot("model", "tokenizer", 4, "float32", adapter="x", salt="y").digest()


@pytest.mark.parametrize(("length", "full"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2)])
def test_only_full_blocks_have_a_name(length, full):
    digests = block_hashes(ROOT, PROMPT[:length])
    assert len(digests) == full
    assert all(len(digest) == DIGEST_BYTES for digest in digests)


@given(token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=40), cut=st.integers(0, 10))
def test_a_chain_can_be_taken_up_at_any_block(token_ids, cut):
    whole = block_hashes(ROOT, token_ids)
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else ROOT.digest()
    assert whole[:cut] + extend(parent, token_ids[cut * 4 :], 4) == whole


@given(token_ids=st.lists(st.integers(0, 9), min_size=4, max_size=24), at=st.integers(0, 23))
def test_a_changed_token_changes_its_block_and_all_behind_it(token_ids, at):
    at %= len(token_ids)
    changed = [*token_ids[:at], token_ids[at] + 10, *token_ids[at + 1 :]]
    pairs = list(zip(block_hashes(ROOT, token_ids), block_hashes(ROOT, changed), strict=True))
    assert [a == b for a, b in pairs] == [block < at // 4 for block in range(len(pairs))]
