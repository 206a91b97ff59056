"""Servers: options, port, TLS, health and reflection. One per process."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace.config import RpcSettings, SecuritySettings
from headrace.errors import Unavailable
from headrace.rpc.status import ErrorInterceptor
from headrace.rpc.tls import (
    RoleInterceptor,
    cluster_certificates,
    front_certificates,
    server_credentials,
)

LIVENESS = "liveness"  # a service by this name is healthy for as long as the process answers

_MIN_PING_INTERVAL_MS = 1000
_MAX_STREAMS = 8192


class RpcServer:
    """A gRPC server with standard health (v1) and reflection. Nobody is SERVING until `set_ready`."""

    def __init__(
        self, settings: RpcSettings, services: Sequence[str], front: SecuritySettings | None = None
    ) -> None:
        """`services` are full names, for health and reflection. Add servicers to `grpc_server`, then `start`.

        `front`: this is the front door; its clients are strangers. None: it is for processes of ours, and where
        `rpc.tls` is set up each call needs a certificate with the right role. Raises InvalidRequest for files that can
        not be used.
        """
        self._settings = settings
        self._services = services
        self.port = 0
        self.health = health.aio.HealthServicer()
        interceptors: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor()]
        if front is not None:
            self._certificates = front_certificates(settings, front)
        elif settings.tls.enabled:
            self._certificates = cluster_certificates(settings.tls)
            interceptors.append(RoleInterceptor(self._certificates))
        else:
            self._certificates = None
        self.grpc_server = grpc.aio.server(interceptors=interceptors, options=_options(settings))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc_server)
        reflection.enable_server_reflection(
            (*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc_server
        )

    async def start(self) -> str:
        """Bind and serve. Returns the address that others reach this process by."""
        await self.set_ready(ready=False)
        # Liveness is that there is an answer: the event loop turns.
        await self.health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        wanted = f"{self._settings.host}:{self._settings.port}"
        try:
            if self._certificates is None:
                self.port = self.grpc_server.add_insecure_port(wanted)
            else:
                self.port = self.grpc_server.add_secure_port(wanted, server_credentials(self._certificates))
        except RuntimeError as error:
            raise Unavailable(f"can not listen on {wanted}: {error}; is the port taken?") from None
        await self.grpc_server.start()
        return f"{self._settings.advertise_host or self._settings.host}:{self.port}"

    async def set_ready(self, *, ready: bool, service: str | None = None) -> None:
        """Of one service, or of all and the server as a whole."""
        status = health_pb2.HealthCheckResponse
        state = status.SERVING if ready else status.NOT_SERVING
        for name in ("", *self._services) if service is None else (service,):
            await self.health.set(name, state)

    async def stop(self, grace_s: float) -> None:
        await self.health.enter_graceful_shutdown()
        await self.grpc_server.stop(grace_s)


def _options(settings: RpcSettings) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.keepalive_time_ms", int(settings.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(settings.keepalive_timeout_s * 1000)),  # see headrace.rpc.channel
        # Idle clients may ping as often as our own channels do; the default answers GOAWAY "too many pings".
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # Of one connection; calls beyond wait at the client. Many more than a router admits.
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        # Two processes on one port would each answer half of the calls.
        ("grpc.so_reuseport", 0),
    ]
