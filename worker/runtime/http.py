"""The health port: /livez says the process works, /readyz that it consumes; /status and /metrics say the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import orjson
from aiohttp import web

from worker.runtime.listener import Listener

MAX_CONNECTIONS = 256
"""Probes and scrapers need a handful."""
HEAD_S = 10.0


class Condition(Protocol):
    """What a process says of itself at one moment."""

    @property
    def ready(self) -> bool: ...

    def why_not(self) -> str:
        """One line, where it is not ready."""

    def degraded(self) -> str | None:
        """One line on what is wrong although it is ready."""

    def shown(self) -> Mapping[str, object]:
        """Everything, for JSON."""


class HealthServer:
    """Serves GET only. `status` is None until the worker is set up; `waiting_for` says for what until then."""

    def __init__(
        self,
        status: Callable[[], Condition | None],
        waiting_for: Callable[[], str | None],
        metrics: Callable[[], str],
    ) -> None:
        self._status = status
        self._waiting_for = waiting_for
        self._metrics = metrics
        app = web.Application()
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/status", self._show)
        app.router.add_get("/metrics", self._expose)
        self._listener = Listener(app, max_connections=MAX_CONNECTIONS, head_s=HEAD_S, setting="ROUTER_HTTP_PORT")

    async def start(self, host: str, port: int) -> int:
        """The port that is listened on (`port` 0 takes a free one). Raises ConfigError where it is taken."""
        return await self._listener.start(host, port)

    async def aclose(self) -> None:
        await self._listener.aclose()

    async def _livez(self, _: web.Request) -> web.Response:
        # That this answer is given at all is the proof: it comes from the loop that does the work.
        return web.Response(text="alive\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        status = self._status()
        if status is not None and status.ready:
            return web.Response(text=said_ready(status))
        return web.Response(status=503, text=f"not ready: {self._why_not(status)}\n")

    async def _show(self, _: web.Request) -> web.Response:
        status = self._status()
        body: dict[str, object] = {"ready": bool(status and status.ready), "waiting_for": self._waiting_for()}
        if status is not None:
            body |= status.shown()
        return web.Response(body=orjson.dumps(body), content_type="application/json")

    async def _expose(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics().encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    def _why_not(self, status: Condition | None) -> str:
        return (self._waiting_for() or "starting") if status is None else status.why_not()


def said_ready(status: Condition) -> str:
    """The body of /readyz where the answer is 200. Its first word is all that a machine needs."""
    degraded = status.degraded()
    return "ready\n" if degraded is None else f"ready, but degraded: {degraded}\n"
