"""How clients of the public API connect: credentials after `ClientSettings`, the same for gRPC and HTTP."""

from __future__ import annotations

from pathlib import Path

import grpc

from headrace.config import ClientSettings
from headrace.errors import InvalidRequest


def tls_credentials(settings: ClientSettings) -> grpc.ChannelCredentials | None:
    """None: without TLS. Raises InvalidRequest for files that can not be read."""
    if not settings.tls:
        return None
    return grpc.ssl_channel_credentials(
        _read("client.ca_file", settings.ca_file),
        _read("client.key_file", settings.key_file),
        _read("client.cert_file", settings.cert_file),
    )


def authorization(settings: ClientSettings) -> tuple[tuple[str, str], ...]:
    """The header or metadata that says who asks; nothing where no key is set. Raises InvalidRequest."""
    key = _read("client.api_key_file", settings.api_key_file)
    return (("authorization", f"Bearer {key.decode().strip()}"),) if key else ()


def _read(field: str, path: Path | None) -> bytes | None:
    try:
        return path.read_bytes() if path is not None else None
    except OSError as error:
        raise InvalidRequest(field, str(path), f"can not be read: {error}") from None
