"""How a running worker is asked about itself: its health port's /metrics and /readyz, within bounds."""

from __future__ import annotations

from typing import Final

from worker.adapters.http_exchange import SMALL_BYTES, HttpExchange, Server
from worker.errors import InvalidAnswer

MOST_BYTES: Final = 4 * 2**20
SERVER: Final = Server("the worker", key="", address="", authority="use its address inside")


class WorkerPages:
    """One worker's health port, at `http://host:port`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Connects to nothing yet. Raises ConfigError on what is no address."""
        self.url = url.rstrip("/").removesuffix("/metrics")
        self._timeout_s = timeout_s
        self._http = HttpExchange(self.url, SERVER, api_key=None, connections=2, connect_timeout_s=timeout_s)

    async def metrics(self) -> str:
        """Raises EngineUnavailable where nobody answers, InvalidAnswer where it is no metrics page."""
        answer = await self._http.ask("GET", "/metrics", None, MOST_BYTES, self._timeout_s)
        if answer.status != 200:
            raise InvalidAnswer(f"HTTP {answer.status} on /metrics")
        return answer.body.decode("utf-8", "replace")

    async def readiness(self) -> str:
        """The line that /readyz says. Raises as `metrics`."""
        answer = await self._http.ask("GET", "/readyz", None, SMALL_BYTES, self._timeout_s)
        if answer.status not in (200, 503):
            raise InvalidAnswer(f"HTTP {answer.status} on /readyz")
        return answer.body.decode("utf-8", "replace").strip()

    async def aclose(self) -> None:
        await self._http.aclose()
