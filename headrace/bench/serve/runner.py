"""Asks what a plan says when it is due, whatever the answers so far take (open loop), or a fixed number of
conversations at once (closed loop). Looks at its own punctuality all the while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from headrace.bench.serve.answers import Answer, Question
from headrace.bench.serve.content import Vocabulary
from headrace.bench.serve.endpoint import Endpoint
from headrace.bench.serve.records import Moments, RequestRecord
from headrace.bench.serve.workload import Conversation, Plan, Turn
from headrace.clock import Clock

_Limit = AbstractAsyncContextManager[Any]
_LEAD_S = 0.05  # from the start to the first request, so that not even that is late
_BEAT_S = 0.02


@dataclass(slots=True)
class Runner:
    """One run. `records` fills up as requests end, so a run that is cut short leaves what it has."""

    endpoint: Endpoint
    vocabulary: Vocabulary
    clock: Clock
    run_id: str  # begins the ids of requests
    max_in_flight: int | None = None  # what waits for this counts as waiting
    on_record: Callable[[RequestRecord], None] = lambda _: None
    records: list[RequestRecord] = field(default_factory=list[RequestRecord])
    stalls_s: list[float] = field(default_factory=list[float])  # by how much each beat of the loop came late
    _start_s: float = 0.0

    async def run(self, plan: Plan) -> None:
        limit = asyncio.Semaphore(self.max_in_flight) if self.max_in_flight else nullcontext()
        expected = iter(plan.bounds().by_request)
        cached = [[next(expected) for _ in conversation.turns] for conversation in plan.conversations]
        self._start_s = self.clock.now() + _LEAD_S
        beat = asyncio.create_task(self._beat())
        try:
            async with asyncio.TaskGroup() as group:
                if plan.concurrency is None:
                    await self._open_loop(plan, cached, group, limit)
                else:
                    numbers = iter(range(len(plan.conversations)))
                    for _ in range(plan.concurrency):
                        group.create_task(self._closed_loop(plan, cached, numbers, limit))
        finally:
            beat.cancel()

    async def _open_loop(
        self, plan: Plan, cached: Sequence[list[int]], group: asyncio.TaskGroup, limit: _Limit
    ) -> None:
        for number, conversation in enumerate(plan.conversations):
            talk = _Talk(number, conversation, cached[number])
            question = self._question(talk, 0)  # made before it is due
            due_s = self._start_s + conversation.at_s
            await self._until(due_s)
            group.create_task(self._talk(talk, question, due_s, limit))

    async def _closed_loop(
        self, plan: Plan, cached: Sequence[list[int]], numbers: Iterator[int], limit: _Limit
    ) -> None:
        await self._until(self._start_s)
        for number in numbers:
            talk = _Talk(number, plan.conversations[number], cached[number])
            due_s = self.clock.now()
            await self._talk(talk, self._question(talk, 0), due_s, limit)

    async def _talk(self, talk: _Talk, question: Question, due_s: float, limit: _Limit) -> None:
        for position, turn in enumerate(talk.conversation.turns):
            if position:
                due_s = self.clock.now() + turn.think_s
                question = self._question(talk, position)
                await self._until(due_s)
            answer = await self._ask(talk, position, question, due_s, limit)
            if answer.status != "ok":
                return
            talk.answers.append(answer)

    async def _ask(
        self, talk: _Talk, position: int, question: Question, due_s: float, limit: _Limit
    ) -> Answer:
        answer = Answer(self.clock)
        moments = Moments(self._start_s, due_s, self.clock.now())
        async with limit:
            answer.sent_s = self.clock.now()
            await self.endpoint.ask(question, answer)
            answer.end_s = self.clock.now()
        place = (question.request_id, talk.number, position)
        turn = talk.conversation.turns[position]
        record = RequestRecord.of(answer, turn, moments, place, talk.expected_cached[position])
        self.records.append(record)
        self.on_record(record)
        return answer

    def _question(self, talk: _Talk, position: int) -> Question:
        turn = talk.conversation.turns[position]
        prompt = self._tokens(talk, turn) if self.endpoint.takes_tokens else self._messages(talk, turn)
        name, is_last = f"{self.run_id}-{talk.number}", position == len(talk.conversation.turns) - 1
        return Question(f"{name}-{position}", name, prompt, turn.output_tokens, needs_token_ids=not is_last)

    def _tokens(self, talk: _Talk, turn: Turn) -> list[int]:
        """What was answered goes in where the endpoint told its tokens."""
        token_ids: list[int] = []
        for piece in turn.pieces:
            given = talk.answers[piece.answer_to].token_ids if piece.answer_to is not None else []
            token_ids += given or self.vocabulary.token_ids(piece)
        return token_ids

    def _messages(self, talk: _Talk, turn: Turn) -> list[tuple[str, str]]:
        """What lies between two answers is one message, of the user."""
        messages: list[tuple[str, str]] = []
        said: list[str] = []
        for piece in turn.pieces:
            if piece.answer_to is None:
                said.append(self.vocabulary.text(piece))
                continue
            messages += [("user", " ".join(said)), ("assistant", talk.answers[piece.answer_to].text)]
            said = []
        return [*messages, ("user", " ".join(said))]

    async def _until(self, due_s: float) -> None:
        await asyncio.sleep(max(0.0, due_s - self.clock.now()))

    async def _beat(self) -> None:
        while True:
            due_s = self.clock.now() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            self.stalls_s.append(self.clock.now() - due_s)


@dataclass(slots=True)
class _Talk:
    """A conversation under way."""

    number: int
    conversation: Conversation
    expected_cached: list[int]  # of each turn
    answers: list[Answer] = field(default_factory=list[Answer])
