"""Servers that several test modules share. Each is started by the first test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

from tests.servers.faulty_broker import FaultyBroker
from tests.servers.kafka import ApacheKafka
from tests.servers.redis_server import redis_server

# How fast the machine happens to be decides nothing about a property.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("any machine")


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
