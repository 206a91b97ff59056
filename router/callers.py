"""Who asks. Every entrance turns a credential into a caller before it looks at the request.

    Authorization: Bearer hr_{id}_{secret}      an API key: its hash is in a file
    Authorization: Bearer eyJ…                  a token (JWT) of an identity provider, checked with its published keys

The tenant comes from the credential and from nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Protocol

import jwt
import structlog
import yaml
from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)

from headrace.config import JwtSettings, SecuritySettings
from headrace.errors import InvalidRequest, Unauthenticated
from headrace.watched_files import WatchedFiles
from router.key_set import KeySet, key_set

log = structlog.get_logger()

KEY_PREFIX = "hr_"
MAX_CREDENTIAL_BYTES = 16 << 10
_ALGORITHMS = ("RS256", "ES256")  # those with a public key; the rest, HS256 and "none" above all, is refused
_MIN_SECRET_BYTES = 32
# No control characters, no spaces: it stands in logs, metrics and settings.
Tenant = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:@/-]{1,128}$")]
_TENANT: TypeAdapter[str] = TypeAdapter(Tenant)


@dataclass(frozen=True, slots=True)
class Caller:
    """`tenant` has its own part of the queue, and of the caches: no other tenant finds its blocks there."""

    tenant: str = ""  # "": the default one
    cache_salt: str = ""  # of the tenant's block hashes; "": its name


class Callers(Protocol):
    async def caller(self, authorization: str) -> Caller:
        """By the request's `authorization` header, "" where there is none. Raises Unauthenticated."""
        ...


class Anyone:
    """For a router that asks for no credentials: all are the default tenant."""

    async def caller(self, authorization: str) -> Caller:
        del authorization
        return Caller()


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ApiKey(_Record):
    """What is kept of a key. `sha256` is of the secret: 256 random bits need no slow hash."""

    id: str = Field(pattern=r"^[0-9a-f]{8,64}$")
    tenant: Tenant
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    expires: AwareDatetime | None = None
    disabled: bool = False


class KeyFile(_Record):
    keys: list[ApiKey] = []


def read_key_file(path: Path) -> KeyFile:
    """Raises OSError or ValueError, without the content."""
    try:
        found = KeyFile.model_validate(yaml.safe_load(path.read_text()) or {})
    except yaml.YAMLError:
        raise ValueError("it is no YAML") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if len({key.id for key in found.keys}) != len(found.keys):
        raise ValueError("two keys have one id")
    return found


class Credentials:
    """Callers that have to say who they are. The files are read again when they change."""

    def __init__(self, settings: SecuritySettings) -> None:
        """Raises InvalidRequest for files that can not be used."""
        self._keys = _api_keys(settings.api_keys_file) if settings.api_keys_file else None
        self._tokens = _Tokens(settings.jwt) if settings.jwt.jwks else None
        self._secret = _cache_secret(settings.cache_secret_file) if settings.cache_secret_file else None

    async def caller(self, authorization: str) -> Caller:
        scheme, _, credential = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not credential:
            raise Unauthenticated("a credential is needed: authorization: Bearer …")
        if len(credential) > MAX_CREDENTIAL_BYTES:
            raise Unauthenticated(f"the credential is longer than {MAX_CREDENTIAL_BYTES} bytes")
        tenant = await self._tenant(credential.strip())
        return Caller(tenant, self._salt(tenant))

    async def _tenant(self, credential: str) -> str:
        if self._keys is not None and credential.startswith(KEY_PREFIX):
            return _tenant_of_key(self._keys.get(), credential)
        if self._tokens is not None:
            return await self._tokens.tenant(credential)
        raise Unauthenticated("the credential is not known")

    def _salt(self, tenant: str) -> str:
        """With a secret, who knows a prompt and its tenant can still not name its blocks."""
        if self._secret is None:
            return tenant
        return hmac.new(self._secret, tenant.encode(), hashlib.sha256).hexdigest()


def make_callers(settings: SecuritySettings) -> Callers:
    """Raises InvalidRequest for files that can not be used."""
    return Credentials(settings) if settings.asks_for_credentials else Anyone()


class _Tokens:
    """JWTs of one issuer, for one audience."""

    def __init__(self, settings: JwtSettings) -> None:
        self._settings = settings
        self._keys: KeySet = key_set(settings.jwks)

    async def tenant(self, token: str) -> str:
        """Raises Unauthenticated; Unavailable when the keys were never to be had."""
        try:
            header = jwt.get_unverified_header(token)
        except jwt.InvalidTokenError:
            raise Unauthenticated("the credential is not known") from None
        if header.get("alg") not in _ALGORITHMS:
            raise Unauthenticated(f"tokens must be signed with {' or '.join(_ALGORITHMS)}")
        key = await self._keys.find(header.get("kid"))
        if key is None:
            raise Unauthenticated("the token's key is not known")
        return self._checked(token, key)

    def _checked(self, token: str, key: jwt.PyJWK) -> str:
        settings = self._settings
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=list(_ALGORITHMS),
                audience=settings.audience,
                issuer=settings.issuer,
                leeway=settings.leeway_s,
                options={"require": ["exp", "iss", "aud", settings.tenant_claim]},
            )
            return _TENANT.validate_python(claims[settings.tenant_claim])
        except jwt.InvalidTokenError as error:
            raise Unauthenticated(f"the token is not accepted: {error}") from None
        except ValidationError:
            raise Unauthenticated(f"the token's {settings.tenant_claim!r} is no name of a tenant") from None


def _api_keys(path: Path) -> WatchedFiles[dict[str, ApiKey]]:
    return WatchedFiles(
        "security.api_keys_file", [path], lambda: {key.id: key for key in read_key_file(path).keys}
    )


def _tenant_of_key(keys: dict[str, ApiKey], credential: str) -> str:
    """One answer for all that is wrong with a key, but its end: that its owner may know."""
    key_id, _, secret = credential.removeprefix(KEY_PREFIX).partition("_")
    key = keys.get(key_id)
    given = hashlib.sha256(secret.encode(errors="replace")).hexdigest()
    if key is None or not hmac.compare_digest(given, key.sha256) or key.disabled:
        raise Unauthenticated("the API key is not known")
    if key.expires is not None and key.expires <= datetime.now(UTC):
        raise Unauthenticated(f"the API key has expired, on {key.expires:%Y-%m-%d}")
    return key.tenant


def _cache_secret(path: Path) -> bytes:
    """Read once: with another secret all that is cached would be lost, and routers would disagree meanwhile."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise InvalidRequest("security.cache_secret_file", str(path), f"can not be read: {error}") from None
    if len(secret) < _MIN_SECRET_BYTES:
        raise InvalidRequest(
            "security.cache_secret_file", str(path), f"must hold {_MIN_SECRET_BYTES} bytes at least"
        )
    return secret
