"""From token ids to text while they arrive, one instance per answer. Called by the router for every step's new tokens.

    tokens ──bytes──▶ [incomplete UTF-8 tail] ──text──▶ [tail that could become a stop string] ──▶ client

Only these two tails are held back, so text is never delayed without need and never taken back. The text of an answer
does not depend on how its tokens were split over calls.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What is needed of a tokenizer."""

    @property
    def strips_leading_space(self) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def shown_bytes(self, token_id: int) -> bytes: ...


class IncrementalDetokenizer:
    """The answer ends before the stop string whose end comes first; of those that end together, before the longest."""

    def __init__(
        self, tokenizer: TokenBytes, stop_strings: Sequence[str] = (), shown: Collection[int] = ()
    ) -> None:
        """`shown`: control tokens that are to appear in the text, by name."""
        self._tokenizer = tokenizer
        self._shown = shown
        self._stop_strings = tuple(stop_strings)
        # "replace" gives one U+FFFD per invalid sequence, and keeps an incomplete one until the next bytes decide.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._strip_space = tokenizer.strips_leading_space
        self.matched_stop: str | None = None  # the stop string that has ended the answer

    @property
    def stopped(self) -> bool:
        return self.matched_stop is not None

    @property
    def can_stop(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._stop_strings)

    def push(self, token_ids: Sequence[int]) -> str:
        """New text that is certain to belong to the answer. Empty once `stopped`."""
        if self.stopped:
            return ""
        data = b"".join(map(self._bytes, token_ids))
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._take(self._decoder.decode(data))

    def finish(self) -> str:
        """The rest, when no more tokens come. A character that was cut in the middle becomes one U+FFFD."""
        if self.stopped:
            return ""
        text = self._take(self._decoder.decode(b"", final=True))
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _bytes(self, token_id: int) -> bytes:
        is_shown = token_id in self._shown
        return self._tokenizer.shown_bytes(token_id) if is_shown else self._tokenizer.token_bytes(token_id)

    def _take(self, text: str) -> str:
        self._held += text
        match = self._first_stop()
        if match is not None:
            end, self.matched_stop = match
        else:
            end = len(self._held) - self._num_undecided()
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _first_stop(self) -> tuple[int, str] | None:
        """Where the first stop string starts, and which it is, if one is complete."""
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stop_strings
            if (start := self._held.find(stop)) >= 0
        ]
        return min(matches)[1:] if matches else None

    def _num_undecided(self) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        longest = 0
        for stop in self._stop_strings:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
