"""Whether the client itself was fast enough for its figures to mean anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.bench.serve.records import RequestRecord

_ALLOWED_MS = 10.0
_ALLOWED_SHARE = 0.05  # of the median TTFT


@dataclass(frozen=True, slots=True)
class Punctuality:
    """`lateness_ms`: from when requests were due to when the client took them up. `stall_ms`: by how much its event
    loop came late to what it had to do, which is also by how much it may have seen tokens late.
    """

    lateness_ms: dict[str, float]
    stall_ms: dict[str, float]
    allowed_ms: float

    @classmethod
    def of(cls, records: Sequence[RequestRecord], stalls_s: Sequence[float]) -> Punctuality:
        ttfts_ms = [record.ttft_ms for record in records if record.is_ok]
        share_ms = _ALLOWED_SHARE * float(np.median(ttfts_ms)) if ttfts_ms else 0.0
        return cls(
            _spread([record.lateness_ms for record in records]),
            _spread([1000 * stall_s for stall_s in stalls_s]),
            max(_ALLOWED_MS, share_ms),
        )

    @property
    def is_valid(self) -> bool:
        """Else tails are not quoted: they may be the client's own."""
        return max(self.lateness_ms["p99"], self.stall_ms["p99"]) <= self.allowed_ms

    @property
    def reason(self) -> str:
        """Empty: valid."""
        if self.is_valid:
            return ""
        late_ms, stall_ms = self.lateness_ms["p99"], self.stall_ms["p99"]
        return (
            f"the client was late by {late_ms:.1f} ms and its event loop by {stall_ms:.1f} ms at p99,"
            f" {self.allowed_ms:.1f} ms are allowed: no tails are quoted"
        )

    def json(self) -> dict[str, Any]:
        return {
            "lateness_ms": self.lateness_ms,
            "stall_ms": self.stall_ms,
            "allowed_ms": self.allowed_ms,
            "valid": self.is_valid,
            "reason": self.reason,
        }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0}
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": float(p50), "p99": float(p99), "max": float(np.max(values))}
