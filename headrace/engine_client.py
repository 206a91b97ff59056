"""asyncio's side of the engine: commands go in from the event loop, events come out to whoever subscribed.

The engine thread calls `deliver` once per step; it wakes the event loop once, however many sequences the step had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from headrace.engine.engine import Engine
from headrace.engine.engine_thread import EngineThread
from headrace.engine.scheduler import Share
from headrace.engine.sequence import Constraint, Event, Sequence, StepOutput
from headrace.errors import AlreadyExists, InvalidRequest
from headrace.grammar import Grammar
from headrace.model_config import ModelConfig
from headrace.sampling_params import check_token_ids, validate
from headrace.tier import Tier

T = TypeVar("T")


class EngineClient:
    """Used on the event loop's thread only, `deliver` excepted."""

    def __init__(
        self,
        engine: Engine,
        config: ModelConfig,
        compile_grammar: Callable[[Grammar], Constraint],
        on_cache_change: Callable[[dict[bytes, Tier], list[bytes]], None],
        on_arrival: Callable[[], None] = lambda: None,
    ) -> None:
        """`compile_grammar` is called on other threads; it may block for a bounded time, and raises HeadraceErrors.

        `on_cache_change(stored, removed)` gets the block hashes of each step as in a StepOutput, on the event loop;
        `on_arrival()` is called for each sequence that is submitted.
        """
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._compile_grammar = compile_grammar
        self._on_cache_change = on_cache_change
        self._on_arrival = on_arrival
        self._engine = engine
        self._arriving: dict[str, Sequence] = {}
        self._subscribers: dict[str, Callable[[Event], None]] = {}
        self._after_step: list[Callable[[], None]] = []
        self.thread = EngineThread(engine, self._wake)

    async def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises InvalidRequest, Overloaded or AlreadyExists."""
        await self._prepare(sequence)
        # The engine takes it in between two steps, and a step can be long.
        self._arriving[sequence.id] = sequence
        self._on_arrival()
        try:
            await self.call(lambda engine: engine.submit(sequence))
        finally:
            self._arriving.pop(sequence.id, None)

    def shares(self) -> dict[str, Share]:
        """Of the load, by the sequences' `origin`; what the engine has not taken in yet is in it."""
        return self._engine.shares(list(self._arriving.values()))

    async def reserve(self, sequence: Sequence) -> None:
        """Queue a sequence whose KV comes from outside. Raises as `submit`."""
        await self._prepare(sequence)
        await self.call(lambda engine: engine.reserve(sequence))

    def post(self, command: Callable[[Engine], object]) -> None:
        """Run `command` on the engine's thread, in order with other commands; its result is not waited for."""
        self.thread.post(command)

    async def call(self, command: Callable[[Engine], T]) -> T:
        """Run `command` on the engine's thread and return its result, or raise what it raised."""
        return await asyncio.wrap_future(self.thread.call(command))

    @contextmanager
    def subscribed(self, sequence_id: str, on_event: Callable[[Event], None]) -> Generator[None]:
        """Within the block, `on_event` gets the sequence's events. Subscribe before the sequence is submitted.

        Raises AlreadyExists where somebody else gets them.
        """
        if sequence_id in self._subscribers:
            raise AlreadyExists(f"sequence {sequence_id} is running or waiting")
        self._subscribers[sequence_id] = on_event
        try:
            yield
        finally:
            del self._subscribers[sequence_id]

    def after_step(self, callback: Callable[[], None]) -> None:
        """`callback` runs once after each step's events were given out."""
        self._after_step.append(callback)

    async def _prepare(self, sequence: Sequence) -> None:
        """Nothing that can be refused gets into the engine."""
        self._check(sequence)
        grammar = sequence.sampling.grammar
        if grammar is not None:
            sequence.constraint = await asyncio.to_thread(self._compile_grammar, grammar)

    def _check(self, sequence: Sequence) -> None:
        """The engine's own guard: what the front door checked is checked again for whoever calls a worker directly."""
        if not sequence.token_ids:
            raise InvalidRequest("prompt", 0, "needs at least one token")
        check_token_ids("token_ids", sequence.token_ids, self._config.vocab_size)
        sequence.sampling = validate(
            sequence.sampling,
            num_prompt_tokens=sequence.num_prompt_tokens,
            max_model_tokens=self._config.max_model_tokens,
            vocab_size=self._config.vocab_size,
        )

    def _wake(self, output: StepOutput) -> None:
        """On the engine's thread."""
        self._loop.call_soon_threadsafe(self._deliver, output)

    def _deliver(self, output: StepOutput) -> None:
        for event in output.events:
            subscriber = self._subscribers.get(event.sequence_id)
            if subscriber is not None:
                subscriber(event)
        if output.stored or output.removed:
            self._on_cache_change(output.stored, output.removed)
        for callback in self._after_step:
            callback()
