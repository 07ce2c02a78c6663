"""One bounded HTTP exchange with an engine's server, and which of our errors each way of not answering is.

What is asked and what the answer means is known by the adapters. Exceptions carry no ticket text, address or key and
none of the server's words, and are raised `from None`, since those of httpx, aiohttp and orjson do carry such things.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import errno
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import orjson
from httpx_aiohttp import AiohttpTransport

from worker.errors import (
    ConfigError,
    EngineDropped,
    EngineError,
    EngineSilent,
    EngineUnavailable,
    InvalidAnswer,
    RequestRefused,
)
from worker.telemetry import traceparent

KEEPALIVE_S = 3.0
"""Idle connections are given up before a server does it (SGLang, vLLM: 5 s): else requests would meet closing ones."""
SMALL_BYTES = 64 * 1024
INFO_BYTES = 4 * 1024 * 1024


class Misconfigured(EngineUnavailable):
    """An answer that blames the set-up: wrong key, wrong address, wrong model name.

    No ticket is at fault, so none may be refused for it: the worker waits as for any unavailable engine, until a person
    has acted. At start it is a ConfigError.
    """


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    retry_after: str | None
    """Where the status is not 200."""
    body: bytes


@dataclass(frozen=True, slots=True)
class Server:
    """What errors call the server, and what they advise."""

    name: str
    """Such as "the SGLang server"."""
    key: str
    """Where its API key is set."""
    address: str
    """What is likely where a path is not found."""
    authority: str = "set ROUTER_ENGINE_CA_FILE to the PEM file of its own authority"
    """What to do where a certificate is signed by nobody that is believed."""


class HttpExchange:
    """Connections to one server. At most one request a connection, none is retried, no redirect is followed.

    Requests go to httpx's transport themselves. What a client of httpx 0.28 does above it (cookies, redirects,
    authentication, a log line) is unwanted here, since a balancer's cookie would pin all requests to one replica; it
    costs more than half of what the transport does, and leaves each answer in a cycle, for the collector to find.
    """

    def __init__(
        self,
        base_url: str,
        server: Server,
        *,
        api_key: str | None,
        connections: int,
        connect_timeout_s: float,
        ca_file: Path | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Connects to nothing yet. Raises ConfigError on an address, a key or a file that cannot be used. `ca_file`:
        PEM, believed in place of certifi's authorities. `now` is Unix time, for a Retry-After that names a date."""
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {_checked_key(api_key, server.name)}"
        self._server = server
        self._connections = connections
        self._now = now
        self._url = _checked_url(base_url, server.name)
        self._urls: dict[str, httpx.URL] = {}
        """By path. They are few, and one costs more to parse than all the rest of a request to make."""
        self._headers = headers
        self._closed = False
        self._extensions = {"timeout": httpx.Timeout(None, connect=connect_timeout_s).as_dict()}
        self._transport = AiohttpTransport(
            client=self._open_session, trust_env=False, verify=True if ca_file is None else _believing(ca_file)
        )

    def _open_session(self) -> aiohttp.ClientSession:
        """aiohttp carries the bytes, since httpx's own pool costs CPU quadratic in its idle connections."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self._connections, keepalive_timeout=KEEPALIVE_S, ssl=self._transport.ssl_context
            ),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def ask(self, method: str, path: str, body: bytes | None, limit: int, timeout_s: float) -> Answer:
        """One exchange under one deadline, from waiting for a connection to the answer's last byte.

        No more than `limit` bytes of the answer, and a chunk, are held. Raises EngineUnavailable, EngineDropped,
        InvalidAnswer.
        """
        if self._closed:
            raise EngineUnavailable(f"this client of {self._server.name} is closed")
        request = self._request(method, path, body)
        try:
            # httpx's and aiohttp's own timeouts begin anew with every byte read.
            async with asyncio.timeout(timeout_s):
                response = await self._transport.handle_async_request(request)
                stream = response.stream
                assert isinstance(stream, httpx.AsyncByteStream)  # noqa: S101  (for the type checker)
                async with contextlib.aclosing(stream):
                    if response.headers.get("content-encoding", "identity") != "identity":
                        raise InvalidAnswer("the answer is compressed, unasked: it may be of any size")
                    status, retry_after = response.status_code, None
                    if status != 200:
                        limit, retry_after = SMALL_BYTES, response.headers.get("retry-after")
                    chunks, size = [], 0
                    async for chunk in stream:
                        chunks.append(chunk)
                        size += len(chunk)
                        if size > limit:
                            raise InvalidAnswer(f"an answer of more than {limit} bytes (HTTP {status})")
                    return Answer(status, retry_after, b"".join(chunks))
        except TimeoutError:
            raise EngineSilent(f"no whole answer from {self._server.name} within {timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise _transport_error(error, self._server) from None
        except aiohttp.ClientError as error:
            raise InvalidAnswer(f"the answer is not HTTP ({type(error).__name__})") from None

    def failure(self, answer: Answer) -> EngineError | None:
        """The error that a status other than 200 is by itself; None for a 4xx, whose body says what is wrong."""
        status, name = answer.status, self._server.name
        if status in (401, 403):
            return Misconfigured(f"{name} refuses the API key (HTTP {status}): {self._server.key}")
        if status in (404, 405):
            return Misconfigured(f"nothing there scores or tokenizes (HTTP {status}): {self._server.address}")
        if 300 <= status < 400:
            return Misconfigured(f"the server redirects (HTTP {status}), which is never followed: set its URL")
        if status in (408, 425, 429) or status >= 500:
            return EngineUnavailable(
                f"{name} cannot answer now (HTTP {status})", _retry_after_s(answer.retry_after, self._now)
            )
        if status < 400:
            return InvalidAnswer(f"HTTP {status} where 200 was expected")
        return None

    async def aclose(self) -> None:
        self._closed = True
        await self._transport.aclose()

    def _request(self, method: str, path: str, body: bytes | None) -> httpx.Request:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = httpx.URL(f"{self._url}{path}")
        trace = traceparent()  # a server that traces, too, shows its work below what asked for it
        request = httpx.Request(
            method,
            url,
            headers=None if trace is None else {"traceparent": trace},
            stream=httpx.ByteStream(body or b""),  # as `content` httpx would work out headers, which aiohttp does too
            extensions=self._extensions,
        )
        request.read()  # a body that is held as a whole is sent with its length
        return request


def encoded(body: Mapping[str, object]) -> bytes:
    """Raises RequestRefused on what JSON in UTF-8 cannot carry."""
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:  # a lone surrogate, or an id beyond 64 bits
        raise RequestRefused("the request cannot be encoded as JSON in UTF-8") from None


def decoded(body: bytes) -> dict[str, Any]:
    """Raises InvalidAnswer unless it is a JSON object."""
    try:
        answer = orjson.loads(body)  # strict: refuses NaN and Infinity, which `json` takes
    except orjson.JSONDecodeError:  # carries the whole answer
        raise InvalidAnswer("the answer is not JSON") from None
    if not isinstance(answer, dict):
        raise InvalidAnswer("the answer is not a JSON object")
    return answer


def _checked_url(base_url: str, name: str) -> str:
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL:
        raise ConfigError(f"the base URL of {name} is no URL; one looks like http://host:30000") from None
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise ConfigError(f"the base URL of {name} must be http(s)://host:port, without user, query or fragment")
    return str(url).rstrip("/")


def _believing(ca_file: Path) -> ssl.SSLContext:
    """Trusts these authorities and no others."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:  # an OSError, too
        raise ConfigError(f"ROUTER_ENGINE_CA_FILE {ca_file}: no certificates in PEM form in it") from None
    except OSError as error:
        raise ConfigError(f"ROUTER_ENGINE_CA_FILE {ca_file}: cannot be read: {error.strerror}") from error


def _checked_key(api_key: str, name: str) -> str:
    if not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise ConfigError(f"the API key of {name} must be printable ASCII without spaces")
    return api_key


_OTHER_HOST = frozenset({62, 64})
_UNKNOWN_ISSUER = frozenset({2, 18, 19, 20, 21})
"""X509_V_ERR_* of OpenSSL (x509_vfy.h)."""


def _distrust(error: ssl.SSLCertVerificationError, server: Server) -> Misconfigured:
    if error.verify_code in _OTHER_HOST:  # OpenSSL's own words for this hold the address
        why = "is for another host than its address names"
    elif error.verify_code in _UNKNOWN_ISSUER:
        why = f"is signed by no authority that is believed: {server.authority}"
    else:
        why = f"is not accepted ({error.verify_message})"
    return Misconfigured(f"the TLS certificate of {server.name} {why}")


def _transport_error(error: httpx.HTTPError, server: Server) -> EngineUnavailable | EngineDropped:
    """httpx-aiohttp 0.2 reports a dropped connection as ConnectTimeout: only aiohttp's own exception, its cause, tells
    a server that was not reached from one that went away."""
    cause, name = error.__cause__, server.name
    if isinstance(cause, aiohttp.ClientConnectorCertificateError) and isinstance(
        cause.certificate_error, ssl.SSLCertVerificationError
    ):
        return _distrust(cause.certificate_error, server)
    if isinstance(cause, aiohttp.ClientSSLError):
        return Misconfigured(f"the TLS of {name} is not accepted ({type(cause).__name__})")
    if isinstance(cause, aiohttp.ClientConnectorError):
        why = errno.errorcode.get(cause.errno or 0, "name not found")  # the text of the error holds the address
        return EngineUnavailable(f"cannot connect to {name} ({why})")
    if isinstance(cause, aiohttp.ServerTimeoutError):
        return EngineUnavailable(f"cannot connect to {name} in time")
    if isinstance(cause, aiohttp.ClientPayloadError):
        return EngineDropped(f"the connection to {name} ended in the middle of its answer")
    if isinstance(cause, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
        return EngineDropped(f"the connection to {name} ended without an answer")
    return EngineUnavailable(f"the exchange with {name} failed ({type(cause or error).__name__})")


def _retry_after_s(value: str | None, now: Callable[[], float]) -> float | None:
    """Seconds from a Retry-After header, which holds seconds or a date (RFC 9110, 10.2.3), or None.

    Not capped: how long to wait at most is the caller's decision.
    """
    if value is None:
        return None
    if value.isascii() and value.isdigit() and len(value) < 10:
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now())
    except (ValueError, OverflowError):
        return None
