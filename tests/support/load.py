"""Clients that ask a router again and again, and check every answer against the one of a quiet moment."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import grpc

from tests.support.processes import ask, tokens

MAX_TOKENS = 60
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
        self._lock = threading.Lock()
        self._ending = threading.Event()

    def _client(self, number: int) -> None:
        while not self._ending.is_set():
            number = (number + 1) % len(PROMPTS)
            asked_at = time.monotonic()
            try:
                answer = tokens(ask(self._router, PROMPTS[number], max_tokens=MAX_TOKENS))
            except grpc.RpcError as error:
                with self._lock:
                    self.errors.append(f"{error.code()}: {error.details()}")
                continue
            with self._lock:
                self.longest_s = max(self.longest_s, time.monotonic() - asked_at)
                if answer == self._expected[number]:
                    self.num_right += 1
                else:
                    self.wrong.append(answer)

    def figures(self) -> str:
        return (
            f"{self.num_right} right answers, {len(self.errors)} errors, {len(self.wrong)} wrong,"
            f" the longest took {self.longest_s:.2f} s"
        )

    def assert_nothing_lost(self, least: int) -> None:
        assert not self.errors, self.errors[:5]
        assert not self.wrong, self.wrong[:2]
        assert self.num_right >= least


@contextmanager
def load_on(router: str, num_clients: int = 4):
    """Within the block clients ask; at its end they have their last answers."""
    load = Load(router)
    clients = [threading.Thread(target=load._client, args=(number,)) for number in range(num_clients)]
    for client in clients:
        client.start()
    try:
        yield load
    finally:
        load._ending.set()
        for client in clients:
            client.join()
