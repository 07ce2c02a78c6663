"""Commands about what is remembered in Redis."""

from __future__ import annotations

from pathlib import Path

from worker.adapters import redis_upkeep
from worker.errors import ConfigError
from worker.settings import Settings
from worker.wiring import Desk


def cache_stats(settings: Settings, folder: Path | None, at_most: int) -> redis_upkeep.Survey:
    """What is remembered in Redis, of one rule set or of all. Raises ConfigError."""
    return redis_upkeep.survey(_redis_url(settings), _rule_set_id(folder), at_most)


def cache_flush(settings: Settings, folder: Path | None, at_most: int) -> tuple[int, bool]:
    """Forgets it: how many entries, and whether that is all. Raises ConfigError."""
    return redis_upkeep.flush(_redis_url(settings), _rule_set_id(folder), at_most)


def _redis_url(settings: Settings) -> str:
    if settings.redis_url is None:
        raise ConfigError("no ROUTER_REDIS_URL: what a worker remembers by itself is gone when it ends")
    return settings.redis_url.get_secret_value()


def _rule_set_id(folder: Path | None) -> str | None:
    return None if folder is None else Desk.load(folder).rule_set.id
