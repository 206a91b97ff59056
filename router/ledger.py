"""Predicted work per worker incarnation: charged when a plan is chosen, credited in a `finally`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from router.policy.views import Plan


class Charge:
    """One request's share. `prefilled` moves it on; leaving the `charged` block returns the rest."""

    def __init__(self, ledger: Ledger, plan: Plan, num_prompt_tokens: int) -> None:
        self._ledger = ledger
        self._prefill = (plan.prefill[0] if plan.prefill else plan.decode).incarnation
        self._decode = plan.decode.incarnation
        self._prefill_tokens = num_prompt_tokens - plan.predicted_cached_tokens
        self._active_tokens = num_prompt_tokens
        ledger.pending_prefill_tokens[self._prefill] += self._prefill_tokens
        ledger.active_tokens[self._decode] += self._active_tokens

    def prefilled(self) -> None:
        """The first token is here: nothing of the prompt is pending any more."""
        self._ledger.pending_prefill_tokens[self._prefill] -= self._prefill_tokens
        self._prefill_tokens = 0

    def generated(self, num_tokens: int) -> None:
        self._ledger.active_tokens[self._decode] += num_tokens
        self._active_tokens += num_tokens

    def close(self) -> None:
        self.prefilled()
        self._ledger.active_tokens[self._decode] -= self._active_tokens
        self._active_tokens = 0
        for counter, key in (
            (self._ledger.pending_prefill_tokens, self._prefill),
            (self._ledger.active_tokens, self._decode),
        ):
            if counter[key] == 0:
                del counter[key]  # workers come and go; their incarnations must not pile up


class Ledger:
    """Counters by incarnation. Exactly empty when nothing is in flight."""

    def __init__(self) -> None:
        self.pending_prefill_tokens: Counter[str] = Counter()
        self.active_tokens: Counter[str] = Counter()

    @contextmanager
    def charged(self, plan: Plan, num_prompt_tokens: int) -> Generator[Charge]:
        charge = Charge(self, plan, num_prompt_tokens)
        try:
            yield charge
        finally:
            charge.close()
