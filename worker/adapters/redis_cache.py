"""Score cache on Redis or Valkey: alone knows how a cached value is laid out and trusted."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from struct import Struct
from typing import Any, Final

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from worker.adapters.redis_trouble import is_refusal, sentence
from worker.core.scores import LabelScores
from worker.errors import ConfigError
from worker.ports import Lease

KEY_PREFIX: Final = "ticket-router:score:"
FORMAT: Final = 1
PARTIAL_FORMAT: Final = 2
"""Without and with unknown labels; a worker that does not know the second takes such a value for a miss."""
TAG_BYTES: Final = 16
HEADER: Final = Struct("<BH")
"""Format and number of labels; then as many doubles, the label mass, in a partial value the places of the unknown
labels (16 bits each), and the tag."""
LEASE: Final = b"\x00lease:"
"""Begins what stands under a key while its scores are under way; then whose lease it is. No tag: who can write to the
server can make a worker wait a little, and could do so without."""
MOST_KEYS: Final = 1_000
"""In one call of a script; Lua's stack takes a few thousand."""

_GET_OR_LEASE: Final = """
local found = redis.call('MGET', unpack(KEYS))
local writable = true
for place, key in ipairs(KEYS) do
  if not found[place] then
    found[place] = 0
    if writable then
      local taken = redis.pcall('SET', key, ARGV[1], 'NX', 'PX', ARGV[2])
      if type(taken) == 'table' and taken.err then writable = false
      elseif taken then found[place] = 1 end
    end
  end
end
return found
"""
"""A value, 1 for a lease taken, 0 for a miss. A full or read-only server still answers what it has."""
_PUT: Final = "for place, key in ipairs(KEYS) do redis.call('SET', key, ARGV[place + 1], 'EX', ARGV[1]) end"
_RELEASE: Final = """
for _, key in ipairs(KEYS) do
  if redis.call('GET', key) == ARGV[1] then redis.call('DEL', key) end
end
"""

BAD_URL: Final = (
    "ROUTER_REDIS_URL is no Redis URL: write redis://user:password@host:6379/0 (rediss:// for TLS) and "
    "percent-encode special characters in the password"
)
_PROBES: Final = ("probe:1", "probe:2")
"""Keys of different hash slots."""


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

    @property
    def is_open(self) -> bool:
        return self.failures >= self.failures_to_open

    def record(self, succeeded: bool) -> None:
        self.failures = 0 if succeeded else self.failures + 1
        if self.is_open:
            self.retry_at = self.clock() + self.cool_down_s


class RedisCache:
    """`SharedScoreCache` on one Redis or Valkey server (no cluster); checked with redis-py 8.1.

    Every call ends within `timeout_s`, connecting included. Each value carries a keyed digest of its key and content:
    write access to the server does not suffice to steer a ticket. Reads and writes have a breaker each, because a
    full or read-only server still reads. `counters` counts keys (`hits`, `misses`; `rejected` of the misses) and calls
    (`errors`, `skipped` by a breaker). Scripts save time (one SET for each of 32 keys costs four times as much CPU) and
    make leases; without permission for them it does as well without.
    """

    def __init__(
        self,
        url: str,
        *,
        secret: bytes,
        owner: bytes,
        ttl_s: int,
        timeout_s: float,
        clock: Callable[[], float],
        failures_to_open: int = 5,
        cool_down_s: float = 5.0,
        max_connections: int = 64,
        on_trouble: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        """`owner` tells this worker's leases from others'; `clock` in seconds, monotonic. Connects on first use.
        `on_trouble` is told what is wrong once it lasts or cannot pass by itself, and None when it is over.

        Raises ConfigError on a URL that is none.
        """
        if not secret:
            raise ConfigError("the cache secret is empty: set ROUTER_CACHE_SECRET")
        self._tag_key = hashlib.sha256(secret).digest()
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._reads = _Breaker(clock, failures_to_open, cool_down_s)
        self._writes = _Breaker(clock, failures_to_open, cool_down_s)
        self._on_trouble = on_trouble
        self._in_trouble = False
        self._redis = Redis.from_pool(_pool(url, timeout_s, max_connections))
        self._lease = LEASE + owner
        self._scripts_allowed = True
        self._get_or_lease = self._redis.register_script(_GET_OR_LEASE)
        self._put = self._redis.register_script(_PUT)
        self._release = self._redis.register_script(_RELEASE)
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

    async def get_or_lease(self, keys: Sequence[str], lease_s: float) -> Sequence[LabelScores | Lease | None]:
        """One script for each thousand keys. What another worker has leased counts as neither hit nor miss."""
        found: list[LabelScores | Lease | None] = []
        for start in range(0, len(keys), MOST_KEYS):
            found += await self._got_or_leased(keys[start : start + MOST_KEYS], round(lease_s * 1000))
        return found

    async def put_many(self, items: Mapping[str, LabelScores]) -> None:
        """One round trip for each thousand."""
        values = [(KEY_PREFIX + key, self._encode(key, scores)) for key, scores in items.items()]
        for start in range(0, len(values), MOST_KEYS):
            some = values[start : start + MOST_KEYS]
            names, args = [name for name, _ in some], [self._ttl_s, *(value for _, value in some)]
            await self._attempt(self._writes, partial(self._scripted, self._put, names, args, partial(self._set, some)))

    async def release(self, keys: Sequence[str]) -> None:
        names = [KEY_PREFIX + key for key in keys[:MOST_KEYS]]  # the rest ends by itself
        if names and self._scripts_allowed:
            await self._attempt(self._writes, lambda: self._release(keys=names, args=[self._lease]))

    async def probe(self) -> str | None:
        """None when the server answers a look-up in time, else one sentence without address or password."""
        error = await self._call(lambda: self._redis.mget([KEY_PREFIX + name for name in _PROBES]))
        return sentence(error, self._timeout_s) if isinstance(error, Exception) else None

    async def aclose(self) -> None:
        await self._call(self._redis.aclose)

    async def _got_or_leased(self, keys: Sequence[str], lease_ms: int) -> Sequence[LabelScores | Lease | None]:
        names = [KEY_PREFIX + key for key in keys]
        look_up = partial(
            self._scripted, self._get_or_lease, names, [self._lease, lease_ms], partial(self._redis.mget, names)
        )
        values = await self._attempt(self._reads, look_up)
        if not isinstance(values, list) or len(values) != len(keys):
            self.counters["misses"] += len(keys)
            return [None] * len(keys)
        found = [self._read(key, value) for key, value in zip(keys, values, strict=True)]
        theirs = found.count(Lease.THEIRS)
        missed = found.count(None) + found.count(Lease.OURS)
        self.counters["misses"] += missed
        self.counters["hits"] += len(found) - missed - theirs
        return found

    def _read(self, key: str, value: object) -> LabelScores | Lease | None:
        if not isinstance(value, bytes):
            return Lease.OURS if value == 1 else None
        if value.startswith(LEASE):
            return Lease.OURS if value == self._lease else Lease.THEIRS
        return self._decode(key, value)

    async def _scripted(
        self, script: AsyncScript, names: list[str], args: list[Any], otherwise: Callable[[], Awaitable[Any]]
    ) -> Any:
        """What the script returns; what `otherwise` does where this user may not run scripts."""
        if self._scripts_allowed:
            try:
                return await script(keys=names, args=args)
            except ResponseError as error:
                if not isinstance(error, NoPermissionError) and not str(error).startswith("unknown command"):
                    raise
                self._scripts_allowed = False
        return await otherwise()

    async def _set(self, values: Sequence[tuple[str, bytes]]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for name, value in values:
            pipeline.set(name, value, ex=self._ttl_s)
        await pipeline.execute()

    async def _attempt(self, breaker: _Breaker, command: Callable[[], Awaitable[Any]]) -> Any:
        """The command's answer, or None where it was skipped or failed, which is counted."""
        if not breaker.allows():
            self.counters["skipped"] += 1
            return None
        answer = await self._call(command)
        failed = isinstance(answer, Exception)
        breaker.record(not failed)
        self._tell(answer if failed else None)
        self.counters["errors"] += failed
        return None if failed else answer

    def _tell(self, error: Exception | None) -> None:
        """One failure is none yet, unless another attempt must end the same. Over is what neither way still fails."""
        breakers = (self._reads, self._writes)
        if error is not None:
            if not self._in_trouble and (is_refusal(error) or any(each.is_open for each in breakers)):
                self._in_trouble = True
                self._on_trouble(sentence(error, self._timeout_s))
        elif self._in_trouble and not any(each.failures for each in breakers):
            self._in_trouble = False
            self._on_trouble(None)

    async def _call(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """The command's answer, or the exception that it ended with; at most `timeout_s` later."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await command()
        except Exception as error:  # noqa: BLE001 - whatever a client library does, a cache only ever misses
            return error

    def _encode(self, key: str, scores: LabelScores) -> bytes:
        count = len(scores.logprobs)
        payload = HEADER.pack(PARTIAL_FORMAT if scores.unknown else FORMAT, count)
        payload += Struct(f"<{count + 1}d").pack(*scores.logprobs, scores.mass)
        payload += Struct(f"<{len(scores.unknown)}H").pack(*scores.unknown)
        return payload + self._tag(key, payload)

    def _decode(self, key: str, value: object) -> LabelScores | None:
        """None, counted (but for a lease), unless the value was written by `_encode` for this very key."""
        if isinstance(value, bytes) and value.startswith(LEASE):
            return None
        scores = self._authentic(key, value) if isinstance(value, bytes) else None
        self.counters["rejected"] += scores is None
        return scores

    def _authentic(self, key: str, value: bytes) -> LabelScores | None:
        payload = value[:-TAG_BYTES]
        if not hmac.compare_digest(value[-TAG_BYTES:], self._tag(key, payload)) or len(payload) < HEADER.size:
            return None
        form, count = HEADER.unpack_from(payload)
        hidden, odd = divmod(len(payload) - HEADER.size - 8 * (count + 1), 2)
        if (
            form not in (FORMAT, PARTIAL_FORMAT)
            or not count
            or odd
            or hidden < 0
            or (hidden > 0) != (form == PARTIAL_FORMAT)
        ):
            return None
        *logprobs, mass = Struct(f"<{count + 1}d").unpack_from(payload, HEADER.size)
        unknown = Struct(f"<{hidden}H").unpack_from(payload, HEADER.size + 8 * (count + 1))
        try:
            return LabelScores(tuple(logprobs), mass, unknown).checked()
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
        raise ConfigError(BAD_URL) from None
