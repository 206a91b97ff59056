"""Channels to workers: message limits and keepalive equal to the servers', mutual TLS where it is set up."""

from __future__ import annotations

import grpc

from headrace.config import RpcSettings
from headrace.rpc.tls import channel_credentials


def open_channel(address: str, settings: RpcSettings) -> grpc.aio.Channel:
    """A channel that notices a silent peer within keepalive_s + keepalive_timeout_s. The caller closes it.

    With TLS it carries the certificates of now, for as long as it lives; that of the other side must be a worker's.
    """
    options = _options(settings)
    if not settings.tls.enabled:
        return grpc.aio.insecure_channel(address, options=options)
    credentials, name = channel_credentials(settings.tls)
    return grpc.aio.secure_channel(
        address, credentials, options=[*options, ("grpc.ssl_target_name_override", name)]
    )


def _options(settings: RpcSettings) -> list[tuple[str, int | str]]:
    return [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.keepalive_time_ms", int(settings.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout_s * 1000)),
        # Without this a ping that nobody answers ends the connection only after a minute (grpcio 1.85).
        ("grpc.http2.ping_timeout_ms", int(settings.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A peer that restarts is tried again soon; the default backs off to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Each channel its own connection: a broken one is never shared with a healthy peer object.
        ("grpc.use_local_subchannel_pool", 1),
    ]
