"""A broker and a cache on this machine for trying things out: what they hold, and the settings that lead to them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from worker.adapters.embedded import CLIENT_SETTINGS, EmbeddedBroker, EmbeddedCache
from worker.runtime.service import Stoppable, until_signalled
from worker.settings import PREFIX
from worker.wiring import Desk

SECRET_BYTES = 16


class _Open:
    """What is open until it is told to end."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    def stop(self) -> None:
        self._ended.set()

    async def until_stopped(self) -> None:
        await self._ended.wait()


async def local(folders: Sequence[Path], ready: Callable[[Mapping[str, str]], None]) -> None:
    """Both until SIGINT or SIGTERM, with the topics of these rule sets. `ready` is told the variables by which other
    processes reach them. Raises ConfigError where a rule set is wrong or one of them does not start."""
    desks = [Desk.load(folder) for folder in folders]

    async def work(announce: Callable[[Stoppable], None]) -> None:
        opened = _Open()
        announce(opened)
        with EmbeddedBroker() as broker, EmbeddedCache() as cache:
            for topic in dict.fromkeys(topic for desk in desks for topic in _topics(desk)):
                broker.create_topic(topic)
            ready(_variables(broker.bootstrap_servers, cache.url))
            await opened.until_stopped()

    await until_signalled(work, forced=lambda: None)


def _topics(desk: Desk) -> Sequence[str]:
    return (desk.rule_set.input_topic, *desk.rule_set.topics_beside_input)


def _variables(bootstrap_servers: str, redis_url: str) -> Mapping[str, str]:
    settings: dict[str, object] = {
        "kafka_bootstrap_servers": bootstrap_servers,
        **CLIENT_SETTINGS,
        "redis_url": redis_url,
        "cache_secret": secrets.token_hex(SECRET_BYTES),
        "engine": "llama_cpp",
    }
    return {PREFIX + name.upper(): str(value) for name, value in settings.items()}
