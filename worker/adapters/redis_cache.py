"""Score cache on Redis or Valkey: alone knows its keys, leases and scripts, and when the server is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from hiredis import pack_command
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import NoPermissionError, NoScriptError, RedisError, ResponseError

from worker.adapters.redis_trouble import is_refusal, sentence
from worker.adapters.sealed_scores import Seal
from worker.core.scores import LabelScores
from worker.errors import ConfigError
from worker.ports import Lease

KEY_PREFIX: Final = "ticket-router:score:"
LEASE: Final = b"\x00lease:"
"""Begins what stands under a key while its scores are under way; then whose lease it is. No tag: who can write to the
server can make a worker wait a little, and could do so without."""
MOST_KEYS: Final = 1_000
"""In one call of a script; Lua's stack takes a few thousand."""
SCRIPTS_AGAIN_S: Final = 60.0
"""After a server refused to run scripts for this user it is asked again: its operator may have permitted them."""

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
_PUT_AND_RELEASE: Final = """
local trouble
for place, key in ipairs(KEYS) do
  local value = ARGV[place + 2]
  if not value then
    local held = redis.pcall('GET', key)
    if held == ARGV[2] then redis.call('DEL', key)
    elseif type(held) == 'table' and not string.find(held.err, 'WRONGTYPE', 1, true) then trouble = trouble or held end
  elseif not trouble then
    local done = redis.pcall('SET', key, value, 'EX', ARGV[1])
    if done.err then trouble = done end
  end
end
return trouble
"""
"""The keys with a value are put, then those without are released, where the server is full, too. Not the other way
round: after a DEL it takes whatever a script writes, however full it is (Valkey 9.1)."""

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

    Every call ends within `timeout_s`, connecting included. Values are sealed (`Seal`): write access to the server does
    not suffice to steer a ticket. Reads and writes have a breaker each, because a
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
        self._seal = Seal(secret)
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._reads = _Breaker(clock, failures_to_open, cool_down_s)
        self._writes = _Breaker(clock, failures_to_open, cool_down_s)
        self._on_trouble = on_trouble
        self._in_trouble = False
        self._redis = Redis.from_pool(_pool(url, timeout_s, max_connections))
        self._lease = LEASE + owner
        self._clock = clock
        self._scripts_refused_until: float | None = None
        """None while they are permitted, as far as is known."""
        self._get_or_lease = self._redis.register_script(_GET_OR_LEASE)
        self._put_and_release = self._redis.register_script(_PUT_AND_RELEASE)
        self.counters: dict[str, int] = dict.fromkeys(("hits", "misses", "rejected", "errors", "skipped"), 0)

    async def get_many(self, keys: Sequence[str]) -> Sequence[LabelScores | None]:
        """One MGET. In the order of the keys; None is a miss."""
        found = await self._look(keys, partial(self._ask, "MGET", *[KEY_PREFIX + key for key in keys]))
        self.counters["misses"] += sum(each is Lease.THEIRS for each in found)
        return [each if isinstance(each, LabelScores) else None for each in found]

    async def get_or_lease(self, keys: Sequence[str], lease_s: float) -> Sequence[LabelScores | Lease | None]:
        """One script for each thousand keys. What another worker has leased counts as neither hit nor miss."""
        if len(keys) <= MOST_KEYS:
            return await self._got_or_leased(keys, round(lease_s * 1000))
        found: list[LabelScores | Lease | None] = []
        for start in range(0, len(keys), MOST_KEYS):
            found += await self._got_or_leased(keys[start : start + MOST_KEYS], round(lease_s * 1000))
        return found

    async def put_many(self, items: Mapping[str, LabelScores], released: Sequence[str] = ()) -> None:
        """One round trip for each thousand."""
        names = [KEY_PREFIX + key for key in items]
        values = [self._seal.close(key, scores) for key, scores in items.items()]
        leases = [KEY_PREFIX + key for key in released]
        for start in range(0, max(len(names), len(leases)), MOST_KEYS):
            some = slice(start, start + MOST_KEYS)
            await self._written(names[some], values[some], leases[some])

    async def probe(self) -> str | None:
        """None when the server answers a look-up in time, else one sentence without address or password."""
        error = await self._call(partial(self._ask, "MGET", *[KEY_PREFIX + name for name in _PROBES]))
        return sentence(error, self._timeout_s) if isinstance(error, Exception) else None

    async def aclose(self) -> None:
        await self._call(self._redis.aclose)

    async def _got_or_leased(self, keys: Sequence[str], lease_ms: int) -> list[LabelScores | Lease | None]:
        names = [KEY_PREFIX + key for key in keys]
        without = partial(self._ask, "MGET", *names)
        return await self._look(
            keys, partial(self._scripted, self._get_or_lease, names, [self._lease, lease_ms], without)
        )

    async def _written(self, names: Sequence[str], values: Sequence[bytes], leases: Sequence[str]) -> None:
        if not names and self._scripts_refused_until is not None:
            return  # then there are no leases
        keys, args = [*names, *leases], [self._ttl_s, self._lease, *values]
        without = partial(self._set, names, values)
        await self._attempt(self._writes, partial(self._scripted, self._put_and_release, keys, args, without))

    async def _look(
        self, keys: Sequence[str], command: Callable[[], Awaitable[Any]]
    ) -> list[LabelScores | Lease | None]:
        """What the command answers for each key, counted."""
        if not keys:
            return []
        values = await self._attempt(self._reads, command)
        if not isinstance(values, list) or len(values) != len(keys):
            self.counters["misses"] += len(keys)
            return [None] * len(keys)
        ours = Lease.OURS
        # Nearly all of what is new are 1s; and a count over scores would compare them field by field.
        found = [ours if value == 1 else self._read(key, value) for key, value in zip(keys, values, strict=True)]
        hits = theirs = 0
        for each in found:
            if each is not None and each is not ours:
                if each is Lease.THEIRS:
                    theirs += 1
                else:
                    hits += 1
        self.counters["misses"] += len(found) - hits - theirs
        self.counters["hits"] += hits
        return found

    def _read(self, key: str, value: object) -> LabelScores | Lease | None:
        if not isinstance(value, bytes):
            return None
        if value.startswith(LEASE):
            return Lease.OURS if value == self._lease else Lease.THEIRS
        scores = self._seal.open(key, value)
        if scores is None:
            self.counters["rejected"] += 1
        return scores

    async def _scripted(
        self, script: AsyncScript, names: Sequence[str], args: Sequence[Any], otherwise: Callable[[], Awaitable[Any]]
    ) -> Any:
        """What the script returns; what `otherwise` does where this user may not run scripts."""
        if self._may_try_scripts():
            try:
                answer = await self._run(script, names, args)
            except ResponseError as error:
                if not isinstance(error, NoPermissionError) and not str(error).startswith("unknown command"):
                    raise
                self._scripts_refused_until = self._clock() + SCRIPTS_AGAIN_S
            else:
                self._scripts_refused_until = None
                return answer
        return await otherwise()

    def _may_try_scripts(self) -> bool:
        """Where they were refused, for one caller in each while."""
        if self._scripts_refused_until is None:
            return True
        now = self._clock()
        if now < self._scripts_refused_until:
            return False
        self._scripts_refused_until = now + SCRIPTS_AGAIN_S
        return True

    async def _run(self, script: AsyncScript, names: Sequence[str], args: Sequence[Any]) -> Any:
        command = ("EVALSHA", script.sha, len(names), *names, *args)
        try:
            return await self._ask(*command)
        except NoScriptError:  # a server that was started anew has none
            await self._redis.script_load(script.script)
            return await self._ask(*command)

    async def _ask(self, *command: str | bytes | int) -> Any:
        """One command and its answer, on a connection of the pool. Raises RedisError.

        What `Redis.execute_command` does, but packed in C: redis-py 8.1 packs in Python, word by word, which is a third
        of the CPU of a look-up of fifty keys and half of that of putting their scores.
        """
        pool = self._redis.connection_pool
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            packed = pack_command(command)  # type: ignore[arg-type] # its stub means a tuple of one (hiredis 3.5)
            await connection.send_packed_command(packed)
            return await connection.read_response()
        finally:
            await pool.release(connection)

    async def _set(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for name, value in zip(names, values, strict=True):
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
