"""The reader's view of a lease on blocks at another worker. The owner's side is a hold in its engine's block pool.

    reader   sends ────────────────▶ acknowledged         its view ends ttl after *sending*
    owner            ▶ receives                            its hold ends ttl after *receiving*: always later

Each side counts on its own monotonic clock; clocks are never compared.
"""

from __future__ import annotations

from headrace.clock import Clock


class ReaderLease:
    def __init__(self, ttl_s: float, clock: Clock) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self.expires_at = float("-inf")

    def sending(self) -> float:
        """Call right before a request or renewal goes out; give the result to `acknowledged` once it is answered."""
        return self._clock.now()

    def acknowledged(self, sent_at: float) -> None:
        """The owner answered what was sent then. Answers may come in any order."""
        self.expires_at = max(self.expires_at, sent_at + self._ttl_s)

    def valid(self) -> bool:
        """Whether the owner surely still holds the blocks. Not before the first acknowledgement."""
        return self._clock.now() < self.expires_at
