"""The one mapping between `headrace.errors` and gRPC status, both ways."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any

import grpc
import structlog
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from headrace.errors import (
    Code,
    DeadlineExceeded,
    HeadraceError,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    PeerError,
    WorkerGone,
)

log = structlog.get_logger()

_MAX_DETAILS_BYTES = 1000
RETRY_AFTER_KEY = "retry-after-ms"
# Set on every status that a handler of ours chose. An UNAVAILABLE without it came from the connection itself.
ANSWERED_KEY = "headrace-answered"
_CAPITAL = re.compile(r"(?<=.)(?=[A-Z])")
# Of a LayoutMismatch: the field, its values on the answering side and on the asking one, what would be needed.
_MISMATCH_KEYS = ("headrace-field", "headrace-answerer-bin", "headrace-asker-bin", "headrace-needed-bin")
# Of google.rpc's details.
_DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "headrace"
_MAX_FIELD = 100  # characters
_MAX_DESCRIPTION = 200


def status_code(code: Code) -> grpc.StatusCode:
    return grpc.StatusCode[code.value]


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: HeadraceError) -> None:
    """End the call with the error's status. Raises, as `context.abort` does."""
    text = _short(str(error))
    metadata: list[tuple[str, str | bytes]] = [*(context.trailing_metadata() or ()), (ANSWERED_KEY, "1")]
    retry_after_s = error.retry_after_s
    if retry_after_s:
        metadata.append((RETRY_AFTER_KEY, str(int(retry_after_s * 1000))))
    if isinstance(error, LayoutMismatch):
        values = (error.field, *(str(v).encode() for v in (error.ours, error.theirs, error.requirement)))
        metadata += zip(_MISMATCH_KEYS, values, strict=True)
    metadata += rpc_status.to_status(_rich_status(error, text, retry_after_s)).trailing_metadata
    context.set_trailing_metadata(tuple(metadata))
    await context.abort(status_code(error.code), text)


def _short(details: str) -> str:
    """gRPC refuses some calls whose metadata is over 8 KiB, and all over 16; percent-encoding makes 3 bytes of one."""
    data = details.encode()
    if len(data) <= _MAX_DETAILS_BYTES:
        return details
    return f"{data[:_MAX_DETAILS_BYTES].decode(errors='ignore')}… ({len(data)} bytes)"


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> HeadraceError:
    """What a failed call to `peer` means to the caller. A connection that broke is WorkerGone."""
    code, details = error.code(), error.details() or "no details"
    trailing = dict(error.trailing_metadata() or ())
    answered = ANSWERED_KEY in trailing
    if _MISMATCH_KEYS[0] in trailing:
        field, theirs, ours, needed = (_text(trailing[key]) for key in _MISMATCH_KEYS)
        return LayoutMismatch(field, ours, theirs, needed)
    if code == grpc.StatusCode.UNAVAILABLE and not answered:
        return WorkerGone(f"{peer}: {details}")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{peer}: {details}")
    known = Code.__members__.get(code.name)
    if known is None:
        return InternalError(f"{peer}: {code.name}: {details}")
    return PeerError(known, f"{peer}: {details}", _field_of(trailing.get(_DETAILS_KEY)))


def _field_of(details: str | bytes | None) -> str:
    """Of a status's details: what its ErrorInfo names."""
    status, info = status_pb2.Status(), error_details_pb2.ErrorInfo()
    try:
        status.ParseFromString(details if isinstance(details, bytes) else b"")
        for detail in status.details:
            if detail.Unpack(info):
                return info.metadata.get("field", "")
    except DecodeError:  # a stranger's
        pass
    return ""


def _rich_status(error: HeadraceError, text: str, retry_after_s: float) -> status_pb2.Status:
    """What clients read from `grpc-status-details-bin`: google.rpc's ErrorInfo, and where they apply BadRequest and
    RetryInfo.
    """
    status = status_pb2.Status(code=status_code(error.code).value[0], message=text)
    info = error_details_pb2.ErrorInfo(
        reason=_CAPITAL.sub("_", type(error).__name__).upper(),
        domain=_DOMAIN,
        metadata={"retryable": str(error.retryable).lower()},
    )
    if isinstance(error, InvalidRequest | PeerError) and error.field:
        description = error.description if isinstance(error, InvalidRequest) else str(error)
        info.metadata["field"] = error.field[:_MAX_FIELD]
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=info.metadata["field"], description=description[:_MAX_DESCRIPTION]
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    status.details.add().Pack(info)
    if retry_after_s:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(retry_after_s * 1000))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


@contextmanager
def errors_of(peer: str) -> Generator[None]:
    """Within the block, what a call to `peer` raises becomes an error of ours. A channel that somebody else closed
    cancels its calls as if we were cancelled ourselves, and takes no further ones: that becomes WorkerGone.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, peer) from None
    except grpc.aio.UsageError:
        raise WorkerGone(f"{peer}: the connection was closed") from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise WorkerGone(f"{peer}: the connection was closed") from None


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into a status. A HeadraceError keeps its code; all else is INTERNAL and logged."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith("/grpc."):  # health, reflection
            return handler
        method = handler_call_details.method
        if handler.response_streaming:
            behaviour = handler.stream_stream or handler.unary_stream
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            wrapped: Any = _guard_stream(behaviour, method)
        else:
            behaviour, make = handler.unary_unary, grpc.unary_unary_rpc_method_handler
            wrapped = _guard_unary(behaviour, method)
        deserializer = handler.request_deserializer
        if not handler.request_streaming:
            deserializer = _tolerant(deserializer)
        return make(wrapped, deserializer, handler.response_serializer)


def _tolerant(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """For bytes that are no message the handler gets the error to raise; gRPC itself would log and answer UNKNOWN."""

    def deserialized(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError as error:
            return InvalidRequest("request", f"{len(data)} bytes", str(error))

    return deserialized


def _guard_unary(behaviour: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            if isinstance(request, InvalidRequest):
                raise request
            return await behaviour(request, context)
        except HeadraceError as error:
            await abort_with(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:  # noqa: BLE001 - the service border
            await abort_with(context, _unexpected(method))

    return guarded


def _guard_stream(
    behaviour: Callable[..., AsyncIterator[Any]], method: str
) -> Callable[..., AsyncIterator[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            if isinstance(request, InvalidRequest):
                raise request
            async for response in behaviour(request, context):
                yield response
        except HeadraceError as error:
            await abort_with(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:  # noqa: BLE001 - the service border
            await abort_with(context, _unexpected(method))

    return guarded


def _unexpected(method: str) -> InternalError:
    log.exception("handler failed", method=method)
    return InternalError(f"{method}: unexpected error, see the server's log")


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
