"""What is simulated, apart from trace and policy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Sight(StrEnum):
    """What routers know of caches."""

    EVENTS = (
        "events"  # what workers publish, late and with losses; and for a while what the router sent there
    )
    HISTORY = "history"  # only what the router sent there


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Workers are alike. With `num_decode` 0 each of them prefills and decodes, else `num_prefill` only prefill.

    Links are one per worker and direction; who comes first is served first.
    """

    num_prefill: int = 8
    num_decode: int = 2
    blocks_per_worker: int = 5_000
    host_blocks_per_worker: int = 0
    machine: str = "70b-8xh200"
    link_bytes_per_s: float = 320e9
    link_latency_s: float = 1e-3
    host_bytes_per_s: float = 50e9  # from the host tier to the device
    decode_prefills: bool = False  # decode workers may compute prompts themselves
    noise: float = 0.0  # of every time: the logarithm's standard deviation
    num_routers: int = 1
    sight: Sight = Sight.EVENTS
    event_interval_s: float = 0.05
    event_delay_s: float = 0.003
    event_loss: float = 0.0  # share of the events


HISTORY_TTL_S = 120.0
EXACT = "exact"
