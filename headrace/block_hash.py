"""Names of KV blocks: a chained hash of content, equal in every process and after every restart.

Router and workers call the same functions, so a block that the router looks for is the block that a worker stores.

    root   = H("headrace.block.v1", model, tokenizer, block size, KV dtype, adapter, salt)      every field tagged
    block0 = H(root,   token ids of block 0 as little-endian u32)
    block1 = H(block0, token ids of block 1)                                                     ... only full blocks

H is SHA-256 cut to 16 bytes. Test vectors: `tests/unit/headrace/block_hash_vectors.json`.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

DIGEST_BYTES = 16
_SCHEMA = b"headrace.block.v1"


@dataclass(frozen=True, slots=True)
class HashRoot:
    """Everything that makes two equal token runs different KV. Two roots are equal only if all fields are.

    `salt` comes from the authenticated tenant, never from a request field alone.
    """

    model_fingerprint: str
    tokenizer_fingerprint: str
    block_size_tokens: int
    kv_dtype: str
    adapter: str = ""
    salt: str = ""

    def digest(self) -> bytes:
        sha = hashlib.sha256(_SCHEMA)
        for tag, value in (
            (b"model", self.model_fingerprint),
            (b"tokenizer", self.tokenizer_fingerprint),
            (b"block_size", str(self.block_size_tokens)),
            (b"kv_dtype", self.kv_dtype),
            (b"adapter", self.adapter),
            (b"salt", self.salt),
        ):
            data = value.encode()
            # Tag and length in front of each value: no two different lists of fields give the same bytes.
            sha.update(tag + b"\0" + len(data).to_bytes(8, "little") + data)
        return sha.digest()[:DIGEST_BYTES]


def extend(parent: bytes, token_ids: Sequence[int], block_size_tokens: int) -> list[bytes]:
    """Hashes of the full blocks in `token_ids`, chained to `parent` (root or block digest). A partial tail has none."""
    num_full = len(token_ids) // block_size_tokens
    words = array("I", token_ids[: num_full * block_size_tokens])  # 4 bytes each; a third of numpy's time
    if sys.byteorder == "big":
        words.byteswap()
    data = words.tobytes()
    stride = block_size_tokens * 4
    sha256 = hashlib.sha256
    digests: list[bytes] = []
    for start in range(0, len(data), stride):
        parent = sha256(parent + data[start : start + stride]).digest()[:DIGEST_BYTES]
        digests.append(parent)
    return digests


def block_hashes(root: HashRoot, token_ids: Sequence[int]) -> list[bytes]:
    """Hashes of all full blocks of a prompt: `len(token_ids) // block_size_tokens` digests of 16 bytes."""
    return extend(root.digest(), token_ids, root.block_size_tokens)
