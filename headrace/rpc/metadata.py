"""What a public call carries beside its message: credential, request id, W3C trace context."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Any

import grpc

REQUEST_ID_KEY = "x-request-id"
TRACEPARENT_KEY = "traceparent"
TRACESTATE_KEY = "tracestate"

TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[ -~]{0,256})?"
)
_MAX_ECHOED_BYTES = 512  # W3C asks for as much of tracestate to be passed on


@dataclass(frozen=True, slots=True)
class CallMetadata:
    """Of one call; "" where there is none."""

    authorization: str = ""
    request_id: str = ""  # the message's own, or else x-request-id, or else one made here
    traceparent: str = ""  # also "" where it is not of the form that W3C gives it
    tracestate: str = ""

    def echo(self) -> tuple[tuple[str, str], ...]:
        """What goes back with the answer, as far as metadata can hold it."""
        entries = (
            (REQUEST_ID_KEY, self.request_id),
            (TRACEPARENT_KEY, self.traceparent),
            (TRACESTATE_KEY, self.tracestate),
        )
        return tuple((key, value) for key, value in entries if _can_be_sent(value))


def metadata_of(context: grpc.aio.ServicerContext[Any, Any], request_id: str = "") -> CallMetadata:
    """Of a call whose message names `request_id`. The first entry of each key counts."""
    found: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        found.setdefault(key, value if isinstance(value, str) else value.decode(errors="replace"))
    traceparent = found.get(TRACEPARENT_KEY, "")
    is_traced = TRACEPARENT.fullmatch(traceparent) is not None
    return CallMetadata(
        authorization=found.get("authorization", ""),
        request_id=request_id or found.get(REQUEST_ID_KEY, "") or uuid.uuid4().hex,
        traceparent=traceparent if is_traced else "",
        tracestate=found.get(TRACESTATE_KEY, "") if is_traced else "",
    )


def _can_be_sent(value: str) -> bool:
    return 0 < len(value) <= _MAX_ECHOED_BYTES and value.isascii() and value.isprintable()
