"""Who asks. Every entrance turns a credential into a caller before it looks at the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Caller:
    """`tenant` has its own part of the queue, and of the caches: no other tenant finds its blocks there."""

    tenant: str = ""  # "": the default one


class Callers(Protocol):
    async def caller(self, authorization: str) -> Caller:
        """By the request's `authorization` header, "" where there is none. Raises Unauthenticated."""
        ...


class Anyone:
    """For a router that asks for no credentials: all are the default tenant."""

    async def caller(self, authorization: str) -> Caller:
        del authorization
        return Caller()
