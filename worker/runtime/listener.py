"""Listener: alone knows how many connections a public port takes, and how long one may be silent.

aiohttp 3.14 waits for the first request of a connection for ever, and takes any number of connections: whoever opens
many and says nothing would use up the process's file descriptors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import cast

from aiohttp import web

from worker.errors import ConfigError

KEEPALIVE_S = 30.0
SERVER = "ticket-router"
"""What answers call the server: aiohttp's own word would tell strangers the versions of Python and aiohttp."""
NO_HTTP = "this is not HTTP/1.1 as this server reads it: mend the request line or the headers\n"
NO_SUCH_EXPECTATION = "the one expectation this server knows is 100-continue: leave out the header Expect\n"
OWN_FAULTS = logging.getLogger("aiohttp.server")
LINGER_S = 2.0
"""The rest of a request that was refused is read for so long, so that the client sees the answer before the end."""


class Listener:
    """Serves one aiohttp application on one port."""

    def __init__(self, app: web.Application, *, max_connections: int, head_s: float, setting: str) -> None:
        """`head_s` is the time until a connection's first request must be there; `setting` names the port's."""
        self._max_connections = max_connections
        self._head_s = head_s
        self._setting = setting
        self._silent: set[asyncio.BaseProtocol] = set()
        app.middlewares.insert(0, self._hear)
        self._server: asyncio.Server | None = None
        # What goes wrong in a handler is told by the application; what aiohttp itself would log are malformed requests,
        # one line each with the client's address.
        mute = logging.Logger("http", logging.CRITICAL + 1)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            logger=mute,
            auto_decompress=False,
            handler_cancellation=True,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGER_S,
            shutdown_timeout=LINGER_S,
        )

    async def start(self, host: str, port: int) -> int:
        """The port that is listened on (`port` 0 takes a free one). Raises ConfigError where it is taken."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            # As many may knock at once as are let in: the rest of a burst would be reset by the kernel.
            self._server = await loop.create_server(self._connect, host, port, backlog=self._max_connections)
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"port {host}:{port} cannot be opened ({error.strerror}); set {self._setting} to a free one"
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _connect(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None  # noqa: S101  (for the type checker: set up before anything listens)
        if len(server.connections) >= self._max_connections:
            return _Refused()
        handler = server()
        handler.__class__ = _Discreet  # aiohttp 3.14 makes its own kind and none other
        self._silent.add(handler)
        asyncio.get_running_loop().call_later(self._head_s, self._end_silent, handler)
        return handler

    @web.middleware
    async def _hear(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """A whole request head has come on this connection."""
        self._silent.discard(request.protocol)
        return await handler(request)

    def _end_silent(self, handler: web.RequestHandler) -> None:
        if handler in self._silent:
            self._silent.discard(handler)
            handler.force_close()


class _Discreet(web.RequestHandler):
    """Answers what no handler sees in one fixed sentence: aiohttp's own quotes the line that was sent. And no answer
    says what serves it."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            OWN_FAULTS.error("a handler failed", exc_info=exc)
        return super().handle_error(request, status, exc, NO_HTTP)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPExpectationFailed):  # raised before any middleware
            resp.text = NO_SUCH_EXPECTATION
        resp.headers["Server"] = SERVER
        return await super().finish_response(request, resp, start_time)


class _Refused(asyncio.Protocol):
    """A connection too many: ended before a byte is read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()
