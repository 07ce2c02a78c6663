"""What the integration tests share: one stub engine a module, and a desk of its own for every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.desk import Desk, StubProcess
from tests.servers.kafka import ApacheKafka


@pytest.fixture(scope="module")
def engine() -> Iterator[StubProcess]:
    with StubProcess() as stub:
        yield stub


@pytest.fixture
def desk(tmp_path: Path, apache_kafka: ApacheKafka, engine: StubProcess) -> Desk:
    return Desk(tmp_path, apache_kafka.bootstrap_servers, engine.url)
