"""The one error taxonomy. Raised deep, translated only at the borders (`headrace.rpc.status`).

    HeadraceError
    ├── InvalidRequest        INVALID_ARGUMENT     the caller must change the request; names field, value, limit
    ├── NotFound              NOT_FOUND            no such model, sequence or hand-off
    ├── AlreadyExists         ALREADY_EXISTS       that request id is live
    ├── Overloaded            RESOURCE_EXHAUSTED   try again after `retry_after_s`
    ├── SlowReader            RESOURCE_EXHAUSTED   a client that leaves its own answer unread
    ├── DeadlineExceeded      DEADLINE_EXCEEDED    the request's own deadline passed
    ├── RequestCancelled      CANCELLED            the client left, or its session ended
    ├── Unauthenticated       UNAUTHENTICATED      no credential, or none that is known
    ├── PermissionDenied      PERMISSION_DENIED    this caller may not do that
    ├── StaleBlocks           FAILED_PRECONDITION  KV blocks that changed while they were read
    ├── LayoutMismatch        FAILED_PRECONDITION  two workers that can not exchange KV; names the field
    ├── Unavailable           UNAVAILABLE          nobody there to do it; trying elsewhere or later can help
    │   ├── WorkerGone                             the worker died or its incarnation changed
    │   └── TransferFailed                         KV did not arrive (peer lost, timed out, checksum, lease over)
    ├── ModelError            FAILED_PRECONDITION  a model folder or file that can not be used; says why
    ├── PeerError             the peer's own code  an error that another process answered, passed on
    └── InternalError         INTERNAL             ours; one request fails, the others go on

Nothing here imports gRPC, torch or asyncio.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar


class Code(StrEnum):
    """Names equal those of the gRPC status codes."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    UNAVAILABLE = "UNAVAILABLE"
    INTERNAL = "INTERNAL"


class HeadraceError(Exception):
    """Base class. `code` is what the client sees; `retryable` says whether the same call can succeed later."""

    code: ClassVar[Code] = Code.INTERNAL
    retryable: ClassVar[bool] = False
    retry_after_s: float = (
        0.0  # when the same call can succeed, where there is reason to think so; 0: not known
    )

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled whole between processes, whatever arguments the class takes.
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(cls: type[HeadraceError], args: tuple[Any, ...], attributes: dict[str, Any]) -> HeadraceError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class InvalidRequest(HeadraceError):
    """Bad input. `field` is the public name of the field; the message holds its value and the limit."""

    code = Code.INVALID_ARGUMENT

    def __init__(self, field: str, value: object, requirement: str) -> None:
        self.field = field
        self.value = value
        self.requirement = requirement
        self.description = f"{_shown(value)} is not allowed; {requirement}"
        super().__init__(f"{field}: {self.description}")


class NotFound(HeadraceError):
    code = Code.NOT_FOUND


class AlreadyExists(HeadraceError):
    code = Code.ALREADY_EXISTS


class Overloaded(HeadraceError):
    code = Code.RESOURCE_EXHAUSTED
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"{message}; retry after {retry_after_s:g} s")


class SlowReader(HeadraceError):
    """A client that does not read what its request produces."""

    code = Code.RESOURCE_EXHAUSTED

    def __init__(self, num_unread: int, limit: int) -> None:
        super().__init__(f"client reads too slowly: {num_unread} tokens wait for it, the limit is {limit}")


class DeadlineExceeded(HeadraceError):
    code = Code.DEADLINE_EXCEEDED


class RequestCancelled(HeadraceError):
    code = Code.CANCELLED


class Unauthenticated(HeadraceError):
    code = Code.UNAUTHENTICATED


class PermissionDenied(HeadraceError):
    code = Code.PERMISSION_DENIED


class StaleBlocks(HeadraceError):
    """What was read is not what was promised: a block was recycled in between."""

    code = Code.FAILED_PRECONDITION


class LayoutMismatch(HeadraceError):
    """Two workers whose KV caches can not be exchanged. Names the first field that keeps them apart."""

    code = Code.FAILED_PRECONDITION

    def __init__(self, field: str, ours: object, theirs: object, requirement: str = "") -> None:
        self.field = field
        self.ours = ours
        self.theirs = theirs
        self.requirement = requirement
        message = f"KV layout mismatch in {field}: ours is {ours!r}, the peer's is {theirs!r}"
        super().__init__(f"{message}; {requirement}" if requirement else message)


class Unavailable(HeadraceError):
    code = Code.UNAVAILABLE
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"{message}; retry after {retry_after_s:g} s" if retry_after_s else message)


class WorkerGone(Unavailable):
    pass


class TransferFailed(Unavailable):
    pass


class ModelError(HeadraceError):
    code = Code.FAILED_PRECONDITION


class InternalError(HeadraceError):
    code = Code.INTERNAL


class PeerError(HeadraceError):
    """Another process's answer, passed on with its code."""

    def __init__(self, code: Code, message: str, field: str = "") -> None:
        """`field`: what an INVALID_ARGUMENT is about, where the other process said so."""
        self.field = field
        # Per instance here, per class elsewhere.
        self.code = code  # pyright: ignore[reportAttributeAccessIssue]
        self.retryable = code in {Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED}  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__(message)


_MAX_SHOWN = 80


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}… ({len(text)} characters)"
