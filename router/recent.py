"""The latest answers, for whoever watches: who gave them, how fast, and what they found and moved. A bounded window."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from headrace.rpc.v1 import worker_pb2
from router.policy.views import Plan
from router.request_run import Progress

WINDOW_S = 300.0
_MAX_ANSWERS = 2048


@dataclass(frozen=True, slots=True)
class Answered:
    """One request that came to its end. Workers by id."""

    at_s: float  # by the monotonic clock
    prefill_worker: str  # the decode worker where it prefilled itself
    decode_worker: str
    ttft_s: float  # from arrival, as the router saw it
    itl_s: float | None  # mean of the longest choice, as the worker saw it; None: it had one token
    prompt_tokens: int
    predicted_tokens: int  # of the prompt: predicted to be cached where it is prefilled
    cached_tokens: int | None  # found there, by the worker's report; None: it sent none
    bytes_moved: int
    transfer_s: float  # sum over READs
    failed_workers: tuple[str, ...]  # that were asked to prefill before the one that did


class RecentAnswers:
    """Used on the event loop only."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.num_output_tokens = 0  # given out since the start, those of unfinished answers too
        self._now = now
        self._answers: deque[Answered] = deque(maxlen=_MAX_ANSWERS)

    def ended(self, progress: Progress, end: worker_pb2.SequenceEnd, num_prompt_tokens: int) -> None:
        """An empty `end`: the worker did not report in time, and nothing is known of caches and transfers."""
        plan = progress.plan
        if plan is None:
            return
        answered = Answered(
            at_s=self._now(),
            prefill_worker=end.prefill_worker or plan.decode.worker_id,
            decode_worker=plan.decode.worker_id,
            ttft_s=progress.first_token_at - progress.arrived_at,
            itl_s=end.decode_s / end.decode_tokens if end.decode_tokens else None,
            prompt_tokens=num_prompt_tokens,
            predicted_tokens=plan.predicted_cached_tokens,
            cached_tokens=min(end.cached_tokens, num_prompt_tokens) if end.ByteSize() else None,
            bytes_moved=end.bytes_moved,
            transfer_s=end.transfer_s,
            failed_workers=_failed(plan, end),
        )
        self._answers.append(answered)

    def answers(self) -> list[Answered]:
        """Those of the last `WINDOW_S`, oldest first; the last 2048 at most."""
        since_s = self._now() - WINDOW_S
        while self._answers and self._answers[0].at_s < since_s:
            self._answers.popleft()
        return list(self._answers)


def _failed(plan: Plan, end: worker_pb2.SequenceEnd) -> tuple[str, ...]:
    """Prefill workers are asked in the plan's order."""
    return tuple(worker.worker_id for worker in plan.prefill[: end.failed_attempts])
