"""HttpEdge: alone knows who may ask over HTTP, how many at once, for how long, and how they are refused."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from worker.core.http_ticket import WHAT_TO_DO
from worker.errors import Problem
from worker.runtime.journal import Journal

OWN_NAME = "ticket-router"
RETRY_S = 1


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """What bounds the server."""

    max_requests: int = 64
    """Answered at once; more are told to come again."""
    max_body_bytes: int = 500_000
    deadline_s: float = 10.0
    """From the request's head to its answer."""
    drain_s: float = 20.0
    head_s: float = 10.0


class Refusal(Exception):
    """An answer that is none of what was asked for."""

    def __init__(
        self, status: int, kind: str, message: str, *, retry_after_s: int | None = None, **more: object
    ) -> None:
        super().__init__(kind)
        self.status = status
        self.detail: object = {"error_type": kind, "message": message, **more}
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> Refusal:
        """The shape of validation errors that clients of System One know."""
        refusal = cls(422, "invalid", "")
        refusal.detail = [{"loc": each.where, "msg": each.message, "type": each.code} for each in problems]
        return refusal

    @property
    def response(self) -> web.Response:
        return web.Response(
            body=orjson.dumps({"detail": self.detail}),
            status=self.status,
            headers=self.headers,
            content_type="application/json",
        )


class HttpEdge:
    """Stands before every handler; `in_flight`, `most_in_flight`, `answered` and `turned_away` may be read."""

    def __init__(self, limits: ServeLimits, token: str | None, journal: Journal) -> None:
        """Without a `token` everybody who can connect may ask."""
        self._limits = limits
        self._token = None if token is None else _digest(token.encode())
        self._journal = journal
        self.in_flight = self.most_in_flight = self.answered = self.turned_away = 0
        self.stopping = asyncio.Event()
        """Set from outside: from then on new requests are told to come again."""
        self._idle = asyncio.Event()
        self._idle.set()

    async def drained(self) -> None:
        """Returns when nothing is in flight, or after `drain_s`."""
        try:
            async with asyncio.timeout(self._limits.drain_s):
                await self._idle.wait()
        except TimeoutError:
            pass

    @web.middleware
    async def around(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            answered = await handler(request)
        except Refusal as refusal:
            answered = refusal.response
        except web.HTTPException as error:  # no such path, another method
            answered = Refusal(error.status, "not_found", f"{error.reason}: see docs/serving.md for the paths").response
            answered.headers.update({name: error.headers[name] for name in ("Allow",) if name in error.headers})
        except Exception as error:  # noqa: BLE001 - a bug costs this request its answer, and says nothing of it
            self._journal.request_failed(error)
            answered = Refusal(500, "internal_error", "the server failed on this request; its log says where").response
        resource = request.match_info.route.resource
        self._journal.answered(resource.canonical if resource is not None else "other", answered.status)
        return answered

    def post(
        self, work: Callable[[bytes], Awaitable[bytes]]
    ) -> Callable[[web.Request], Coroutine[Any, Any, web.Response]]:
        """Who may ask, whether there is room, and for how long; nothing is read of a request that is refused."""

        async def handle(request: web.Request) -> web.Response:
            self.authorise(request)
            self._check_head(request)
            if self.stopping.is_set():
                self.turned_away += 1
                raise Refusal(503, "stopping", "this server is stopping: ask again", retry_after_s=RETRY_S)
            if self.in_flight >= self._limits.max_requests:
                self.turned_away += 1
                raise Refusal(503, "busy", "all places are taken: ask again", retry_after_s=RETRY_S)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self._idle.clear()
            body: bytes | None = None
            try:
                async with asyncio.timeout(self._limits.deadline_s) as deadline:
                    body = await self._body(request)
                    answered = await work(body)
            except TimeoutError:
                if not deadline.expired():
                    raise
                if body is None:
                    raise Refusal(408, "slow_request", "the body did not come in time: send it whole") from None
                raise Refusal(
                    503,
                    "deadline",
                    f"no answer within {self._limits.deadline_s:g} s: ask again",
                    retry_after_s=RETRY_S,
                ) from None
            finally:
                self.in_flight -= 1
                if not self.in_flight:
                    self._idle.set()
            self.answered += 1
            return web.Response(body=answered, content_type="application/json")

        return handle

    def authorise(self, request: web.Request) -> None:
        if self._token is None:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        known = hmac.compare_digest(_digest(given.strip().encode(errors="surrogateescape")), self._token)
        if scheme.lower() != "bearer" or not known:
            refusal = Refusal(
                401, "authentication_error", "send the server's token: 'Authorization: Bearer ...' (ROUTER_SERVE_TOKEN)"
            )
            refusal.headers["WWW-Authenticate"] = "Bearer"
            raise refusal

    def _check_head(self, request: web.Request) -> None:
        kind = request.content_type
        if kind != "application/json" and not kind.endswith("+json"):  # also keeps other sites' forms out
            raise Refusal(415, "content_type", "send JSON, with 'Content-Type: application/json'", where="head")
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Refusal(415, "content_encoding", "send the body uncompressed", where="head")
        if (request.content_length or 0) > self._limits.max_body_bytes:
            raise self._too_large()

    async def _body(self, request: web.Request) -> bytes:
        body = bytearray()
        try:
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > self._limits.max_body_bytes:
                    raise self._too_large()
        except web.RequestPayloadError:
            raise Refusal(400, "invalid_body", "the body is not what its head says: send it anew") from None
        return bytes(body)

    def _too_large(self) -> Refusal:
        return Refusal(
            413,
            "too_large",
            f"more than {self._limits.max_body_bytes} bytes",
            where="body",
            what_to_do=WHAT_TO_DO["too_large"],
        )


def _digest(token: bytes) -> bytes:
    """Of equal length whatever the token's, so that a comparison tells nothing of that either."""
    return hashlib.sha256(token).digest()
