"""Clients that ask a router again and again. Every second prompt is new, so prefill has work; answers are compared with
those of a quiet moment, before or after.
"""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import contextmanager

import grpc

from tests.support.processes import ask, tokens

MAX_TOKENS = 60
NUM_COMPARED = 20  # of the new ones
PROMPTS = [[3 + (7 * i + 31 * number) % 200 for i in range(90 + number)] for number in range(6)]


class Load:
    """What came of it. `errors`: what clients were told; `wrong`: answers that differ."""

    def __init__(self, router: str) -> None:
        self.num_right = 0
        self.errors: list[str] = []
        self.wrong: list[list[int]] = []
        self.longest_s = 0.0
        self._router = router
        self._expected = [tokens(ask(router, prompt, max_tokens=MAX_TOKENS)) for prompt in PROMPTS]
        self._new: dict[int, list[int]] = {}  # answers by the number of their prompt
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._ending = threading.Event()

    def _client(self) -> None:
        while not self._ending.is_set():
            with self._lock:
                number = next(self._numbers)
            is_new = number % 2 == 1
            asked_at = time.monotonic()
            try:
                answer = tokens(
                    ask(self._router, new_prompt(number) if is_new else _known(number), max_tokens=MAX_TOKENS)
                )
            except grpc.RpcError as error:
                with self._lock:
                    self.errors.append(f"{error.code()}: {error.details()}")
                continue
            with self._lock:
                self.longest_s = max(self.longest_s, time.monotonic() - asked_at)
                if is_new:
                    self._new[number] = answer
                self._count(answer, len(answer) == MAX_TOKENS if is_new else answer == self._of(number))

    def _count(self, answer: list[int], is_right: bool) -> None:
        if is_right:
            self.num_right += 1
        else:
            self.wrong.append(answer)

    def _of(self, number: int) -> list[int]:
        return self._expected[number // 2 % len(PROMPTS)]

    def compare_new(self) -> None:
        """Some of the new prompts once more, when nobody else asks."""
        for number in sorted(self._new)[:: max(1, len(self._new) // NUM_COMPARED)]:
            again = tokens(ask(self._router, new_prompt(number), max_tokens=MAX_TOKENS))
            if again != self._new[number]:
                self.wrong.append(self._new[number])

    def figures(self) -> str:
        return (
            f"{self.num_right} right answers, {len(self.errors)} errors, {len(self.wrong)} wrong,"
            f" the longest took {self.longest_s:.2f} s"
        )

    def assert_nothing_lost(self, least: int) -> None:
        assert not self.errors, self.errors[:5]
        assert not self.wrong, self.wrong[:2]
        assert self.num_right >= least


def _known(number: int) -> list[int]:
    return PROMPTS[number // 2 % len(PROMPTS)]


def new_prompt(number: int) -> list[int]:
    """No two share a block."""
    return [3 + number % 200, 3 + number // 200 % 200, *(3 + (11 * i + number) % 200 for i in range(110))]


@contextmanager
def load_on(router: str, num_clients: int = 4):
    """Within the block clients ask; at its end they have their last answers, and new prompts are asked once more."""
    load = Load(router)
    clients = [threading.Thread(target=load._client) for _ in range(num_clients)]
    for client in clients:
        client.start()
    try:
        yield load
    finally:
        load._ending.set()
        for client in clients:
            client.join()
    load.compare_new()
    assert not load.wrong, load.wrong[:2]
