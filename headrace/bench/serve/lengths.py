"""How many tokens or turns: fixed, uniform or log-normal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import InvalidRequest

_FORMS = "must be N, LOW:HIGH (uniform) or lognormal:MEAN:SIGMA, from 1 to 10,000,000"
_MAX_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform from `low` to `high`, or log-normal around `mean` where there is a `sigma`, cut at 16 times the mean."""

    low: int
    high: int
    mean: float
    sigma: float = 0.0

    @classmethod
    def parse(cls, option: str, text: str) -> Lengths:
        """Raises InvalidRequest."""
        kind, *rest = text.split(":")
        try:
            if kind == "lognormal":
                mean, sigma = map(float, rest)
                found = cls(1, round(16 * mean), mean, sigma)
            else:
                low, high = map(int, (kind, *rest) if rest else (kind, kind))
                found = cls(low, high, (low + high) / 2)
        except (ValueError, OverflowError):
            raise InvalidRequest(option, text, _FORMS) from None
        if not 1 <= found.low <= found.high <= _MAX_TOKENS or not 0 <= found.sigma <= 4:
            raise InvalidRequest(option, text, _FORMS)
        return found

    def __str__(self) -> str:
        if self.sigma:
            return f"lognormal:{self.mean:g}:{self.sigma:g}"
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        if not self.sigma:
            return rng.integers(self.low, self.high + 1, count).tolist()
        drawn: Any = rng.lognormal(np.log(self.mean) - self.sigma**2 / 2, self.sigma, count)
        return np.clip(np.rint(drawn), self.low, self.high).astype(int).tolist()
