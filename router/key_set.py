"""The public keys of an identity provider (JWKS, RFC 7517), from a file or over https.

Fetched when they are older than some minutes or a token names a key that is not among them, never more often than
every ten seconds, whatever strangers send: a request waits for one fetch at most, and all share it. While fetching
fails, the keys that are known serve on, for a day at most.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

import jwt
import structlog

from headrace.errors import InvalidRequest, Unavailable
from headrace.watched_files import WatchedFiles

log = structlog.get_logger()

_MAX_AGE_S = 300.0
_MAX_STALE_S = 86400.0
_MIN_INTERVAL_S = 10.0
_FETCH_TIMEOUT_S = 5.0
_MAX_BYTES = 1 << 20
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

Keys = dict[str | None, jwt.PyJWK]  # by kid


class KeySet(Protocol):
    async def find(self, kid: str | None) -> jwt.PyJWK | None:
        """None: there is no such key. Raises Unavailable when the keys can not be had."""
        ...


def key_set(where: str) -> KeySet:
    """`where`: https:// address (http:// on loopback), or a file. Raises InvalidRequest."""
    parts = urlsplit(where)
    if parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK):
        return RemoteKeys(where)
    if "://" in where:
        raise InvalidRequest("security.jwt.jwks", where, "an https:// address or a file")
    return FileKeys(Path(where))


class FileKeys:
    def __init__(self, path: Path) -> None:
        self._keys = WatchedFiles("security.jwt.jwks", [path], lambda: _parsed(path.read_bytes()))

    async def find(self, kid: str | None) -> jwt.PyJWK | None:
        return self._keys.get().get(kid)


class RemoteKeys:
    """Used on the event loop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._keys: Keys = {}
        self._fetched_at = self._tried_at = float("-inf")
        self._fetching: asyncio.Task[None] | None = None

    async def find(self, kid: str | None) -> jwt.PyJWK | None:
        now = time.monotonic()
        if (kid not in self._keys or now - self._fetched_at > _MAX_AGE_S) and (
            self._fetching is not None or now - self._tried_at >= _MIN_INTERVAL_S
        ):
            await self._fetch()
        if time.monotonic() - self._fetched_at > _MAX_STALE_S:
            raise Unavailable("the identity provider's keys can not be had", retry_after_s=_MIN_INTERVAL_S)
        return self._keys.get(kid)

    async def _fetch(self) -> None:
        """One for all who wait; it goes on when one of them leaves."""
        if self._fetching is None:
            self._tried_at = time.monotonic()
            self._fetching = asyncio.create_task(self._fetch_once(), name="fetch of the JWKS")
        await asyncio.shield(self._fetching)

    async def _fetch_once(self) -> None:
        try:
            async with asyncio.timeout(2 * _FETCH_TIMEOUT_S):
                self._keys = await asyncio.to_thread(lambda: _parsed(_download(self._url)))
            self._fetched_at = time.monotonic()
        except (OSError, ValueError) as error:
            log.warning("keys of the identity provider not fetched", url=self._url, error=str(error))
        finally:
            self._fetching = None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Not to http://, nor to anywhere else that was not configured."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _download(url: str) -> bytes:
    with _OPENER.open(url, timeout=_FETCH_TIMEOUT_S) as response:
        data = response.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"more than {_MAX_BYTES} bytes")
    return data


def _parsed(data: bytes) -> Keys:
    """Raises ValueError. Keys of kinds that are not known here are passed over."""
    try:
        found = jwt.PyJWKSet.from_dict(json.loads(data)).keys
    except (jwt.PyJWTError, AttributeError, TypeError) as error:
        raise ValueError(f"no key set: {error}") from None
    return {key.key_id: key for key in found if key.public_key_use in (None, "sig")}
