"""Whether a process may listen where it is told to: unprotected on loopback only, unless that is asked for by name."""

from __future__ import annotations

import ipaddress

from headrace.config import Settings
from headrace.errors import InvalidRequest
from headrace.rpc.tls import Part, cluster_certificates


def unprotected(settings: Settings, part: Part) -> list[str]:
    """What is missing, in words. Empty: everything is set up."""
    missing: list[str] = []
    if not settings.rpc.tls.enabled:
        missing.append("no TLS between processes (rpc.tls)")
    if part == Part.ROUTER:
        if not settings.rpc.tls.enabled and settings.security.front_cert_file is None:
            missing.append("no TLS at the front door (security.front_cert_file)")
        if not settings.security.asks_for_credentials:
            missing.append("no credentials at the front door (security.api_keys_file, security.jwt)")
    return missing


def check_exposure(settings: Settings, part: Part, name: str) -> list[str]:
    """Returns what is missing, for a warning. Raises InvalidRequest when that is not allowed here, and for a
    certificate that is not good for this process.
    """
    missing = check_hosts(settings, part)
    if settings.rpc.tls.enabled:
        _check_certificate(settings, part, name)
    return missing


def check_hosts(settings: Settings, part: Part) -> list[str]:
    """As `check_exposure`, without a look at files: they can be another machine's."""
    missing = unprotected(settings, part)
    hosts = [settings.rpc.host]
    if part == Part.ROUTER and settings.http.enabled:
        hosts.append(settings.http.host or settings.rpc.host)
    for host in hosts:
        if missing and not (is_loopback(host) or settings.security.allow_insecure):
            raise InvalidRequest(
                "rpc.host" if host == settings.rpc.host else "http.host",
                host,
                f"{'; '.join(missing)}: only loopback then, or set security.allow_insecure",
            )
    return missing


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _check_certificate(settings: Settings, part: Part, name: str) -> None:
    identities = cluster_certificates(settings.rpc.tls).get().identities
    fitting = [identity for identity in identities if identity.part == part]
    cluster = settings.directory.cluster
    if not any(i.cluster == cluster and i.name in ("", name) for i in fitting):
        shown = ", ".join(map(str, identities))
        raise InvalidRequest(
            "rpc.tls.cert_file", shown, f"must name a {part} of cluster {cluster!r}, any or {name!r}"
        )
