"""How clients of the public API connect: credentials after `ClientSettings`, the same for gRPC and HTTP."""

from __future__ import annotations

import ssl
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


def tls_context(settings: ClientSettings) -> ssl.SSLContext:
    """The same for HTTP: whom to trust, and the client's own certificate. Raises InvalidRequest."""
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
        if settings.cert_file is not None:
            context.load_cert_chain(settings.cert_file, settings.key_file)
    except OSError as error:  # SSLError is one
        files = ", ".join(
            str(path) for path in (settings.ca_file, settings.cert_file, settings.key_file) if path
        )
        raise InvalidRequest(
            "client.ca_file, cert_file, key_file", files, f"can not be used: {error}"
        ) from None
    return context


def authorization(settings: ClientSettings) -> tuple[tuple[str, str], ...]:
    """The header or metadata that says who asks; nothing where no key is set. Raises InvalidRequest."""
    key = _read("client.api_key_file", settings.api_key_file)
    return (("authorization", f"Bearer {key.decode().strip()}"),) if key else ()


def _read(field: str, path: Path | None) -> bytes | None:
    try:
        return path.read_bytes() if path is not None else None
    except OSError as error:
        raise InvalidRequest(field, str(path), f"can not be read: {error}") from None
