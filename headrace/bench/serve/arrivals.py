"""When requests are due: arrival processes of a given mean rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.errors import InvalidRequest

Kind = Literal["poisson", "gamma", "constant", "burst"]
KINDS: tuple[Kind, ...] = ("poisson", "gamma", "constant", "burst")


def kind_of(text: str) -> Kind:
    """Raises InvalidRequest."""
    for kind in KINDS:
        if kind == text:
            return kind
    raise InvalidRequest("--arrival", text, f"must be of {', '.join(KINDS)}, closed")


Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`burstiness` is the shape of gamma's gaps, as in vLLM: 1 is Poisson, less is burstier; their CV is shape ** -0.5.
    With `burst`, `burst_size` requests are due at once, and the bursts come evenly.
    """

    kind: Kind
    rate: float  # requests a second
    burstiness: float = 1.0
    burst_size: int = 10

    def __post_init__(self) -> None:
        for name in ("rate", "burstiness", "burst_size"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise InvalidRequest(f"--{name.replace('_', '-')}", value, "must be a finite number above 0")

    def first(self, count: int, seed: int) -> Seconds:
        """So many times from 0 on, ascending. Rates differ by scale only: the same seed draws the same pattern."""
        rng = np.random.default_rng([seed, 1])
        numbers: Any = np.arange(count)
        if self.kind == "burst":
            return numbers // self.burst_size * (self.burst_size / self.rate)
        if self.kind == "constant":
            return numbers / self.rate
        shape = self.burstiness if self.kind == "gamma" else 1.0
        gaps: Any = rng.gamma(shape, 1 / shape, count)
        times: Any = np.cumsum(gaps) / self.rate
        return times

    def within(self, duration_s: float, seed: int) -> Seconds:
        """All before `duration_s`."""
        count = int(self.rate * duration_s) + 16
        while (times := self.first(count, seed))[-1] < duration_s:
            count *= 2
        return times[times < duration_s]
