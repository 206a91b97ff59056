"""The thread that owns an engine: commands go in through a queue, step outputs come out through one callback.

Others call `post`, `call` and `progress_age_s` from any thread; everything of the engine runs here. Between two steps
all queued commands run, in order. Without work the thread sleeps on the queue, for a bounded time, since holds expire
by the clock alone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from headrace.engine.block_pool import PoolAudit
from headrace.engine.engine import Engine
from headrace.engine.sequence import StepOutput
from headrace.errors import HeadraceError, InternalError, RankLost, Unavailable

log = structlog.get_logger()

T = TypeVar("T")

_IDLE_WAIT_S = 0.1  # how late a hold's expiry may be noticed
_AUDIT_WHEN_IDLE_S = 5.0  # the audit takes long in a large pool: once nobody has come for so long, …
_AUDIT_INTERVAL_S = 60.0  # … and again after this


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[Engine], Any]
    future: Future[Any] | None  # None: nobody waits for the result


class EngineThread:
    """`on_output` runs on the engine's thread, once per step that has something to report, and once before the model
    runs if something is known by then. It must not block.
    """

    def __init__(self, engine: Engine, on_output: Callable[[StepOutput], None]) -> None:
        self._engine = engine
        self._on_output = on_output
        # Not bounded itself: callers wait for `call`, and what is posted belongs to a sequence that was let in.
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._closing = threading.Lock()  # makes "not stopped yet, so queue it" one action
        self._stopped = False
        self._last_round_s = engine.clock.now()
        self._busy_at_s = engine.clock.now()
        self.last_audit: PoolAudit | None = None  # made when idle; read by anybody
        self._audited_at_s = float("-inf")
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        """Once. Commands that were queued before run first."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the loop after the step under way; waits for that at most `timeout_s`. Unanswered calls fail with
        Unavailable, sequences get no further event.
        """
        with self._closing:
            self._stopped = True
            self._commands.put(None)  # wakes the loop
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("engine thread did not stop in time", seconds=timeout_s)
        self._refuse_queued()

    def post(self, command: Callable[[Engine], object]) -> None:
        """Run `command` between two steps. What it raises is logged; after `stop` it is dropped."""
        self._enqueue(_Command(command, None))

    def call(self, command: Callable[[Engine], T]) -> Future[T]:
        """Run `command` between two steps; the future gets what it returns or raises."""
        future: Future[T] = Future()
        self._enqueue(_Command(command, future))
        return future

    def progress_age_s(self) -> float:
        """Seconds since the loop last went round. Idle it goes round all the time; it grows while a step hangs."""
        return self._engine.clock.now() - self._last_round_s

    def _enqueue(self, command: _Command) -> None:
        with self._closing:
            if not self._stopped:
                self._commands.put(command)
                return
        _refuse(command)

    def _loop(self) -> None:
        has_work = True
        while not self._stopped:
            self._last_round_s = self._engine.clock.now()
            self._run_commands(0.0 if has_work else _IDLE_WAIT_S)
            if not self._stopped:
                has_work = self._step()
                self._audit_if_idle()
        self._refuse_queued()

    def _audit_if_idle(self) -> None:
        now_s = self._engine.clock.now()
        if self._engine.is_busy:
            self._busy_at_s = now_s
        elif now_s - max(self._busy_at_s, self._audited_at_s + _AUDIT_INTERVAL_S) > _AUDIT_WHEN_IDLE_S:
            self._audited_at_s = now_s
            self.last_audit = self._engine.audit()

    def _run_commands(self, wait_s: float) -> None:
        """All that are queued; waits up to `wait_s` for the first."""
        while not self._stopped:
            try:
                command = self._commands.get(block=wait_s > 0, timeout=wait_s)
            except queue.Empty:
                return
            wait_s = 0.0
            if command is not None:
                self._execute(command)

    def _execute(self, command: _Command) -> None:
        future = command.future
        if future is not None and not future.set_running_or_notify_cancel():
            return  # the caller has given up
        try:
            result = command.run(self._engine)
        except Exception as error:  # a command fails alone
            if future is None:
                log.exception("posted command failed")
            else:
                future.set_exception(error)
        else:
            if future is not None:
                future.set_result(result)

    def _step(self) -> bool:
        """One step. Returns whether there is more to do at once. Nothing that is raised ends the loop."""
        try:
            self._deliver(self._engine.step(early=self._deliver))
            return self._engine.has_work
        except RankLost as error:
            self._fail_sequences(error)
            return False
        except Exception as error:  # the engine loop: its sequences fail, the loop goes on
            log.exception("engine step failed")
            self._fail_sequences(InternalError(f"the engine failed: {error!r}"))
            return False

    def _fail_sequences(self, error: HeadraceError) -> None:
        try:
            self._engine.fail_all(error)
        except Exception:  # as above
            log.exception("sequences could not be ended")

    def _deliver(self, output: StepOutput) -> None:
        if not output:
            return
        try:
            self._on_output(output)
        except Exception:  # a listener that is gone does not stop the engine
            log.exception("step output was not taken", events=len(output.events))

    def _refuse_queued(self) -> None:
        try:
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    _refuse(command)
        except queue.Empty:
            pass


def _refuse(command: _Command) -> None:
    if command.future is not None and command.future.set_running_or_notify_cancel():
        command.future.set_exception(Unavailable("the engine has stopped"))
