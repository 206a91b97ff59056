"""Predicted work per worker incarnation: charged when a plan is chosen, credited in a `finally`.

chosen ──▶ P: seconds and tokens of the prompt · D: a sequence and its tokens
first token ──▶ P owes nothing any more, however long it was predicted to take · D: each token that comes
over ──▶ nothing is left
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.clock import Clock, SystemClock
from router.policy.views import Plan


@dataclass(slots=True)
class Account:
    """What one incarnation was sent and has not finished."""

    prefills_s: dict[object, float] = field(
        default_factory=dict
    )  # predicted seconds, in the order of arrival
    head_since_s: float = 0.0  # since when the first of them is computed
    pending_prefill_s: float = 0.0
    pending_prefill_tokens: int = 0
    active_sequences: int = 0
    active_tokens: int = 0
    num_requests: int = 0

    @property
    def head_s(self) -> float:
        return next(iter(self.prefills_s.values()), 0.0)

    def queue_s(self, now_s: float) -> float:
        """Predicted time until all of it is prefilled. What has run longer than predicted counts as nearly over."""
        return max(0.0, self.pending_prefill_s - min(self.head_s, now_s - self.head_since_s))

    def add_prefill(self, key: object, seconds: float, num_tokens: int, now_s: float) -> None:
        if not self.prefills_s:
            self.head_since_s = now_s
        self.prefills_s[key] = seconds
        self.pending_prefill_s += seconds
        self.pending_prefill_tokens += num_tokens

    def end_prefill(self, key: object, num_tokens: int, now_s: float) -> None:
        """The next one is computed from now on, or goes on if the one that ended was not the first."""
        if next(iter(self.prefills_s)) is key:
            self.head_since_s = now_s
        self.pending_prefill_s -= self.prefills_s.pop(key)
        if not self.prefills_s:
            self.pending_prefill_s = 0.0  # rounding errors do not pile up
        self.pending_prefill_tokens -= num_tokens


@dataclass(frozen=True, slots=True)
class Figures:
    """Of several accounts, [n] each."""

    queue_s: NDArray[np.float64]
    pending_prefill_tokens: NDArray[np.float64]
    num_requests: NDArray[np.float64]
    active_sequences: NDArray[np.float64]
    active_tokens: NDArray[np.float64]


class Charge:
    """One request's share. `prefilled` moves it on; leaving the `charged` block returns the rest."""

    def __init__(self, ledger: Ledger, plan: Plan, num_prompt_tokens: int) -> None:
        self._ledger = ledger
        self._prefill = (plan.prefill[0] if plan.prefill else plan.decode).incarnation
        self._decode = plan.decode.incarnation
        known = plan.prediction.cached_tokens + plan.prediction.fetched_tokens
        self._prefill_tokens = max(0, num_prompt_tokens - known)
        self._active_tokens = num_prompt_tokens
        self._is_prefilled = False
        seconds = plan.prediction.prefill_s + plan.prediction.fetch_s
        account = ledger.account(self._prefill)
        account.add_prefill(self, seconds, self._prefill_tokens, ledger.clock.now())
        account.num_requests += 1
        decode = ledger.account(self._decode)
        decode.active_tokens += num_prompt_tokens
        decode.active_sequences += 1
        decode.num_requests += self._decode != self._prefill
        ledger.note(self._prefill)
        ledger.note(self._decode)

    def prefilled(self) -> None:
        """The first token is here: nothing of the prompt is pending any more."""
        if self._is_prefilled:
            return
        self._is_prefilled = True
        account = self._ledger.accounts[self._prefill]
        account.end_prefill(self, self._prefill_tokens, self._ledger.clock.now())
        account.num_requests -= self._prefill != self._decode
        self._ledger.note(self._prefill)

    def generated(self, num_tokens: int) -> None:
        self._ledger.accounts[self._decode].active_tokens += num_tokens
        self._active_tokens += num_tokens
        self._ledger.note(self._decode)

    def close(self) -> None:
        self.prefilled()
        account = self._ledger.accounts[self._decode]
        account.active_tokens -= self._active_tokens
        account.active_sequences -= 1
        account.num_requests -= 1
        self._ledger.note(self._decode)


_NOTHING = Account()


_FIRST_ROWS = 64


class Ledger:
    """Accounts by incarnation. Exactly empty when nothing is in flight. The same figures by row, for all at once."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.accounts: dict[str, Account] = {}
        self._rows: dict[str, int] = {}  # by incarnation
        self._free_rows: list[int] = []
        self._figures = np.zeros((_FIRST_ROWS, 7))  # as `note` writes them

    def of(self, incarnation: str) -> Account:
        """To be read only."""
        return self.accounts.get(incarnation, _NOTHING)

    def account(self, incarnation: str) -> Account:
        return self.accounts.setdefault(incarnation, Account())

    def note(self, incarnation: str) -> None:
        """Its account has changed. One with nothing in flight goes: workers come and go, and it must not pile up."""
        account = self.accounts[incarnation]
        self._figures[self._row(incarnation)] = (
            account.pending_prefill_s,
            account.head_s,
            account.head_since_s,
            account.pending_prefill_tokens,
            account.num_requests,
            account.active_sequences,
            account.active_tokens,
        )
        if not account.num_requests:
            del self.accounts[incarnation]

    def rows(self, incarnations: Iterable[str]) -> NDArray[np.int64]:
        """Where `figures` finds these. Until the next call: rows of others that have nothing in flight are given up."""
        wanted = list(incarnations)
        for incarnation in self._rows.keys() - self.accounts.keys() - set(wanted):
            self._free_rows.append(self._rows.pop(incarnation))
        return np.array([self._row(incarnation) for incarnation in wanted], np.int64)

    def figures(self, rows: NDArray[np.int64]) -> Figures:
        pending_s, head_s, head_since_s, *others = self._figures.take(rows, axis=0).T
        drained_s = np.minimum(head_s, self.clock.now() - head_since_s)
        return Figures(np.maximum(0.0, pending_s - drained_s), *others)

    def _row(self, incarnation: str) -> int:
        row = self._rows.get(incarnation)
        if row is None:
            row = self._free_rows.pop() if self._free_rows else len(self._rows)
            self._rows[incarnation] = row
            if row == len(self._figures):
                self._figures = np.concatenate((self._figures, np.zeros_like(self._figures)))
        return row

    @property
    def pending_prefill_tokens(self) -> dict[str, int]:
        return {key: a.pending_prefill_tokens for key, a in self.accounts.items() if a.pending_prefill_tokens}

    @property
    def active_tokens(self) -> dict[str, int]:
        return {key: account.active_tokens for key, account in self.accounts.items() if account.active_tokens}

    @contextmanager
    def charged(self, plan: Plan, num_prompt_tokens: int) -> Generator[Charge]:
        charge = Charge(self, plan, num_prompt_tokens)
        try:
            yield charge
        finally:
            charge.close()
