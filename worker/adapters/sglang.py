"""How an SGLang server is asked over HTTP, and which of our errors each way of not answering is.

One `POST /v1/score` carries one shared prefix as `query` and the tickets as `items`; the server joins them as text
into one prompt an item. What the JSON means is known by `sglang_wire`.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from worker.adapters import sglang_wire as wire
from worker.adapters.tokenizer_digest import PROBE_TEXTS, tokenizer_digest
from worker.core.scores import LabelScores, ScoreRequest
from worker.errors import (
    ConfigError,
    EngineDropped,
    EngineError,
    EngineUnavailable,
    InvalidAnswer,
    RequestRefused,
    TooLong,
)
from worker.ports import EngineIdentity

KEEPALIVE_S = 3.0
"""Idle connections are given up before SGLang does it (5 s): else requests would meet closing ones."""
TRIAL_PROMPT = "Question: which team handles this ticket?\nAnswer:"
SMALL_BYTES = 64 * 1024
INFO_BYTES = 4 * 1024 * 1024


class Misconfigured(EngineUnavailable):
    """An answer that blames the set-up: wrong key, wrong address.

    No ticket is at fault, so none may be refused for it: the worker waits as for any unavailable engine, until a person
    has acted. At start it is a ConfigError.
    """


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    retry_after: str | None
    body: bytes


class SGLangEngine:
    """A ScoringEngine on one SGLang server.

    Exceptions carry no ticket text, address or key and none of the server's words, and are raised `from None`, since
    those of httpx, aiohttp and orjson do carry such things.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        connections: int = 16,
        timeout_s: float = 30.0,
        connect_timeout_s: float = 3.0,
        control_timeout_s: float = 10.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Connects to nothing yet. Raises ConfigError on an address or a key that cannot be used.

        `timeout_s` bounds a scoring request from waiting for a connection to the answer's last byte,
        `control_timeout_s` any other one. `now` is Unix time, for a Retry-After that names a date.
        """
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {checked_key(api_key)}"
        self._connections = connections
        self._timeout_s = timeout_s
        self._control_timeout_s = control_timeout_s
        self._now = now
        self._context_tokens: int | None = None
        self._url = checked_url(base_url)
        self._headers = httpx.Headers(headers)
        self._extensions = {"timeout": httpx.Timeout(None, connect=connect_timeout_s).as_dict()}
        self._transport = AiohttpTransport(client=self._open_session, trust_env=False)
        self._client = httpx.AsyncClient(transport=self._transport, follow_redirects=False, trust_env=False)

    def _open_session(self) -> aiohttp.ClientSession:
        """aiohttp carries the bytes, since httpx's own pool costs CPU quadratic in its idle connections."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self._connections, keepalive_timeout=KEEPALIVE_S, ssl=self._transport.ssl_context
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        if not requests:
            return ()
        items, labels = len(requests), len(requests[0].label_token_ids)
        limit = wire.score_answer_bytes(items, labels)
        body = wire.score_body(requests)
        answer = await self._ask("POST", "/v1/score", body, limit, self._timeout_s)
        if answer.status != 200:
            raise self._refusal(answer, items)
        return wire.read_scores(answer.body, items, labels)

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        body = wire.encoded({"prompt": list(texts), "add_special_tokens": True})
        limit = SMALL_BYTES + 16 * len(body)  # a byte becomes at most one token, of at most 8 characters
        answer = await self._ask("POST", "/tokenize", body, limit, self._control_timeout_s)
        if answer.status != 200:
            raise self._refusal(answer, len(texts))
        return wire.read_token_ids(answer.body, len(texts))

    async def identity(self) -> EngineIdentity:
        try:
            model = await self._info("/model_info", "/get_model_info")
            models = await self._info("/v1/models")
            try:
                server = await self._info("/server_info", "/get_server_info")
            except Misconfigured:  # a gateway may hide it
                server = {}
            token_ids = await self.tokenize(PROBE_TEXTS)
            letters = await self.tokenize([f"{TRIAL_PROMPT} {letter}" for letter in "ABCDEFGHIJKLMNOP"])
            labels = tuple({ids[-1] for ids in letters if ids})
            trial = await self.score([ScoreRequest(TRIAL_PROMPT, "", labels)])
        except Misconfigured as error:
            raise ConfigError(str(error)) from None
        except RequestRefused as error:
            raise ConfigError(f"a trial request failed: {error}; scoring needs a text model") from None
        except InvalidAnswer as error:
            raise ConfigError(f"what answers at the base URL is no SGLang server: {error}") from None
        except EngineDropped as error:
            raise EngineUnavailable(str(error)) from None
        if model.get("is_generation") is not True:
            raise ConfigError("the SGLang server runs no generation model, so it scores no next token")
        if server.get("allow_auto_truncate") is True:
            raise ConfigError(
                "the SGLang server runs with --allow-auto-truncate, which silently cuts the end of a long prompt, "
                "where the answer cue is: start it without"
            )
        notes = []
        if "allow_auto_truncate" not in server:
            notes.append("the server does not say whether --allow-auto-truncate is off, as it must be")
        if step := wire.grid_step(trial[0].logprobs):
            notes.append(
                f"log-probabilities lie on a grid of {step:g} nats or coarser (bf16 head), so ties occur; "
                "SGLang's --enable-fp32-lm-head removes it, and a calibration holds for one setting only"
            )
        self._context_tokens = wire.context_tokens(server, models)
        return EngineIdentity(
            engine="sglang",
            model=wire.model_name(model, server),
            tokenizer=tokenizer_digest(token_ids),
            context_tokens=self._context_tokens,
            notes=tuple(notes),
        )

    async def probe(self) -> None:
        answer = await self._ask("GET", "/ready", None, SMALL_BYTES, self._control_timeout_s)
        if answer.status == 404:  # older; /health generates a token, which takes a second and more
            answer = await self._ask("GET", "/health", None, SMALL_BYTES, self._control_timeout_s)
        if answer.status != 200:
            raise self._refusal(answer, 1)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _info(self, path: str, older_path: str | None = None) -> dict[str, Any]:
        answer = await self._ask("GET", path, None, INFO_BYTES, self._control_timeout_s)
        if answer.status == 404 and older_path is not None:
            answer = await self._ask("GET", older_path, None, INFO_BYTES, self._control_timeout_s)
        if answer.status != 200:
            raise self._refusal(answer, 1)
        return wire.decoded(answer.body)

    async def _ask(self, method: str, path: str, body: bytes | None, limit: int, timeout_s: float) -> Answer:
        """One exchange under one deadline. No more than `limit` bytes of the answer, and a chunk, are held."""
        if self._client.is_closed:
            raise EngineUnavailable("this client of the SGLang server is closed")
        # Built here, not by the client: cheaper by a fifth, and no cookie is ever sent (a balancer's would pin all
        # requests to one replica).
        request = httpx.Request(
            method, f"{self._url}{path}", headers=self._headers, content=body, extensions=self._extensions
        )
        try:
            # httpx's and aiohttp's own timeouts begin anew with every byte read.
            async with (
                asyncio.timeout(timeout_s),
                contextlib.aclosing(await self._client.send(request, stream=True)) as response,
            ):
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise InvalidAnswer("the answer is compressed, unasked: it may be of any size")
                if response.status_code != 200:
                    limit = SMALL_BYTES
                content = bytearray()
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > limit:
                        raise InvalidAnswer(f"an answer of more than {limit} bytes (HTTP {response.status_code})")
                return Answer(response.status_code, response.headers.get("retry-after"), bytes(content))
        except TimeoutError:
            raise EngineUnavailable(f"no whole answer from the SGLang server within {timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise transport_error(error) from None
        except aiohttp.ClientError as error:
            raise InvalidAnswer(f"the answer is not HTTP ({type(error).__name__})") from None

    def _refusal(self, answer: Answer, prompts: int) -> EngineError | TooLong:
        status = answer.status
        if status in (401, 403):
            return Misconfigured(
                f"the SGLang server refuses the API key (HTTP {status}): set the one given to its --api-key"
            )
        if status in (404, 405):
            return Misconfigured(
                f"nothing there scores or tokenizes (HTTP {status}): the base URL must lead to SGLang itself, or "
                "through a plain load balancer (sglang-router 0.3.2 does not pass /v1/score on)"
            )
        if 300 <= status < 400:
            return Misconfigured(f"the server redirects (HTTP {status}), which is never followed: set its URL")
        if status in (408, 425, 429) or status >= 500:
            wish = retry_after_s(answer.retry_after, self._now)
            return EngineUnavailable(f"the SGLang server cannot answer now (HTTP {status})", wish)
        if status < 400:
            return InvalidAnswer(f"HTTP {status} where 200 was expected")
        too_long = wire.read_too_long(answer.body, self._context_tokens)
        if too_long is not None and prompts == 1:
            return too_long
        reason = wire.refusal_reason(answer.body) if too_long is None else f"one of {prompts} prompts: {too_long}"
        return RequestRefused(f"the SGLang server refuses the request (HTTP {status}, {reason})", status)


def checked_url(base_url: str) -> str:
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL:
        raise ConfigError("the SGLang base URL is no URL; one looks like http://host:30000") from None
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise ConfigError("the SGLang base URL must be http(s)://host:port, without user, query or fragment")
    return str(url).rstrip("/")


def checked_key(api_key: str) -> str:
    if not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise ConfigError("the SGLang API key must be printable ASCII without spaces")
    return api_key


def transport_error(error: httpx.HTTPError) -> EngineUnavailable | EngineDropped:
    """httpx-aiohttp 0.2 reports a dropped connection as ConnectTimeout: only aiohttp's own exception, its cause, tells
    a server that was not reached from one that went away."""
    cause = error.__cause__
    if isinstance(cause, aiohttp.ClientSSLError):
        return Misconfigured(f"the SGLang server's TLS is not accepted ({type(cause).__name__})")
    if isinstance(cause, aiohttp.ClientConnectorError):
        why = errno.errorcode.get(cause.errno or 0, "name not found")  # the text of the error holds the address
        return EngineUnavailable(f"cannot connect to the SGLang server ({why})")
    if isinstance(cause, aiohttp.ServerTimeoutError):
        return EngineUnavailable("cannot connect to the SGLang server in time")
    if isinstance(cause, aiohttp.ClientPayloadError):
        return EngineDropped("the connection to the SGLang server ended in the middle of its answer")
    if isinstance(cause, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
        return EngineDropped("the connection to the SGLang server ended without an answer")
    return EngineUnavailable(f"the exchange with the SGLang server failed ({type(cause or error).__name__})")


def retry_after_s(value: str | None, now: Callable[[], float]) -> float | None:
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
