"""The directory in Redis or Valkey. Built by the composition roots; used by Publisher, Watcher and `headrace status`.

    headrace:{cluster}:worker:<id>                 hash, expires: record (JSON), incarnation, sequence of its last event
    headrace:{cluster}:workers                     sorted set: worker id by the time its record expires (ms)
    headrace:{cluster}:blocks:<id>:<incarnation>   set of block hash + tier (17 bytes), expires with the record
    headrace:{cluster}:events                      stream, bounded: what watchers follow

The braces are part of the keys: with Redis Cluster all keys of one cluster of ours lie on one node. A script
makes each write one transaction that first looks who holds the worker id. Times are the server's.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio
import redis.exceptions
import structlog
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError, ResponseError

from headrace.block_hash import DIGEST_BYTES
from headrace.config import DirectorySettings
from headrace.directory.base import BlockSnapshot
from headrace.directory.records import (
    DirectoryEvent,
    EventKind,
    WorkerRecord,
    event_from_fields,
    event_to_fields,
    join_entries,
    read_entry,
    record_from_json,
    record_to_json,
)
from headrace.errors import InvalidRequest, Unavailable
from headrace.tier import Tier

log = structlog.get_logger()

_CONNECT_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 3.0  # for one operation, its connection included
_MAX_BLOCK_S = 1.0  # one blocking read; shorter than the socket's own limit
_MAX_CONNECTIONS = 8  # one per task that uses this object at a time
_MAX_EVENTS = 4096  # kept in the stream; a watcher that falls behind further reads the sets again
_MAX_EVENTS_READ = 512

_WRITE = """
local worker, names, blocks, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local mode, id, incarnation, sequence = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local ttl_ms, record, stored, removed = tonumber(ARGV[5]), ARGV[6], ARGV[7], ARGV[8]
local width, num_tiers, max_events, event_fields = tonumber(ARGV[9]), tonumber(ARGV[10]), ARGV[11], {unpack(ARGV, 12)}

local holder = redis.call('HGET', worker, 'incarnation')
if mode == 'publish' then
  if holder ~= incarnation or tonumber(redis.call('HGET', worker, 'sequence')) ~= sequence - 1 then return 0 end
else
  if mode == 'register' and holder and holder ~= incarnation then return 0 end
  redis.call('DEL', blocks)
end

-- Each entry of so many bytes: its members of the set, made by `members(chunk, entry)`.
local function each(command, joined, size, members)
  local chunk = {}
  for start = 1, #joined, size do
    members(chunk, string.sub(joined, start, start + size - 1))
    if #chunk >= 1000 or start + size > #joined then
      redis.call(command, blocks, unpack(chunk))
      chunk = {}
    end
  end
end
local function in_any_tier(chunk, entry)
  for tier = 0, num_tiers - 1 do chunk[#chunk + 1] = string.sub(entry, 1, width) .. string.char(tier) end
end
local function as_it_is(chunk, entry) chunk[#chunk + 1] = entry end
-- A block is in the set once, in the tier it was stored in last.
if mode == 'publish' then each('SREM', stored, width + 1, in_any_tier) end
each('SADD', stored, width + 1, as_it_is)
each('SREM', removed, width, in_any_tier)

local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('HSET', worker, 'record', record, 'incarnation', incarnation, 'sequence', sequence)
redis.call('PEXPIRE', worker, ttl_ms)
redis.call('PEXPIRE', blocks, ttl_ms)
redis.call('ZREMRANGEBYSCORE', names, '-inf', now_ms)
redis.call('ZADD', names, now_ms + ttl_ms, id)
redis.call('XADD', events, 'MAXLEN', '~', max_events, '*', unpack(event_fields))
return 1
"""

# Of one who acts alone. KEYS: the claim. ARGV: who, ms to live; 0: give it up.
_CLAIM = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  return 0
end
if tonumber(ARGV[2]) > 0 then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
else
  redis.call('DEL', KEYS[1])
end
return 1
"""

_REMOVE = """
local worker, names, blocks, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
if redis.call('HGET', worker, 'incarnation') == ARGV[2] then
  redis.call('DEL', worker)
  redis.call('ZREM', names, ARGV[1])
end
redis.call('DEL', blocks)
redis.call('XADD', events, 'MAXLEN', '~', ARGV[3], '*', unpack(ARGV, 4))
"""


def shown_url(url: str) -> str:
    """The URL for messages and logs: no password, and nothing that could hold a part of one."""
    scheme = url.partition(":")[0]
    try:
        parts = urlsplit(url)
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return f"{scheme}://…"
    user = "" if parts.password is None else f"{parts.username or ''}:***@"
    return f"{parts.scheme}://{user}{parts.hostname or ''}{port}{parts.path}"


class _FromFile(CredentialProvider):
    """Asked for each new connection, so that a password can be replaced while we run."""

    def __init__(self, settings: DirectorySettings) -> None:
        self._settings = settings

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        path = self._settings.password_file
        assert path is not None
        try:
            password = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise redis.exceptions.ConnectionError(f"directory.password_file {path}: {error}") from None
        return (self._settings.username, password) if self._settings.username else (password,)


class _TlsConnection(SSLConnection):
    """Trusts `ca_file` alone where there is one, and shows the certificate that is in the files now."""

    def __init__(self, settings: DirectorySettings, **options: Any) -> None:
        self._settings = settings
        super().__init__(**options)

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = _ssl_context(self._settings)
        return super()._connection_arguments()


def _connection_options(settings: DirectorySettings) -> dict[str, Any]:
    """Raises ValueError for a URL that Redis clients do not know."""
    options: dict[str, Any] = {**parse_url(settings.url)}
    if settings.password_file is not None:
        if options.pop("password", None) or options.pop("username", None):
            raise InvalidRequest(
                "directory.password_file",
                str(settings.password_file),
                "the URL must have no user or password then",
            )
        options["credential_provider"] = _FromFile(settings)
    if options.get("connection_class") is SSLConnection:
        options["connection_class"] = _TlsConnection
        options["settings"] = settings
    elif settings.ca_file or settings.cert_file:
        raise InvalidRequest(
            "directory.url", shown_url(settings.url), "directory.ca_file and cert_file need rediss://"
        )
    return options


def _check_files(settings: DirectorySettings) -> None:
    """At the start, so that a mistake does not look like a directory that is away. Raises InvalidRequest."""
    try:
        if settings.password_file is not None:
            settings.password_file.read_text()
        if settings.ca_file or settings.cert_file:
            _ssl_context(settings)
    except (OSError, UnicodeDecodeError) as error:
        files = (settings.password_file, settings.ca_file, settings.cert_file, settings.key_file)
        shown = ", ".join(str(path) for path in files if path)
        raise InvalidRequest("directory", shown, f"can not be read: {error}") from None


def _ssl_context(settings: DirectorySettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.ca_file)
    if settings.cert_file is not None:
        context.load_cert_chain(settings.cert_file, settings.key_file)
    return context


class RedisDirectory:
    """Implements `Directory`. Connects when first used; one object serves any number of tasks of one event loop."""

    def __init__(self, settings: DirectorySettings) -> None:
        """Raises InvalidRequest for a URL that Redis clients do not know."""
        self._shown_url = shown_url(settings.url)
        self._ttl_ms = max(1, round(settings.worker_ttl_s * 1000))
        self._prefix = f"headrace:{{{settings.cluster}}}"
        try:
            pool = redis.asyncio.BlockingConnectionPool(
                **_connection_options(settings),
                max_connections=_MAX_CONNECTIONS,
                timeout=_ANSWER_TIMEOUT_S,
                # `_border` is the limit. This one uses asyncio.wait_for, which before Python 3.12 loses
                # cancellations.
                socket_timeout=None,
                socket_connect_timeout=_CONNECT_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),  # the callers have their own, with back-off
            )
        except ValueError:  # its text may hold the password
            raise InvalidRequest(
                "directory.url", self._shown_url, "write redis://, rediss:// or unix://"
            ) from None
        _check_files(settings)
        self._redis: Any = redis.asyncio.Redis.from_pool(pool)  # its answers' types hang on its options
        self._write_script = self._redis.register_script(_WRITE)
        self._remove_script = self._redis.register_script(_REMOVE)
        self._claim_script = self._redis.register_script(_CLAIM)

    async def register(
        self, record: WorkerRecord, sequence: int, blocks: Mapping[bytes, Tier], *, take_over: bool
    ) -> bool:
        event = DirectoryEvent(record.worker_id, record.incarnation, sequence, blocks, kind=EventKind.RELOAD)
        return await self._write("take_over" if take_over else "register", record, event)

    async def publish(self, record: WorkerRecord, event: DirectoryEvent) -> bool:
        return await self._write("publish", record, event)

    async def remove(self, worker_id: str, incarnation: str) -> None:
        event = DirectoryEvent(worker_id, incarnation, 0, kind=EventKind.LEFT)
        async with self._border():
            await self._remove_script(
                keys=self._keys(worker_id, incarnation),
                args=[worker_id, incarnation, _MAX_EVENTS, *_flat(event)],
            )

    async def workers(self) -> dict[WorkerRecord, float]:
        async with self._border():
            names = [
                name.decode(errors="replace")
                for name in await self._redis.zrange(f"{self._prefix}:workers", 0, -1)
            ]
            pipeline = self._redis.pipeline(transaction=False)
            for name in names:
                pipeline.hmget(self._worker_key(name), "record", "incarnation")
                pipeline.pttl(self._worker_key(name))
            # One strange key is no reason to fail all others.
            answers = await pipeline.execute(raise_on_error=False)
        found: dict[WorkerRecord, float] = {}
        for name, stored, ttl_ms in zip(names, answers[::2], answers[1::2], strict=True):
            record = _read_record(name, stored)
            if record is not None and ttl_ms > 0:
                found[record] = ttl_ms / 1000
        return found

    async def blocks(self, worker_id: str, incarnation: str) -> BlockSnapshot | None:
        worker, _, blocks, _ = self._keys(worker_id, incarnation)
        async with self._border():
            pipeline = self._redis.pipeline(transaction=True)
            pipeline.hmget(worker, "incarnation", "sequence")
            pipeline.smembers(blocks)
            stored, entries = await pipeline.execute(raise_on_error=False)
        if isinstance(stored, ResponseError) or isinstance(entries, ResponseError):
            log.warning("worker's blocks ignored", worker=worker_id, reason=f"{stored!r:.80} {entries!r:.80}")
            return None
        holder, sequence = stored
        if holder != incarnation.encode() or sequence is None or not sequence.isdigit():
            return None
        return BlockSnapshot(int(sequence), _read_blocks(worker_id, entries))

    async def events(self, after: str, timeout_s: float) -> tuple[str, list[DirectoryEvent]]:
        stream = f"{self._prefix}:events"
        async with self._border():
            if not after:
                last = await self._redis.xrevrange(stream, count=1)
                return (last[0][0].decode() if last else "0-0"), []
            block_ms = max(1, round(min(timeout_s, _MAX_BLOCK_S) * 1000))  # 0 would wait for ever
            answer = await self._redis.xread({stream: after}, count=_MAX_EVENTS_READ, block=block_ms)
        entries = answer[0][1] if answer else []
        events = [event for _, fields in entries if (event := event_from_fields(fields)) is not None]
        return (entries[-1][0].decode() if entries else after), events

    async def claim(self, name: str, who: str, ttl_s: float) -> bool:
        """To be the only one who does `name`, from now on for `ttl_s`; 0: not any more. False: somebody else is."""
        async with self._border():
            key = f"{self._prefix}:claim:{name}"
            return bool(await self._claim_script(keys=[key], args=[who, round(ttl_s * 1000)]))

    async def close(self) -> None:
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    async def _write(self, mode: str, record: WorkerRecord, event: DirectoryEvent) -> bool:
        arguments = [
            mode,
            record.worker_id,
            record.incarnation,
            event.sequence,
            self._ttl_ms,
            record_to_json(record),
            join_entries(event.stored),
            b"".join(event.removed),
            DIGEST_BYTES,
            len(Tier),
            _MAX_EVENTS,
            *_flat(event),
        ]
        async with self._border():
            return bool(
                await self._write_script(
                    keys=self._keys(record.worker_id, record.incarnation), args=arguments
                )
            )

    def _worker_key(self, worker_id: str) -> str:
        return f"{self._prefix}:worker:{worker_id}"

    def _keys(self, worker_id: str, incarnation: str) -> list[str]:
        return [
            self._worker_key(worker_id),
            f"{self._prefix}:workers",
            f"{self._prefix}:blocks:{worker_id}:{incarnation}",
            f"{self._prefix}:events",
        ]

    @asynccontextmanager
    async def _border(self) -> AsyncGenerator[None]:
        """Every operation has a deadline, and fails as Unavailable."""
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                yield
        except TimeoutError:
            raise Unavailable(
                f"directory at {self._shown_url} gave no answer within {_ANSWER_TIMEOUT_S:g} s"
            ) from None
        except (RedisError, OSError) as error:
            # A primary that was demoted answers on, read-only: the next call connects to whoever has its name now.
            await self._redis.connection_pool.disconnect(inuse_connections=False)
            raise Unavailable(f"directory at {self._shown_url}: {error or type(error).__name__}") from error


def _flat(event: DirectoryEvent) -> list[Any]:
    return [part for field in event_to_fields(event).items() for part in field]


def _read_blocks(worker_id: str, entries: Iterable[bytes]) -> dict[bytes, Tier]:
    blocks: dict[bytes, Tier] = {}
    for entry in entries:
        try:
            digest, tier = read_entry(entry)
        except ValueError as error:
            log.warning("worker's block ignored", worker=worker_id, reason=str(error))
        else:
            blocks[digest] = tier
    return blocks


def _read_record(name: str, stored: Any) -> WorkerRecord | None:
    """`stored`: answer to HMGET record, incarnation; its fields are None once the hash has expired."""
    if isinstance(stored, ResponseError):
        log.warning("worker record ignored", worker=name, reason=str(stored))
        return None
    data, incarnation = stored
    if data is None or incarnation is None:
        return None
    return record_from_json(data, name, incarnation.decode(errors="replace"))
