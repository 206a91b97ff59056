"""Cached blocks on disk, one file each. Survives a restart. Used by the block pool; built by composition roots.

    engine's thread    put ─▶ queue (bounded) ─▶ writer thread ─▶ temporary file ─▶ rename
                       take ◀── file, checked            └─▶ done or failed ─▶ drain_lost

The index belongs to the engine's thread; the writer touches files alone. What waits to be written can be taken already.
A file that is not exactly what was written is deleted, counted, and never used. Where writing fails the tier switches
itself off: its blocks are no longer found, serving goes on.

    file:  magic 8 | layout 16 | block hash 16 | bytes of the block u64 | xxh3-64 of them u64 | the block
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import queue
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import structlog
import xxhash

from headrace.block_hash import DIGEST_BYTES
from headrace.engine.tiers import TierStats
from headrace.tier import Tier

log = structlog.get_logger()

_HEADER = struct.Struct(f"<8s{DIGEST_BYTES}s{DIGEST_BYTES}sQQ")
_MAGIC = b"hrblock1"
_SUFFIX = ".kv"
_MAX_QUEUED_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What has to be equal for a block's bytes to mean the same."""

    model_fingerprint: str
    dtype: str
    block_size_tokens: int
    block_bytes: int
    num_ranks: int = 1  # whose slices follow each other in a block

    def digest(self) -> bytes:
        fields = dataclasses.astuple(self)
        return hashlib.sha256(repr(("headrace.disk.v2", *fields)).encode()).digest()[:DIGEST_BYTES]


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    digest: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class _Delete:
    digest: bytes


class DiskTier:
    """Implements `BlockFiles` in `root/<layout>`. One process at a time; others that come find it switched off."""

    def __init__(self, root: Path, layout: BlockLayout, max_bytes: int) -> None:
        self._directory = root.expanduser() / layout.digest().hex()
        self._layout = layout
        self._layout_digest = layout.digest()
        file_bytes = _HEADER.size + layout.block_bytes
        self._max_blocks = max_bytes // file_bytes
        self._max_queued = max(1, _MAX_QUEUED_BYTES // layout.block_bytes)
        self._index: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._queued: dict[bytes, _Write] = {}  # the latest for each block
        self._num_queued = 0
        self._lost: list[bytes] = []
        self._is_on = False
        self._hits = self._stores = self._evictions = self._dropped = self._failures = 0
        self._lock: BinaryIO | None = None
        # Writes are bounded by `_max_queued`, deletions by the index.
        self._tasks: queue.SimpleQueue[_Write | _Delete | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[_Write | _Delete, OSError | None]] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="disk tier", daemon=True)
        self._open()
        self._writer.start()

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for that long at most, and leave the directory to others."""
        self._tasks.put(None)
        self._writer.join(timeout_s)
        if self._writer.is_alive():
            log.error("disk tier did not finish writing in time", seconds=timeout_s)
        elif self._lock is not None:
            self._lock.close()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._index

    def digests(self) -> list[bytes]:
        return list(self._index)

    def put(self, digest: bytes, data: bytes) -> None:
        assert len(data) == self._layout.block_bytes
        self._collect()
        if not self._is_on:
            return
        if self._num_queued >= self._max_queued or not self._max_blocks:
            self._dropped += 1
            return
        while len(self._index) >= self._max_blocks:
            oldest = next(iter(self._index))
            self._forget(oldest)
            self._evictions += 1
            self._tasks.put(_Delete(oldest))
        write = _Write(digest, data)
        self._index[digest] = None
        self._queued[digest] = write
        self._num_queued += 1
        self._tasks.put(write)

    def take(self, digest: bytes) -> bytearray | None:
        if digest not in self._index:
            return None
        queued = self._queued.get(digest)
        if queued is not None:
            data = bytearray(queued.data)
        else:
            try:
                data = self._read(digest)
            except (OSError, ValueError) as error:
                self._reject(digest, error)
                return None
        self._hits += 1
        self.touch(digest)
        return data

    def touch(self, digest: bytes) -> None:
        if digest in self._index:
            self._index.move_to_end(digest)

    def clear(self) -> None:
        for digest in self._index:
            self._tasks.put(_Delete(digest))
        self._index.clear()

    def drain_lost(self) -> list[bytes]:
        self._collect()
        lost, self._lost = self._lost, []
        return lost

    def stats(self) -> TierStats:
        return TierStats(
            tier=Tier.DISK,
            blocks=len(self._index),
            bytes=len(self._index) * (_HEADER.size + self._layout.block_bytes),
            hits=self._hits,
            stores=self._stores,
            evictions=self._evictions,
            dropped=self._dropped,
            checksum_failures=self._failures,
        )

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Take the directory and find what an earlier process left in it."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = (self._directory / "lock").open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = sorted(self._files())
        except OSError as error:
            log.error("disk tier switched off", directory=str(self._directory), reason=str(error))
            return
        self._is_on = True
        for _, digest in found[: max(0, len(found) - self._max_blocks)]:
            self._tasks.put(_Delete(digest))
        self._index.update((digest, None) for _, digest in found[max(0, len(found) - self._max_blocks) :])
        log.info("disk tier", directory=str(self._directory), blocks=len(self._index))

    def _files(self) -> Iterator[tuple[int, bytes]]:
        """Time of the last change in ns, and block hash, of each file; deletes what a crash left half-written."""
        for path in self._directory.glob("??/*"):
            if path.suffix != _SUFFIX:
                path.unlink(missing_ok=True)
                continue
            try:
                digest = bytes.fromhex(path.stem)
            except ValueError:
                continue
            if len(digest) == DIGEST_BYTES:
                yield path.stat().st_mtime_ns, digest

    def _read(self, digest: bytes) -> bytearray:
        """Raises ValueError for a file that is not this block as it was written, OSError if it can not be read."""
        with self._path(digest).open("rb", buffering=0) as file:
            header = file.read(_HEADER.size)
            data = bytearray(self._layout.block_bytes)
            num_bytes = file.readinto(data)
            if len(header) != _HEADER.size or num_bytes != len(data) or file.read(1):
                raise ValueError("its length is wrong")
        magic, layout, name, num_bytes, checksum = _HEADER.unpack(header)
        if (magic, layout, name, num_bytes) != (_MAGIC, self._layout_digest, digest, len(data)):
            raise ValueError("it is another block, or of another layout")
        if xxhash.xxh3_64_intdigest(data) != checksum:
            raise ValueError("its checksum is wrong")
        os.utime(self._path(digest))  # the order of use outlives the process
        return data

    def _reject(self, digest: bytes, error: OSError | ValueError) -> None:
        self._failures += 1
        log.error("block on disk not used", file=str(self._path(digest)), reason=str(error))
        self._forget(digest)
        self._tasks.put(_Delete(digest))

    def _forget(self, digest: bytes) -> None:
        del self._index[digest]
        self._queued.pop(digest, None)
        self._lost.append(digest)

    def _collect(self) -> None:
        """What the writer has done since."""
        while True:
            try:
                task, error = self._done.get_nowait()
            except queue.Empty:
                return
            if isinstance(task, _Write):
                self._num_queued -= 1
                self._stores += error is None and self._is_on
                if self._queued.get(task.digest) is task:
                    del self._queued[task.digest]
            if error is not None and self._is_on:
                self._is_on = False
                log.error("disk tier switched off", directory=str(self._directory), reason=str(error))
                for digest in list(self._index):
                    self._forget(digest)

    # --- the writer's thread ----------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        has_failed = False
        while (task := self._tasks.get()) is not None:
            error = None
            try:
                if isinstance(task, _Delete):
                    self._path(task.digest).unlink(missing_ok=True)
                elif not has_failed:
                    self._write(task)
            except OSError as caught:  # disk full, read-only, gone
                error, has_failed = caught, True
            self._done.put((task, error))

    def _write(self, task: _Write) -> None:
        path = self._path(task.digest)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(".tmp")
        checksum = xxhash.xxh3_64_intdigest(task.data)
        header = _HEADER.pack(_MAGIC, self._layout_digest, task.digest, len(task.data), checksum)
        try:
            with temporary.open("wb") as file:
                file.write(header)
                file.write(task.data)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._directory / name[:2] / f"{name}{_SUFFIX}"
