"""Start and stop of the HTTP entrance, on the router's own event loop."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Generator as Generating
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from headrace.config import HttpSettings
from headrace.errors import Unavailable
from router.http.connection import connection_class

_START_TIMEOUT_S = 10.0


class HttpServer:
    """`start`, then `stop`."""

    def __init__(
        self,
        app: ASGIApp,
        settings: HttpSettings,
        drain_timeout_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=connection_class(settings),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # its warnings are about clients, and anybody can cause them
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ssl_context_factory=None if tls is None else lambda *_: tls,
        )
        self._scheme = "http" if tls is None else "https"
        config.timeout_graceful_shutdown = drain_timeout_s  # type: ignore[assignment] - seconds, not only whole ones
        self._server = _Server(config)

    async def start(self, host: str, port: int, advertise_host: str = "") -> str:
        """Bind and serve. Returns the URL. Raises Unavailable when the port is taken."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise Unavailable(f"can not serve HTTP on {host}:{port}: {error}; is the port taken?") from None
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="HTTP server")
        async with asyncio.timeout(_START_TIMEOUT_S):
            await self._server.listening.wait()
        host = advertise_host or host
        return f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        """Take no more connections, let running requests end within the drain time, cancel the rest."""
        self._server.should_exit = True
        await self._serving


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Generating[None]:
        yield  # signals are the process's own business
