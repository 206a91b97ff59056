"""An endpoint inside the event loop, for schedules in virtual time: one server, first come first served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.bench.serve.answers import Answer, Question
from headrace.bench.serve.endpoint import Served


class SimulatedLlm:
    """`service_s(question)`: until the first token, one question at a time; then a token every `gap_s`, which holds up
    nobody. `stall`: (from, to) in which no service begins.
    """

    takes_tokens = True

    def __init__(
        self,
        service_s: Callable[[Question], float],
        gap_s: float = 0.0,
        stall: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self._service_s = service_s
        self._gap_s = gap_s
        self._stall = stall
        self._server = asyncio.Lock()
        self.asked: list[tuple[float, Question]] = []
        self.most_at_once = 0
        self._at_once = 0

    async def served(self) -> Served:
        return Served("simulated", None, 1000)

    async def ask(self, question: Question, answer: Answer) -> None:
        now = asyncio.get_running_loop().time
        self.asked.append((now(), question))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        async with self._server:
            begin, end = self._stall
            if begin <= now() < end:
                await asyncio.sleep(end - now())
            await asyncio.sleep(self._service_s(question))
        for number in range(question.max_tokens):
            if number:
                await asyncio.sleep(self._gap_s)
            answer.receive(1)
            answer.token_ids.append(number)
        answer.prompt_tokens, answer.output_tokens = len(question.prompt), question.max_tokens
        answer.cached_tokens = 0
        self._at_once -= 1

    async def close(self) -> None:
        pass
