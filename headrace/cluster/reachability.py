"""The address that others reach this process by, where no setting names it."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from headrace.config import Settings
from headrace.errors import InvalidRequest, Unavailable

_DEFAULT_REDIS_PORT = 6379


def with_advertised_host(settings: Settings) -> Settings:
    """`rpc.advertise_host` filled in for a process that listens everywhere: the address from which it reaches the
    directory, which is where others are, too.

    Raises InvalidRequest where that tells nothing, and Unavailable where the directory's name is not known.
    """
    rpc = settings.rpc
    if rpc.advertise_host or not _is_everywhere(rpc.host):
        return settings
    found = _own_address_towards(settings.directory.url)
    return settings.model_copy(update={"rpc": rpc.model_copy(update={"advertise_host": found})})


def _own_address_towards(url: str) -> str:
    parts = urlsplit(url)
    if not parts.hostname:
        raise InvalidRequest(
            "rpc.advertise_host",
            "",
            "must be set, when rpc.host is every address and the directory is a file",
        )
    try:
        [family, kind, protocol, _, target], *_ = socket.getaddrinfo(
            parts.hostname, parts.port or _DEFAULT_REDIS_PORT, type=socket.SOCK_DGRAM
        )
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # chooses a way; sends nothing
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise Unavailable(f"no way to the directory's host {parts.hostname}: {error}") from None
    return f"[{own}]" if ":" in own else own


def _is_everywhere(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False
