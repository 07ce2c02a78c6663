"""Which cache the settings name, and the secret that its keys and values are sealed with."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping

from worker.adapters.memory import MemoryCache
from worker.adapters.redis_cache import RedisCache
from worker.adapters.tiered_cache import TieredCache
from worker.errors import ConfigError
from worker.ports import ScoreCache
from worker.settings import Settings

MEMORY_CACHE_ENTRIES = 100_000
NEAR_TTL_S = 300
"""What is forgotten in Redis (`cache flush`) is forgotten by every worker within it."""


def make_cache(
    settings: Settings, secret: bytes, on_trouble: Callable[[str | None], None] = lambda _: None
) -> ScoreCache:
    """A bounded memory of this process, in front of Redis where one is named, whose trouble `on_trouble` is told."""
    shared = settings.redis_url is not None
    near = MemoryCache(
        max_entries=MEMORY_CACHE_ENTRIES,
        max_bytes=settings.cache_memory_bytes,
        ttl_s=min(settings.cache_ttl_s, NEAR_TTL_S) if shared else settings.cache_ttl_s,
        clock=time.monotonic,
    )
    if settings.redis_url is None:
        return near
    far = RedisCache(
        settings.redis_url.get_secret_value(),
        secret=secret,
        owner=secrets.token_bytes(8),
        ttl_s=settings.cache_ttl_s,
        timeout_s=settings.redis_timeout_ms / 1000,
        clock=time.monotonic,
        on_trouble=on_trouble,
    )
    return TieredCache(near, far)


def cache_counters(cache: ScoreCache) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Those of the memory, and those of Redis; empty where there is none."""
    near, far = (cache.near, cache.far) if isinstance(cache, TieredCache) else (cache, None)
    return (
        near.counters if isinstance(near, MemoryCache) else {},
        far.counters if isinstance(far, RedisCache) else {},
    )


def cache_secret(settings: Settings) -> bytes:
    """The secret of keys and values. Raises ConfigError where a shared cache has none."""
    if settings.cache_secret is not None:
        return settings.cache_secret.get_secret_value().encode()
    if settings.redis_url is not None:
        raise ConfigError(
            "ROUTER_REDIS_URL is set without ROUTER_CACHE_SECRET: anybody who can write to Redis could then steer "
            "tickets; set it to the same random string on every worker (`openssl rand -hex 32`)"
        )
    return secrets.token_bytes(32)
