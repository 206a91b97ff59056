"""Whether a request that came now would be answered: workers that fit are there, and tokens have come from one lately.

    no decode worker ─▶ not ready
    a token within the interval ─▶ ready
    else: a self-test, an answer of two tokens that comes the way of all others ─┬─ arrived ─▶ ready
                                                                                 └─ failed ──▶ not ready, and again
Liveness is another question: the event loop turns, or nobody would answer it.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable

import structlog

from headrace.errors import HeadraceError
from headrace.priority import MIN_PRIORITY
from headrace.sampling_params import SamplingParams
from headrace.tracing import NOT_SAMPLED, Span
from router.dispatch import Dispatcher
from router.request_run import Phase, Progress, RequestRun
from router.requests import GenerationRequest, ServedModel
from router.tally import Tally

log = structlog.get_logger()

TEST_TIMEOUT_S = 10.0
_POLL_S = 0.1
_PAUSE_S = 1.0  # after a test that failed
_TEST_TOKENS = 2  # the first comes from the worker that prefills, the second from the one that decodes


class Readiness:
    """`run` as a task. Self-tests are nobody's requests: they pass by admission, and the tally does not count them."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: ServedModel,
        tally: Tally,
        interval_s: float,
        prompt_tokens: int,
    ) -> None:
        """`prompt_tokens`: of a self-test, as many as it takes for a hand-off, where workers have room for it."""
        self.ready = False
        self.self_tests: Counter[str] = Counter()  # by "ok" and "failed"
        self._dispatcher = dispatcher
        self._model = model
        self._tally = tally
        self._interval_s = interval_s
        self._prompt_tokens = prompt_tokens
        self._tested_at = -math.inf  # the last one that succeeded
        self._absent_at = (
            -math.inf
        )  # when there was last no worker: what others have shown before proves nothing
        self._next_test_at = -math.inf
        self._failed = False
        self._test: asyncio.Task[None] | None = None

    @property
    def progress_age_s(self) -> float:
        """Since the last message from a worker. Infinite before the first."""
        return time.monotonic() - self._progressed_at

    async def run(self, on_change: Callable[[bool], Awaitable[None]]) -> None:
        try:
            while True:
                now_ready = self._is_ready()
                if now_ready != self.ready:
                    self.ready = now_ready
                    log.info("router readiness", ready=now_ready)
                    await on_change(now_ready)
                await asyncio.sleep(_POLL_S)
        finally:
            if self._test is not None:
                self._test.cancel()
                await asyncio.gather(self._test, return_exceptions=True)

    @property
    def _progressed_at(self) -> float:
        return max(self._tally.progressed_at or -math.inf, self._tested_at)

    def _is_ready(self) -> bool:
        now = time.monotonic()
        if not self._dispatcher.smallest_capacity_tokens():
            self._absent_at, self._next_test_at = now, -math.inf
            return False
        if self._progressed_at > self._absent_at and now - self._progressed_at <= self._interval_s:
            self._failed = False
            return True
        if now >= self._next_test_at and (self._test is None or self._test.done()):
            self._test = asyncio.create_task(self._self_test(), name="self-test")
        return self.ready and not self._failed  # as before, while the test is under way

    async def _self_test(self) -> None:
        try:
            async with asyncio.timeout(TEST_TIMEOUT_S):
                await self._answer()
        except (HeadraceError, TimeoutError) as error:
            self._note_failure(str(error) or f"no answer within {TEST_TIMEOUT_S:g} s")
        except Exception:  # the readiness of a router does not hang on what nobody thought of
            log.exception("self-test failed unexpectedly")
            self._note_failure("unexpected error")
        else:
            self.self_tests["ok"] += 1
            self._tested_at = time.monotonic()

    def _note_failure(self, error: str) -> None:
        log.warning("self-test failed", error=error)
        self.self_tests["failed"] += 1
        self._failed = True
        self._next_test_at = time.monotonic() + _PAUSE_S

    async def _answer(self) -> None:
        progress = Progress(span=Span(NOT_SAMPLED))
        run = RequestRun(self._request(), self._model.tokenizer, self._dispatcher, progress)
        try:
            while run.phase is not Phase.ENDED:
                await run.advance()
        finally:
            run.close()

    def _request(self) -> GenerationRequest:
        """With a prompt that nobody has cached, or it would not be computed."""
        limit = min(self._dispatcher.smallest_capacity_tokens(), self._model.max_model_tokens)
        num_tokens = max(1, min(self._prompt_tokens, limit // 2))
        vocab_size = self._model.tokenizer.vocab_size
        identity = uuid.uuid4().hex
        return GenerationRequest(
            id=identity,
            label=f"self-test-{identity}",
            token_ids=[random.randrange(vocab_size) for _ in range(num_tokens)],
            sampling=SamplingParams(max_tokens=_TEST_TOKENS, temperature=0.0, ignore_eos=True),
            open_ended=False,
            cache_salt="",
            timeout_s=TEST_TIMEOUT_S,
            priority=MIN_PRIORITY,
        )
