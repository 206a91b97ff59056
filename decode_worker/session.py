"""One router's session: the deltas of all its sequences, one frame per engine step.

A router that reads slowly gets fewer, fuller frames: what is pending merges per sequence, so memory is bounded by the
answers' own lengths.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from headrace.rpc.v1 import inference_pb2, worker_pb2


@dataclass(slots=True)
class HandOffReport:
    """How the KV of a request came here."""

    cached_tokens: int = 0
    prefill_worker: str = ""  # empty: prefilled here
    blocks_moved: int = 0
    bytes_moved: int = 0
    transfer_s: float = 0.0
    failed_attempts: int = 0


@dataclass(slots=True)
class End:
    finish_reason: str = ""
    error_code: str = ""
    error_message: str = ""


@dataclass(slots=True)
class _Delta:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    end: worker_pb2.SequenceEnd | None = None


class Session:
    """Used on the event loop only. `flush` after each engine step makes what was added visible as one frame."""

    def __init__(self, incarnation: str, transport: str) -> None:
        self._incarnation = incarnation
        self._transport = transport
        self._pending: dict[str, _Delta] = {}
        self._ready = asyncio.Event()

    def add_token(self, request_id: str, token_id: int, logprobs: inference_pb2.TokenLogprobs | None) -> None:
        delta = self._delta(request_id)
        delta.token_ids.append(token_id)
        if logprobs is not None:
            delta.logprobs.append(logprobs)

    def add_end(self, request_id: str, end: End, report: HandOffReport) -> None:
        self._delta(request_id).end = worker_pb2.SequenceEnd(
            finish_reason=end.finish_reason,
            error_code=end.error_code,
            error_message=end.error_message,
            cached_tokens=report.cached_tokens,
            prefill_worker=report.prefill_worker,
            blocks_moved=report.blocks_moved,
            bytes_moved=report.bytes_moved,
            transfer_s=report.transfer_s,
            transport=self._transport,
            failed_attempts=report.failed_attempts,
        )

    def flush(self) -> None:
        if self._pending:
            self._ready.set()

    async def frames(self) -> AsyncIterator[worker_pb2.StepFrame]:
        """The first frame says who is there; then one each time something is ready, as fast as the router reads."""
        yield worker_pb2.StepFrame(incarnation=self._incarnation)
        while True:
            await self._ready.wait()
            self._ready.clear()
            pending, self._pending = self._pending, {}
            yield worker_pb2.StepFrame(
                incarnation=self._incarnation,
                deltas=[
                    worker_pb2.SequenceDelta(
                        request_id=request_id,
                        token_ids=delta.token_ids,
                        end=delta.end,
                        logprobs=delta.logprobs,
                    )
                    for request_id, delta in pending.items()
                ],
            )

    def _delta(self, request_id: str) -> _Delta:
        return self._pending.setdefault(request_id, _Delta())
