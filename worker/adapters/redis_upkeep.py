"""Upkeep of the cache on Redis: alone knows how its entries are counted and removed, by the rule set they are of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from worker.adapters.redis_cache import BAD_URL, KEY_PREFIX
from worker.adapters.redis_trouble import sentence
from worker.errors import ConfigError

PAGE: Final = 1_000
"""Keys that the server looks at in one SCAN: others are served in between."""
SAMPLE: Final = 10_000
"""Entries of a rule set whose size and time left are asked for; SCAN goes through keys in the order of their hash."""
CALL_TIMEOUT_S: Final = 5.0
NO_RULE_SET: Final = "-"
"""Under keys of an earlier layout."""


@dataclass(slots=True)
class Holdings:
    """What is remembered of one rule set."""

    entries: int = 0
    sampled: int = 0
    sampled_bytes: int = 0
    """Of the server's memory."""
    shortest_ttl_s: int | None = None
    longest_ttl_s: int | None = None

    @property
    def bytes(self) -> int:
        """Of all entries, as those sampled are."""
        return self.sampled_bytes * self.entries // max(1, self.sampled)

    def add(self, size: int | None, ttl_ms: int) -> None:
        self.sampled += 1
        self.sampled_bytes += size or 0
        if ttl_ms >= 0:
            ttl_s = ttl_ms // 1000
            self.shortest_ttl_s = ttl_s if self.shortest_ttl_s is None else min(self.shortest_ttl_s, ttl_s)
            self.longest_ttl_s = ttl_s if self.longest_ttl_s is None else max(self.longest_ttl_s, ttl_s)


@dataclass(frozen=True, slots=True)
class Survey:
    """By the id of the rule set. Counts are about right while workers write."""

    holdings: Mapping[str, Holdings]
    complete: bool
    """False: the server holds more keys than were to be looked at."""


def survey(url: str, rule_set: str | None, at_most: int) -> Survey:
    """What is remembered, of one rule set or of all; looks at no more than `at_most` keys. Raises ConfigError."""
    found: dict[str, Holdings] = {}
    with _Server(url) as server:
        for keys in server.pages(rule_set, at_most):
            for scope, own in _by_rule_set(keys).items():
                holdings = found.setdefault(scope, Holdings())
                holdings.entries += len(own)
                for size, ttl_ms in server.measured(own[: SAMPLE - holdings.sampled]):
                    holdings.add(size, ttl_ms)
        return Survey(found, server.complete)


def flush(url: str, rule_set: str | None, at_most: int) -> tuple[int, bool]:
    """Removes what is remembered, of one rule set or of all: how much, and whether that is everything.

    Raises ConfigError; what was removed until then stays removed.
    """
    removed = 0
    with _Server(url) as server:
        for keys in server.pages(rule_set, at_most):
            removed += server.removed(keys)
        return removed, server.complete


def _by_rule_set(keys: Sequence[bytes]) -> Mapping[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for key in keys:
        scope, colon, _ = key[len(KEY_PREFIX) :].decode(errors="replace").partition(":")
        found.setdefault(scope if colon else NO_RULE_SET, []).append(key)
    return found


class _Server:
    def __init__(self, url: str) -> None:
        retry = Retry(NoBackoff(), 0)
        try:
            self._redis: Redis = Redis.from_url(
                url,
                protocol=2,
                retry=retry,
                socket_timeout=CALL_TIMEOUT_S,
                socket_connect_timeout=CALL_TIMEOUT_S,
                driver_info=None,
            )
        except (ValueError, TypeError, RedisError):
            raise ConfigError(BAD_URL) from None  # the cause may quote a piece of the password
        self.complete = True

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._redis.close()

    def pages(self, rule_set: str | None, at_most: int) -> Iterator[list[bytes]]:
        pattern = f"{KEY_PREFIX}*" if rule_set is None else f"{KEY_PREFIX}{rule_set}:*"
        cursor, looked_at = 0, 0
        while True:
            cursor, keys = self._ask("scan", cursor, match=pattern, count=PAGE)
            looked_at += PAGE
            if keys:
                yield keys
            if not cursor:
                return
            if looked_at >= at_most:
                self.complete = False
                return

    def measured(self, keys: Sequence[bytes]) -> list[tuple[int | None, int]]:
        """Bytes of memory and milliseconds left of each."""
        if not keys:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.memory_usage(key)
            pipeline.pttl(key)
        try:
            answers = pipeline.execute()
        except RedisError as error:
            raise _trouble(error) from error
        return list(zip(answers[::2], answers[1::2], strict=True))

    def removed(self, keys: Sequence[bytes]) -> int:
        return int(self._ask("unlink", *keys))

    def _ask(self, command: str, *args: Any, **options: Any) -> Any:
        try:
            return getattr(self._redis, command)(*args, **options)
        except RedisError as error:
            raise _trouble(error) from error


def _trouble(error: RedisError) -> ConfigError:
    said = sentence(error, CALL_TIMEOUT_S)
    return ConfigError(said if "ROUTER_REDIS_URL" in said else f"{said}: check ROUTER_REDIS_URL")
