"""What rank 0 tells the others, as bytes: int32 numbers, little-endian, the first of them the kind.

    STEP     numbers of spans, tokens, blocks, rows | spans: tokens, start, blocks | token ids | block ids | rows
    LOGITS   rows
    COPY     pairs of blocks: from, to
    READ     block
    WRITE    block | its bytes at that rank

Rows are those of the step whose logits are wanted. A step's message takes 4 bytes a token, 4 a block of its sequences'
tables, 12 a sequence, and 4 for each that samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch

from headrace.engine.attention.base import StepBatch

_NUMBER = np.dtype("<i4")


class Kind(IntEnum):
    STEP = 1
    LOGITS = 2
    COPY = 3
    READ = 4
    WRITE = 5


def kind_of(message: bytes) -> Kind:
    return Kind(int.from_bytes(message[:4], "little"))


def packed(kind: Kind, numbers: Sequence[int]) -> bytes:
    return np.array([kind, *numbers], dtype=_NUMBER).tobytes()


def numbers_of(message: bytes) -> list[int]:
    """Those behind the kind."""
    return np.frombuffer(message, dtype=_NUMBER, offset=4).tolist()


def pack_step(batch: StepBatch, rows: Sequence[int]) -> bytes:
    spans = np.array([(s.num_tokens, s.start, len(s.block_ids)) for s in batch.spans], dtype=_NUMBER)
    block_ids = torch.cat([span.block_ids for span in batch.spans]).numpy()
    head = (Kind.STEP, len(spans), len(batch.token_ids_T), len(block_ids), len(rows))
    arrays = (head, spans.ravel(), batch.token_ids_T.numpy(), block_ids, rows)
    return np.concatenate([np.asarray(array, dtype=_NUMBER) for array in arrays]).tobytes()


def unpack_step(message: bytes, block_size_tokens: int) -> tuple[StepBatch, list[int]]:
    """The batch, and the rows whose logits are wanted."""
    numbers = np.frombuffer(message, dtype=_NUMBER).astype(np.int64)
    num_spans, num_tokens, num_blocks, num_rows = numbers[1:5].tolist()
    ends = np.cumsum([5, 3 * num_spans, num_tokens, num_blocks, num_rows])
    spans, token_ids, block_ids, rows = np.split(numbers, ends)[1:5]
    spans = spans.reshape(-1, 3)
    tables = torch.from_numpy(block_ids).split(spans[:, 2].tolist())
    chunks = [(start, count, table) for (count, start, _), table in zip(spans.tolist(), tables, strict=True)]
    return StepBatch.made(chunks, torch.from_numpy(token_ids), block_size_tokens), rows.tolist()


def pack_write(block_id: int, data: memoryview) -> bytes:
    return b"".join((packed(Kind.WRITE, (block_id,)), data))


def unpack_write(message: bytes) -> tuple[int, bytearray]:
    return int.from_bytes(message[4:8], "little"), bytearray(message[8:])
