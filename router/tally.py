"""What the router has answered so far, by outcome: "ok", "cancelled" (the client left) or the code of an error."""

from __future__ import annotations

from collections import Counter


class Tally:
    """Requests that were let in and have ended. What was produced counts, whether or not the answer got to its end."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.prompt_tokens: Counter[str] = Counter()
        self.output_tokens: Counter[str] = Counter()  # of all choices

    def ended(self, outcome: str, *, prompt_tokens: int, output_tokens: int) -> None:
        self.requests[outcome] += 1
        self.prompt_tokens[outcome] += prompt_tokens
        self.output_tokens[outcome] += output_tokens
