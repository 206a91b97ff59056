"""Rank 0's side: what an engine uses as its forward pass, its runner and its memory, spread over the ranks.

Nothing is undone when a rank is lost: whatever was under way fails with RankLost, and so does all that comes later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import structlog
import torch

from headrace.engine.attention.base import StepBatch
from headrace.engine.forward import EagerForward
from headrace.engine.kv_memory import KvMemory
from headrace.engine.parallel.group import Group, GroupBroken
from headrace.engine.parallel.link import Failure, Link, LinkClosed, unpack_reply
from headrace.engine.parallel.messages import Kind, pack_step, pack_write, packed
from headrace.engine.sequence import ChunkResult, StepPlan
from headrace.engine.torch_runner import TorchRunner
from headrace.errors import RankLost

log = structlog.get_logger()

_REPORT_S = 2.0  # after a failure, the others say within this time what they know


@dataclass(frozen=True, slots=True)
class Rank:
    """Another rank, as rank 0 sees it. `ended(timeout_s)` says how its process ended, if it does in that time."""

    number: int
    link: Link
    ended: Callable[[float], str | None]


class Ranks:
    """All others. Used on the engine's thread. `on_lost` is told once, on that thread."""

    def __init__(
        self, others: Sequence[Rank], group: Group, timeout_s: float, on_lost: Callable[[RankLost], None]
    ) -> None:
        self.group = group
        self._others = others
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._lost: RankLost | None = None

    @property
    def size(self) -> int:
        return 1 + len(self._others)

    @property
    def sent_bytes(self) -> int:
        """To each of the others, since the start."""
        return max(rank.link.sent_bytes for rank in self._others)

    @property
    def num_messages(self) -> int:
        return max(rank.link.num_sent for rank in self._others)

    @contextmanager
    def together(self, *messages: bytes) -> Generator[None]:
        """Tell the others, each its own or all the same; within the block, do your own part. Raises RankLost for
        whatever goes wrong: the ranks do not do the same any more.
        """
        if self._lost is not None:
            raise self._lost
        each = messages if len(messages) > 1 else messages * len(self._others)
        try:
            for rank, message in zip(self._others, each, strict=True):
                rank.link.send(message, self._timeout_s)
            yield
        except Exception as error:  # see above
            self._lost = blamed(self._others, error, self._timeout_s)
            log.critical("a rank is lost", error=str(self._lost), exc_info=error)
            self._on_lost(self._lost)
            raise self._lost from error

    def replies(self) -> list[bytes]:
        """Within `together`: that of each other rank, once it has done what it was told."""
        found: list[bytes] = []
        for rank in self._others:
            reply = unpack_reply(rank.link.receive(self._timeout_s))
            if isinstance(reply, Failure):
                raise _Reported(rank.number, reply)
            found.append(reply)
        return found


class _Reported(Exception):
    def __init__(self, number: int, failure: Failure) -> None:
        super().__init__(failure.text)
        self.number = number
        self.failure = failure


class _Guilt(IntEnum):
    """The least is named."""

    FAILED = 0  # by itself
    DIED = 1
    SILENT = 2
    LET_DOWN = 3  # by another one


def blamed(others: Sequence[Rank], error: Exception, timeout_s: float) -> RankLost:
    """Who is to blame that `error` came up at rank 0, where something was waited for `timeout_s`."""
    if not isinstance(error, (GroupBroken, LinkClosed, TimeoutError, _Reported)):
        return RankLost(f"rank 0 failed: {error!r}")
    deadline = time.monotonic() + _REPORT_S
    _, number, text = min(_state(rank, error, deadline, timeout_s) for rank in others)
    return RankLost(f"rank {number} {text}")


def _state(rank: Rank, error: Exception, deadline: float, timeout_s: float) -> tuple[_Guilt, int, str]:
    if isinstance(error, _Reported) and error.number == rank.number:
        return _judged(rank, error.failure)
    try:
        while True:
            reply = unpack_reply(rank.link.receive(max(0.01, deadline - time.monotonic())))
            if isinstance(reply, Failure):
                return _judged(rank, reply)
    except LinkClosed:
        how = rank.ended(max(0.01, deadline - time.monotonic()))
        return _Guilt.DIED, rank.number, how or "is gone"
    except TimeoutError:
        if how := rank.ended(0.0):
            return _Guilt.DIED, rank.number, how
        return _Guilt.SILENT, rank.number, f"did not answer within {timeout_s:g} s"


def _judged(rank: Rank, failure: Failure) -> tuple[_Guilt, int, str]:
    guilt = _Guilt.FAILED if failure.is_own else _Guilt.LET_DOWN
    return guilt, rank.number, f"failed: {failure.text}"


class ParallelForward:
    """Implements `ForwardPass`, with rank 0's shard."""

    def __init__(self, ranks: Ranks, own: EagerForward, vocab_size: int) -> None:
        self._ranks = ranks
        self._own = own
        self._vocab_size = vocab_size
        self._known: list[int] = []  # rows whose logits came with the step
        self._logits_NV = torch.empty(0)

    def run(self, plan: StepPlan) -> list[int]:
        """Raises IndexError for a token that the model does not have, before anybody is told; RankLost."""
        batch = StepBatch.of(plan, self._own.block_size_tokens)
        lowest, highest = batch.token_ids_T.aminmax()
        if lowest < 0 or highest >= self._vocab_size:
            raise IndexError(f"token ids from {lowest} to {highest}, of {self._vocab_size} tokens")
        last_rows = [span.rows.stop - 1 for span in batch.spans]
        self._known = [row for row, chunk in zip(last_rows, plan.chunks, strict=True) if chunk.samples]
        with self._ranks.together(pack_step(batch, self._known)):
            self._own.run_batch(batch)
            if self._known:
                self._logits_NV = self._gathered(self._known)
        return last_rows

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        wanted = list(rows)
        if wanted == self._known:
            return self._logits_NV
        if set(wanted) <= set(self._known):
            return self._logits_NV[[self._known.index(row) for row in wanted]]
        with self._ranks.together(packed(Kind.LOGITS, wanted)):
            return self._gathered(wanted)

    def _gathered(self, rows: list[int]) -> torch.Tensor:
        return self._ranks.group.gather_logits(self._own.logits(rows))


class ParallelRunner:
    """Implements `ModelRunner`: `own` runs with a `ParallelForward`, and copies blocks of rank 0."""

    def __init__(self, ranks: Ranks, own: TorchRunner) -> None:
        self._ranks = ranks
        self._own = own

    def run(self, plan: StepPlan) -> list[ChunkResult]:
        return self._own.run(plan)

    def warm_up(self, max_step_tokens: int) -> None:
        self._own.warm_up(max_step_tokens)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        with self._ranks.together(packed(Kind.COPY, [block_id for pair in pairs for block_id in pair])):
            self._own.copy_blocks(pairs)
            self._ranks.replies()


class ParallelMemory:
    """Implements `BlockMemory`: each rank has its slice of each block. Bytes of a block: rank after rank."""

    def __init__(self, ranks: Ranks, own: KvMemory) -> None:
        self.block_bytes = own.block_bytes * ranks.size
        self.num_host_blocks = own.num_host_blocks
        self._ranks = ranks
        self._own = own

    def copy(self, source_id: int, target_id: int) -> None:
        with self._ranks.together(packed(Kind.COPY, (source_id, target_id))):
            self._own.copy(source_id, target_id)
            self._ranks.replies()

    def read(self, block_id: int) -> bytes:
        with self._ranks.together(packed(Kind.READ, (block_id,))):
            return b"".join((self._own.read(block_id), *self._ranks.replies()))

    def write(self, block_id: int, data: bytearray) -> None:
        each = self._own.block_bytes
        own, *others = (memoryview(data)[i : i + each] for i in range(0, len(data), each))
        with self._ranks.together(*(pack_write(block_id, part) for part in others)):
            self._own.write(block_id, bytearray(own))
            self._ranks.replies()
