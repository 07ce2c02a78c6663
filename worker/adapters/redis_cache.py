"""Score cache on Redis or Valkey: alone knows how a cached value is laid out and trusted."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError

from worker.core.scores import LabelScores
from worker.errors import ConfigError

KEY_PREFIX: Final = "ticket-router:score:"
FORMAT: Final = 1
TAG_BYTES: Final = 16
HEADER: Final = Struct("<BH")
"""Format and number of labels; then as many doubles, the label mass, and the tag."""


@dataclass(slots=True)
class _Breaker:
    """Opens after so many failures in a row; then lets one call through per cool-down, until one succeeds."""

    clock: Callable[[], float]
    failures_to_open: int
    cool_down_s: float
    failures: int = 0
    retry_at: float = 0.0

    def allows(self) -> bool:
        if self.failures < self.failures_to_open:
            return True
        if self.clock() < self.retry_at:
            return False
        self.retry_at = self.clock() + self.cool_down_s
        return True

    def record(self, succeeded: bool) -> None:
        self.failures = 0 if succeeded else self.failures + 1
        if self.failures >= self.failures_to_open:
            self.retry_at = self.clock() + self.cool_down_s


class RedisCache:
    """`ScoreCache` on one Redis or Valkey server (no cluster); checked with redis-py 8.1.

    Every call ends within `timeout_s`, connecting included. Each value carries a keyed digest of its key and content:
    write access to the server does not suffice to steer a ticket. Reads and writes have a breaker each, because a
    full or read-only server still reads. `counters` counts keys (`hits`, `misses`; `rejected` of the misses) and calls
    (`errors`, `skipped` by a breaker).
    """

    def __init__(
        self,
        url: str,
        *,
        secret: bytes,
        ttl_s: int,
        timeout_s: float,
        clock: Callable[[], float],
        failures_to_open: int = 5,
        cool_down_s: float = 5.0,
        max_connections: int = 64,
    ) -> None:
        """`clock` in seconds, monotonic. Connects on first use. Raises ConfigError on a URL that is none."""
        if not secret:
            raise ConfigError("the cache secret is empty: set ROUTER_CACHE_SECRET")
        self._tag_key = hashlib.sha256(secret).digest()
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._reads = _Breaker(clock, failures_to_open, cool_down_s)
        self._writes = _Breaker(clock, failures_to_open, cool_down_s)
        self._redis = Redis.from_pool(_pool(url, timeout_s, max_connections))
        self.counters: dict[str, int] = dict.fromkeys(("hits", "misses", "rejected", "errors", "skipped"), 0)

    async def get_many(self, keys: Sequence[str]) -> Sequence[LabelScores | None]:
        """One MGET. In the order of the keys; None is a miss."""
        if not keys:
            return []
        names = [KEY_PREFIX + key for key in keys]
        values = await self._attempt(self._reads, lambda: self._redis.mget(names))
        if not isinstance(values, list) or len(values) != len(keys):
            self.counters["misses"] += len(keys)
            return [None] * len(keys)
        found = [None if value is None else self._decode(key, value) for key, value in zip(keys, values, strict=True)]
        missed = found.count(None)
        self.counters["misses"] += missed
        self.counters["hits"] += len(found) - missed
        return found

    async def put_many(self, items: Mapping[str, LabelScores]) -> None:
        """One round trip of SET with expiry."""
        if not items:
            return
        pipeline = self._redis.pipeline(transaction=False)
        for key, scores in items.items():
            pipeline.set(KEY_PREFIX + key, self._encode(key, scores), ex=self._ttl_s)
        await self._attempt(self._writes, pipeline.execute)

    async def probe(self) -> str | None:
        """None when the server answers a PING in time, else one sentence without address or password."""
        error = await self._call(self._redis.ping)
        if isinstance(error, TimeoutError):
            return f"The cache gave no answer within {self._timeout_s * 1000:.0f} ms."
        if isinstance(error, AuthenticationError):
            return "The cache refused the user or password in ROUTER_REDIS_URL."
        return f"The cache cannot be used ({type(error).__name__})." if isinstance(error, Exception) else None

    async def aclose(self) -> None:
        await self._call(self._redis.aclose)

    async def _attempt(self, breaker: _Breaker, command: Callable[[], Awaitable[Any]]) -> Any:
        """The command's answer, or None where it was skipped or failed, which is counted."""
        if not breaker.allows():
            self.counters["skipped"] += 1
            return None
        answer = await self._call(command)
        failed = isinstance(answer, Exception)
        breaker.record(not failed)
        self.counters["errors"] += failed
        return None if failed else answer

    async def _call(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """The command's answer, or the exception that it ended with; at most `timeout_s` later."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await command()
        except Exception as error:  # noqa: BLE001 - whatever a client library does, a cache only ever misses
            return error

    def _encode(self, key: str, scores: LabelScores) -> bytes:
        count = len(scores.logprobs)
        payload = HEADER.pack(FORMAT, count) + Struct(f"<{count + 1}d").pack(*scores.logprobs, scores.mass)
        return payload + self._tag(key, payload)

    def _decode(self, key: str, value: object) -> LabelScores | None:
        """None, counted, unless the value was written by `_encode` for this very key."""
        scores = self._authentic(key, value) if isinstance(value, bytes) else None
        self.counters["rejected"] += scores is None
        return scores

    def _authentic(self, key: str, value: bytes) -> LabelScores | None:
        payload = value[:-TAG_BYTES]
        if not hmac.compare_digest(value[-TAG_BYTES:], self._tag(key, payload)) or len(payload) < HEADER.size:
            return None
        form, count = HEADER.unpack_from(payload)
        if form != FORMAT or len(payload) != HEADER.size + 8 * (count + 1) or not count:
            return None
        *logprobs, mass = Struct(f"<{count + 1}d").unpack_from(payload, HEADER.size)
        try:
            return LabelScores(tuple(logprobs), mass).checked()
        except ValueError:
            return None

    def _tag(self, key: str, payload: bytes) -> bytes:
        framed = f"{len(key)}:{key}".encode() + payload
        return hashlib.blake2b(framed, key=self._tag_key, digest_size=TAG_BYTES, person=b"score value").digest()


def _pool(url: str, timeout_s: float, max_connections: int) -> ConnectionPool:
    try:
        return ConnectionPool.from_url(
            url,
            max_connections=max_connections,
            protocol=2,  # RESP 3 would add a HELLO and a subscription to every connect
            retry=Retry(NoBackoff(), 0),  # the client would otherwise try ten times, for seconds
            health_check_interval=0,
            socket_timeout=None,  # one deadline over all, not one per step
            socket_connect_timeout=timeout_s,  # also bounds closing
            driver_info=None,
        )
    except (ValueError, TypeError, RedisError):
        # The cause may quote a piece of the password: a "/" in it makes the parser take it for a port.
        raise ConfigError(
            "ROUTER_REDIS_URL is no Redis URL: write redis://user:password@host:6379/0 (rediss:// for TLS) and "
            "percent-encode special characters in the password"
        ) from None
