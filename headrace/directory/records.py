"""What the directory holds: a record per live worker, and events that tell how caches change. Plain data.

Made by publishers, read by watchers, the router's dispatch and `headrace status`. What can not be read
(garbled, or written by another version) is logged and ignored: a stranger's entry never stops a router.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import structlog
from pydantic import Field, TypeAdapter, ValidationError

from headrace.block_hash import DIGEST_BYTES
from headrace.tier import Tier

log = structlog.get_logger()

ENTRY_BYTES = DIGEST_BYTES + 1  # a block hash and its tier

_Count = Annotated[int, Field(ge=0)]
_Positive = Annotated[int, Field(gt=0)]
_Name = Annotated[str, Field(min_length=1)]


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class RouterShare:
    """What one router has at a worker: other routers add it to what they sent there themselves."""

    router_id: str  # "": of no router, or of several that are too many to tell apart
    num_sequences: _Count
    num_tokens: _Count  # in their contexts
    num_pending_tokens: _Count  # of prompts, to be computed by this worker


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Figures of the moment; by the time they are read they are up to a refresh old."""

    running: _Count
    waiting: _Count
    waiting_tokens: _Count
    free_blocks: _Count
    cached_blocks: _Count
    prefill_tokens_per_s: Annotated[float, Field(ge=0)] = 0.0  # measured lately; 0: not known
    decode_step_s: Annotated[float, Field(ge=0)] = 0.0  # measured lately; 0: not known
    # Spent computing, by this time of the worker's own clock. 0: it does not say.
    busy_s: Annotated[float, Field(ge=0)] = 0.0
    at_s: Annotated[float, Field(ge=0)] = 0.0
    shares: tuple[RouterShare, ...] = ()  # events bring them, too, and sooner


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker process: where it is, what it serves, how loaded it is. `incarnation` is new at every start."""

    worker_id: _Name
    role: Role
    address: _Name
    incarnation: _Name
    model_name: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    kv_dtype: str
    block_size_tokens: _Positive
    num_blocks: _Count
    max_model_tokens: _Count
    vocab_size: _Count
    transport: str
    draining: bool
    load: WorkerLoad
    block_bytes: _Count = 0  # of one KV block; 0: an older worker that does not say
    kind: str = ""  # what it computes with; workers of one kind are as fast as one another

    @property
    def layout(self) -> tuple[int, str, str]:
        """What has to be equal for two workers to exchange blocks, as far as records tell."""
        return self.block_size_tokens, self.kv_dtype, self.transport

    @property
    def used_blocks(self) -> int:
        """Neither free nor cached for later prompts."""
        return max(0, self.num_blocks - self.load.free_blocks - self.load.cached_blocks)


class EventKind(StrEnum):
    CHANGED = "changed"  # `stored` and `removed` are all that happened; both may be empty: a sign of life
    RELOAD = "reload"  # the record or the whole set of blocks is news: read them. Announced without hashes
    LEFT = "left"  # the worker took itself out


@dataclass(frozen=True, slots=True)
class DirectoryEvent:
    """A step in the life of one incarnation. `sequence` grows by one per event, so that a missing one shows.

    `stored`: blocks that are in another tier than before, by the one they are in now. `removed`: in none any more.
    """

    worker_id: str
    incarnation: str
    sequence: int
    stored: Mapping[bytes, Tier] = field(default_factory=dict)
    removed: tuple[bytes, ...] = ()
    kind: EventKind = EventKind.CHANGED
    shares: tuple[RouterShare, ...] | None = None  # of the worker's load, where they changed


_RECORD = TypeAdapter(WorkerRecord)
_SHARES = TypeAdapter(tuple[RouterShare, ...])
_TIER_BYTES = {tier: bytes([tier]) for tier in Tier}


def record_to_json(record: WorkerRecord) -> bytes:
    return _RECORD.dump_json(record)


def record_from_json(data: bytes, worker_id: str, incarnation: str) -> WorkerRecord | None:
    """The record stored for this worker and incarnation; None, with a log line, if it is not one."""
    try:
        record = _RECORD.validate_json(data)
    except ValidationError as error:
        fields = sorted({".".join(map(str, each["loc"])) or "record" for each in error.errors()})
        log.warning("worker record ignored", worker=worker_id, unreadable=fields)
        return None
    if (record.worker_id, record.incarnation) != (worker_id, incarnation):
        log.warning("worker record ignored", worker=worker_id, unreadable=["worker_id", "incarnation"])
        return None
    return record


def event_to_fields(event: DirectoryEvent) -> dict[str, bytes]:
    """Short names and joined digests: this is what the stream holds thousands of. RELOAD carries no digests."""
    fields = {
        "w": event.worker_id.encode(),
        "i": event.incarnation.encode(),
        "n": str(event.sequence).encode(),
        "k": event.kind.encode(),
    }
    if event.kind is EventKind.CHANGED:
        fields["s"] = join_entries(event.stored)
        fields["r"] = b"".join(event.removed)
    if event.shares is not None:
        fields["l"] = _SHARES.dump_json(event.shares)
    return fields


def event_from_fields(fields: Mapping[bytes, bytes]) -> DirectoryEvent | None:
    """None, with a log line, for what is not an event of ours."""
    try:
        return DirectoryEvent(
            worker_id=fields[b"w"].decode(),
            incarnation=fields[b"i"].decode(),
            sequence=int(fields[b"n"]),
            stored=_entries(fields.get(b"s", b"")),
            removed=_digests(fields.get(b"r", b"")),
            kind=EventKind(fields[b"k"].decode()),
            shares=_SHARES.validate_json(fields[b"l"]) if b"l" in fields else None,
        )
    except (KeyError, ValueError) as error:
        log.warning("directory event ignored", reason=repr(error))
        return None


def join_entries(blocks: Mapping[bytes, Tier]) -> bytes:
    """ENTRY_BYTES each."""
    return b"".join([digest + _TIER_BYTES[tier] for digest, tier in blocks.items()])


def read_entry(entry: bytes) -> tuple[bytes, Tier]:
    """Raises ValueError for what is not an entry."""
    if len(entry) != ENTRY_BYTES:
        raise ValueError(f"{len(entry)} bytes are not an entry of {ENTRY_BYTES}")
    return entry[:DIGEST_BYTES], Tier(entry[DIGEST_BYTES])


def _entries(joined: bytes) -> dict[bytes, Tier]:
    return dict(read_entry(entry) for entry in _pieces(joined, ENTRY_BYTES))


def _digests(joined: bytes) -> tuple[bytes, ...]:
    return tuple(_pieces(joined, DIGEST_BYTES))


def _pieces(joined: bytes, width: int) -> list[bytes]:
    if len(joined) % width:
        raise ValueError(f"{len(joined)} bytes are not whole pieces of {width}")
    return [joined[start : start + width] for start in range(0, len(joined), width)]
