"""Certificates: who a process of ours is, what its servers and channels show, and which calls whom it lets make.

A certificate says what it is for in its subject alternative names:

    URI   spiffe://headrace/{cluster}/{role}[/{name}]    who calls: checked for each call, by `RoleInterceptor`
    DNS   worker.{cluster}.headrace.internal             who answers: checked by TLS, whatever address was dialled

So worker certificates fit any address, and a certificate that was made for a client, or for another cluster, is good
for nothing between our processes even where one authority has signed them all. With a name, a worker's certificate is
good for the worker of that id only.

Files are read again when they change: a new connection sees the new ones, an open connection goes on.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from headrace.config import RpcSettings, SecuritySettings, TlsSettings
from headrace.errors import PermissionDenied
from headrace.watched_files import WatchedFiles

_PREFIX = "spiffe://headrace/"


class Part(StrEnum):
    """What a certificate's holder does in a cluster."""

    ROUTER = "router"
    WORKER = "worker"
    OPERATOR = "operator"  # reads the state of workers and gives them their roles; a person or a planner


@dataclass(frozen=True, slots=True)
class Identity:
    """`name`: of one worker, by its id; "": of any."""

    cluster: str
    part: Part
    name: str = ""

    @staticmethod
    def from_uri(uri: str) -> Identity | None:
        """None for a name that is not one of ours."""
        fields = uri.removeprefix(_PREFIX).split("/")
        if not uri.startswith(_PREFIX) or len(fields) not in (2, 3) or fields[1] not in list(Part):
            return None
        return Identity(fields[0], Part(fields[1]), unquote(fields[2]) if len(fields) > 2 else "")

    def __str__(self) -> str:
        return f"{_PREFIX}{self.cluster}/{self.part}{'/' if self.name else ''}{self.name}"


CALLER: ContextVar[Identity | None] = ContextVar("caller", default=None)
"""Within a call that `RoleInterceptor` let through: who makes it. None where there is no mutual TLS."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """As PEM. `authority`: who has to have signed the other side's, None: it shows none."""

    chain: bytes
    key: bytes
    authority: bytes | None
    identities: tuple[Identity, ...]

    @property
    def cluster(self) -> str:
        return self.identities[0].cluster


Source = WatchedFiles[Certificates]


def cluster_certificates(tls: TlsSettings) -> Source:
    """Of this process, between processes of ours. Raises InvalidRequest naming what is wrong with the files."""
    assert tls.ca_file and tls.cert_file and tls.key_file
    return _cluster_source(tls.cert_file, tls.key_file, tls.ca_file)


@lru_cache(
    maxsize=16
)  # one for all channels of a process: a rotation half done must not fail those opened meanwhile
def _cluster_source(cert_file: Path, key_file: Path, ca_file: Path) -> Source:
    def read() -> Certificates:
        found = _read(cert_file, key_file, ca_file)
        clusters = {identity.cluster for identity in found.identities}
        if len(clusters) != 1:
            raise ValueError(f"{cert_file} must have names {_PREFIX}CLUSTER/ROLE, all of one cluster")
        return found

    return WatchedFiles("rpc.tls", (cert_file, key_file, ca_file), read)


def front_certificates(rpc: RpcSettings, security: SecuritySettings) -> Source | None:
    """What clients see, and whose certificates they must show. None: the front door is without TLS."""
    cert_file = security.front_cert_file or rpc.tls.cert_file
    key_file = security.front_key_file or rpc.tls.key_file
    if cert_file is None or key_file is None:
        return None
    ca_file = security.client_ca_file
    paths = [path for path in (cert_file, key_file, ca_file) if path is not None]
    return WatchedFiles("security.front_cert_file", paths, lambda: _read(cert_file, key_file, ca_file))


def front_door_context(rpc: RpcSettings, security: SecuritySettings) -> ssl.SSLContext | None:
    """For an HTTP server beside the gRPC one: the same certificates, read again as those are. None: no TLS.

    Raises InvalidRequest for files that can not be used.
    """
    source = front_certificates(rpc, security)
    if source is None:
        return None
    files = (
        security.front_cert_file or rpc.tls.cert_file,
        security.front_key_file or rpc.tls.key_file,
        security.client_ca_file,
    )
    contexts = WatchedFiles(
        "security.front_cert_file", [path for path in files if path], lambda: _ssl_context(*files)
    )
    context = contexts.get()

    def on_hello(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, old: ssl.SSLContext) -> None:
        connection.context = contexts.get()

    context.sni_callback = on_hello  # called for each connection, with or without a name
    return context


def server_credentials(source: Source) -> grpc.ServerCredentials:
    """That follow the files. Clients must show a certificate where the source has an authority."""
    shown = source.get()

    def latest() -> grpc.ServerCertificateConfiguration | None:
        """Before each handshake, on a thread of gRPC's. None: nothing is new."""
        nonlocal shown
        found = source.get()
        if found is shown:
            return None
        shown = found
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown),
        latest,  # pyright: ignore[reportArgumentType] - the stub knows no None
        require_client_authentication=shown.authority is not None,
    )


def channel_credentials(tls: TlsSettings) -> tuple[grpc.ChannelCredentials, str]:
    """For a channel to a worker of this process's cluster, and the name that the worker's certificate must have."""
    found = cluster_certificates(tls).get()
    credentials = grpc.ssl_channel_credentials(found.authority, found.key, found.chain)
    return credentials, f"{Part.WORKER}.{found.cluster}.headrace.internal"


# Everything else of ours is refused: a method that is added needs a line here.
_CALLERS = {
    "/headrace.v1.Worker/Session": {Part.ROUTER},
    "/headrace.v1.Worker/Status": {Part.ROUTER, Part.OPERATOR},
    "/headrace.v1.Worker/SetRole": {Part.OPERATOR},
    **{
        f"/headrace.v1.KvExchange/{method}": {Part.WORKER}
        for method in ("Handshake", "Prefill", "Lease", "Renew", "Release", "Offer")
    },
}


class RoleInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call in by its caller's certificate. Health and reflection are for every certificate of the cluster's
    authority.
    """

    def __init__(self, certificates: Source) -> None:
        self._certificates = certificates

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith("/headrace."):
            return handler
        if handler.response_streaming:
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            checked: Any = self._checked_stream(handler.stream_stream or handler.unary_stream, method)
        else:
            make, checked = grpc.unary_unary_rpc_method_handler, self._checked(handler.unary_unary, method)
        return make(checked, handler.request_deserializer, handler.response_serializer)

    def _checked(
        self, behaviour: Callable[..., Awaitable[Any]], method: str
    ) -> Callable[..., Awaitable[Any]]:
        async def checked(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            CALLER.set(self._caller(context, method))
            return await behaviour(request, context)

        return checked

    def _checked_stream(
        self, behaviour: Callable[..., AsyncIterator[Any]], method: str
    ) -> Callable[..., AsyncIterator[Any]]:
        async def checked(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            CALLER.set(self._caller(context, method))
            async for response in behaviour(request, context):
                yield response

        return checked

    def _caller(self, context: grpc.aio.ServicerContext[Any, Any], method: str) -> Identity:
        """Raises PermissionDenied."""
        uris = [uri.decode(errors="replace") for uri in context.auth_context().get("peer_uri", ())]
        cluster, allowed = self._certificates.get().cluster, _CALLERS.get(method, set())
        for identity in map(Identity.from_uri, uris):
            if identity is not None and identity.cluster == cluster and identity.part in allowed:
                return identity
        raise PermissionDenied(
            f"{method} is for {', '.join(sorted(allowed)) or 'nobody'} of cluster {cluster!r};"
            f" the caller's certificate names {', '.join(uris) or 'none'}"
        )


def _read(cert_file: Path, key_file: Path, ca_file: Path | None) -> Certificates:
    """Raises OSError or ValueError, also for a pair that does not belong together: one of the files is newer."""
    chain, key = cert_file.read_bytes(), key_file.read_bytes()
    authority = ca_file.read_bytes() if ca_file is not None else None
    if authority is not None:
        x509.load_pem_x509_certificates(authority)
    own = x509.load_pem_x509_certificates(chain)[0]
    try:
        fits = load_pem_private_key(key, password=None).public_key() == own.public_key()
    except TypeError:
        raise ValueError(f"{key_file} must not be encrypted") from None
    if not fits:
        raise ValueError(f"{key_file} is not the key of {cert_file}")
    if own.not_valid_after_utc < datetime.now(UTC):
        raise ValueError(f"{cert_file} has expired, on {own.not_valid_after_utc}")
    return Certificates(chain, key, authority, _identities(own))


def _identities(certificate: x509.Certificate) -> tuple[Identity, ...]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return tuple(identity for uri in uris if (identity := Identity.from_uri(uri)) is not None)


def _configuration(found: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(found.key, found.chain)], found.authority)


def _ssl_context(cert_file: Path | None, key_file: Path | None, ca_file: Path | None) -> ssl.SSLContext:
    assert cert_file is not None and key_file is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert_file, key_file)
    if ca_file is not None:
        context.load_verify_locations(ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
