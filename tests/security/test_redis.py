"""The directory over TLS, with passwords from files, and replaced while it is in use."""

from __future__ import annotations

import asyncio
import ssl

import pytest
import redis

from headrace.bench.certificates import DAY, Authority, Files
from headrace.cluster.redis_server import RedisServer
from headrace.config import DirectorySettings
from headrace.directory.redis_directory import RedisDirectory
from headrace.errors import InvalidRequest, Unavailable


class TlsProxy:
    """Mutual TLS before a Redis server: the server that comes by pip knows none."""

    def __init__(self, files: Files, port: int) -> None:
        self._port, self._writers, self._pumps = port, set(), set()
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.ca)
        self._context.load_cert_chain(files.cert, files.key)
        self._context.verify_mode = ssl.CERT_REQUIRED

    async def __aenter__(self) -> TlsProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_) -> None:
        self._server.close()
        await self.cut()
        await self._server.wait_closed()

    async def cut(self) -> None:
        """End all connections."""
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader, writer) -> None:
        to_redis, from_client = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, from_client}
        pumps = {
            asyncio.create_task(_pump(reader, from_client)),
            asyncio.create_task(_pump(to_redis, writer)),
        }
        self._pumps |= pumps
        await asyncio.wait(pumps)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def reach(settings: DirectorySettings) -> None:
    directory = RedisDirectory(settings)
    try:
        await directory.workers()
    finally:
        await directory.close()


async def test_certificates_and_passwords_decide_and_are_replaced_in_use(tmp_path):
    authority, password = Authority(tmp_path), tmp_path / "password"
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other")
    password.write_text("first\n")
    own = authority.issue("client")
    with RedisServer("first") as server:
        async with TlsProxy(authority.issue("redis"), server.port) as proxy:
            good = DirectorySettings(
                url=f"rediss://127.0.0.1:{proxy.port}/0",
                ca_file=authority.ca,
                cert_file=own.cert,
                key_file=own.key,
                password_file=password,
            )
            await reach(good)
            stranger = other.issue("stranger")
            for changes in (
                {"ca_file": other.ca},
                {"cert_file": None, "key_file": None},
                {"cert_file": stranger.cert, "key_file": stranger.key},
                {"password_file": None},
                {"url": f"rediss://localhost:{proxy.port}/0"},  # the certificate names 127.0.0.1 alone
                {"url": f"redis://127.0.0.1:{proxy.port}/0", "ca_file": None, "cert_file": None},
            ):
                with pytest.raises(Unavailable):
                    await reach(good.model_copy(update=changes))
            await replaced_in_use(good, server, proxy, authority)


async def replaced_in_use(
    settings: DirectorySettings, server: RedisServer, proxy: TlsProxy, authority: Authority
) -> None:
    directory = RedisDirectory(settings)
    try:
        await directory.workers()
        with redis.Redis.from_url(server.url) as admin:
            admin.config_set("requirepass", "second")
        settings.password_file.write_text("second")
        authority.issue("client")  # the same files, anew
        await proxy.cut()
        with pytest.raises(Unavailable):
            await directory.workers()  # finds out
        await directory.workers()
        authority.issue("client", valid_for=-DAY)
        await proxy.cut()
        for _ in range(2):
            with pytest.raises(Unavailable):
                await directory.workers()
        authority.issue("client")
        await directory.workers()
    finally:
        await directory.close()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"password_file": "/no/such/file"}, "/no/such/file"),
        ({"url": "rediss://h/0", "ca_file": "/no/such/file"}, "/no/such/file"),
        ({"url": "redis://h/0", "ca_file": "/x"}, "rediss://"),
        ({"url": "redis://:secret@h/0", "password_file": "/x"}, "no user or password"),
    ],
)
def test_mistakes_are_named_at_the_start(changes, named):
    with pytest.raises(InvalidRequest, match=named) as error:
        RedisDirectory(DirectorySettings.model_validate(changes))
    assert "secret" not in str(error.value)
