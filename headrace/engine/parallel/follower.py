"""What a rank other than 0 does: what rank 0 says, message after message, until one of the two is gone."""

from __future__ import annotations

import structlog

from headrace.engine.forward import EagerForward
from headrace.engine.kv_memory import KvMemory
from headrace.engine.parallel.group import Group, GroupBroken
from headrace.engine.parallel.link import Failure, Link, LinkClosed, pack_reply
from headrace.engine.parallel.messages import Kind, kind_of, numbers_of, unpack_step, unpack_write

log = structlog.get_logger()


class Follower:
    def __init__(self, link: Link, forward: EagerForward, memory: KvMemory, group: Group) -> None:
        self._link = link
        self._forward = forward
        self._memory = memory
        self._group = group

    def run(self) -> None:
        """Returns when rank 0 is gone. Raises what made this rank fail, after telling rank 0."""
        while True:
            try:
                message = self._link.receive()
            except LinkClosed:
                return
            try:
                self._do(message)
            except LinkClosed:
                return
            except GroupBroken as error:
                self._fail(str(error), is_own=False)
                raise
            except Exception as error:
                self._fail(repr(error), is_own=True)
                raise

    def _do(self, message: bytes) -> None:
        match kind_of(message):
            case Kind.STEP:
                batch, rows = unpack_step(message, self._forward.block_size_tokens)
                self._forward.run_batch(batch)
                if rows:
                    self._group.gather_logits(self._forward.logits(rows))
            case Kind.LOGITS:
                self._group.gather_logits(self._forward.logits(numbers_of(message)))
            case Kind.COPY:
                numbers = iter(numbers_of(message))
                for source_id, target_id in zip(numbers, numbers, strict=True):
                    self._memory.copy(source_id, target_id)
                self._link.send(pack_reply())
            case Kind.READ:
                self._link.send(pack_reply(self._memory.read(*numbers_of(message))))
            case Kind.WRITE:
                self._memory.write(*unpack_write(message))
                self._link.send(pack_reply())

    def _fail(self, text: str, *, is_own: bool) -> None:
        log.error("rank gives up", rank=self._group.shard.rank, error=text)
        try:
            self._link.send(pack_reply(Failure(text, is_own)))
        except LinkClosed:
            log.warning("rank 0 is gone")
