"""The fleet as the router sees it, as plain data. `headrace top` and the web page show it; outside it is JSON.

Figures of answers are over the last `window_s`. Bytes per second are over the last `rate_s`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pydantic import TypeAdapter, ValidationError

from headrace.errors import Unavailable


class Condition(StrEnum):
    SERVING = "serving"
    DRAINING = "draining"
    SET_ASIDE = "set aside"  # its breaker is open
    GONE = "gone"  # it left or was lost a moment ago


@dataclass(frozen=True, slots=True)
class Latency:
    """Over recent answers; None where there were none."""

    count: int = 0
    p50_s: float | None = None
    p95_s: float | None = None


@dataclass(frozen=True, slots=True)
class Hits:
    """Prompt tokens of recent answers whose workers reported: all, predicted to be cached, and found cached."""

    prompt_tokens: int = 0
    predicted_tokens: int = 0
    reported_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Transfers:
    """KV that this worker was read from and that it read, for recent answers of this router."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_bytes_per_s: float = 0.0
    received_bytes_per_s: float = 0.0
    failures: int = 0  # hand-offs from it that failed


@dataclass(frozen=True, slots=True)
class WorkerState:
    worker_id: str
    role: str
    address: str
    incarnation: str
    condition: Condition
    seen_s: float  # since this router first saw the incarnation
    gone_s: float | None  # since it is gone
    breaker: str  # "closed", "open" or "half-open"
    kind: str
    transport: str
    # By its own record, up to a refresh old.
    num_blocks: int
    used_blocks: int
    cached_blocks: int
    block_bytes: int
    running: int
    waiting: int
    waiting_tokens: int
    prefill_tokens_per_s: float
    # What this router has sent and is not finished.
    queue_s: float
    pending_prefill_tokens: int
    active_sequences: int
    active_tokens: int
    # Recent answers of this router.
    ttft: Latency  # of prompts prefilled here
    itl: Latency  # of answers decoded here
    hits: Hits  # of prompts prefilled here
    transfers: Transfers


@dataclass(frozen=True, slots=True)
class RouterState:
    model: str
    up_s: float
    inflight: int
    queued: int
    queued_tokens: int
    tokens_per_s: float  # given out, over the last few seconds
    requests_per_s: float  # that ended
    requests: dict[str, int]  # since the start, by outcome
    output_tokens: int  # since the start
    refused: dict[str, int]  # since the start, by reason
    ttft: Latency
    itl: Latency
    hits: Hits
    event_lag_s: float
    directory_silence_s: float
    event_gaps: int
    index_blocks: int
    index_entries: int
    index_bytes: int
    index_dropped_blocks: int
    assumed_blocks: int


@dataclass(frozen=True, slots=True)
class History:
    """One figure per `interval_s`, oldest first."""

    interval_s: float
    tokens_per_s: list[float]
    requests_per_s: list[float]
    inflight: list[float]
    queued: list[float]
    kv_used: list[float]  # fraction of all blocks


@dataclass(frozen=True, slots=True)
class FleetState:
    window_s: float
    rate_s: float
    router: RouterState
    workers: list[WorkerState]  # by id
    history: History


_STATE = TypeAdapter(FleetState)


def state_to_json(state: FleetState) -> bytes:
    return _STATE.dump_json(state)


def state_from_json(data: bytes) -> FleetState:
    """Raises Unavailable for what is not one, or is another version's."""
    try:
        return _STATE.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "document"
        raise Unavailable(
            f"the answer is no state of a fleet of this version: {where}: {first['msg']}"
        ) from None
