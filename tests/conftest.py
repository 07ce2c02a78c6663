"""Servers that several test modules share. Each is started by the first test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import structlog

from tests.servers.faulty_broker import FaultyBroker
from tests.servers.kafka import ApacheKafka
from tests.servers.redis_server import redis_server

# How fast the machine happens to be decides nothing about a property.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("any machine")

# What the library prints unless it is set up shows an error with every local of every frame, which can take seconds.
_PLAIN = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], _PLAIN])


@pytest.fixture(scope="session")
def apache_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    """One for the whole session: whoever stops it starts it again; topics and groups have names of their own."""
    with ApacheKafka(tmp_path_factory.mktemp("kafka")) as server:
        yield server


@pytest.fixture
def embedded_broker() -> Iterator[FaultyBroker]:
    with FaultyBroker() as broker:
        yield broker


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with redis_server() as url:
        yield url
