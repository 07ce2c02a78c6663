"""The embedded broker with faults on demand: librdkafka's own mock calls, through the symbols of the wheel."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence

from worker.adapters.embedded import EmbeddedBroker


class Request(enum.IntEnum):
    """Kafka's numbers of the requests that a test may want to fail."""

    PRODUCE = 0
    FETCH = 1
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    INIT_PRODUCER_ID = 22


class FaultyBroker(EmbeddedBroker):
    """Error codes are Kafka's (KafkaError.NOT_COORDINATOR and so on)."""

    _BROKER = 1

    def set_down(self, down: bool) -> None:
        """Down: connections are closed and refused."""
        call = self._library.rd_kafka_mock_broker_set_down if down else self._library.rd_kafka_mock_broker_set_up
        call.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        assert call(self._cluster, self._BROKER) == 0

    def fail(self, request: Request, errors: Sequence[int]) -> None:
        """The next requests of this kind are answered with these errors, one each."""
        call = self._library.rd_kafka_mock_push_request_errors_array
        call.argtypes = [ctypes.c_void_p, ctypes.c_int16, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int)]
        call.restype = None
        call(self._cluster, request, len(errors), (ctypes.c_int * len(errors))(*errors))

    def fail_topic(self, topic: str, error: int) -> None:
        """Metadata and Produce answer with this error for the topic; 0 ends that."""
        call = self._library.rd_kafka_mock_topic_set_error
        call.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
        call.restype = None
        call(self._cluster, topic.encode(), error)

    def set_round_trip(self, milliseconds: int) -> None:
        call = self._library.rd_kafka_mock_broker_set_rtt
        call.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int]
        assert call(self._cluster, self._BROKER, milliseconds) == 0


class _Memory(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Argument(ctypes.Union):
    _fields_ = (
        ("text", ctypes.c_char_p),
        ("memory", _Memory),
        ("pointer", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("padding", ctypes.c_char * 64),
    )


class _Variadic(ctypes.Structure):
    """rd_kafka_vu_t"""

    _fields_ = (("kind", ctypes.c_int), ("argument", _Argument))


_TOPIC, _VALUE, _KEY, _FLAGS, _HEADERS, _COPY = 1, 4, 5, 7, 10, 2


def produce_raw(
    broker: EmbeddedBroker, topic: str, key: bytes, value: bytes, headers: Sequence[tuple[bytes, bytes]]
) -> None:
    """For header names that are not UTF-8, which confluent-kafka cannot write."""
    library, client = broker._library, broker._client
    library.rd_kafka_headers_new.restype = ctypes.c_void_p
    library.rd_kafka_header_add.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_ssize_t,
        ctypes.c_char_p,
        ctypes.c_ssize_t,
    ]
    library.rd_kafka_produceva.restype = ctypes.c_void_p
    library.rd_kafka_produceva.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Variadic), ctypes.c_size_t]
    library.rd_kafka_flush.argtypes = [ctypes.c_void_p, ctypes.c_int]
    packed = library.rd_kafka_headers_new(len(headers))
    for name, content in headers:
        library.rd_kafka_header_add(packed, name, len(name), content, len(content))
    arguments = (_Variadic * 5)()
    for place, kind in enumerate((_TOPIC, _VALUE, _KEY, _HEADERS, _FLAGS)):
        arguments[place].kind = kind
    arguments[0].argument.text = topic.encode()
    arguments[1].argument.memory = _Memory(ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p), len(value))
    arguments[2].argument.memory = _Memory(ctypes.cast(ctypes.c_char_p(key), ctypes.c_void_p), len(key))
    arguments[3].argument.pointer = packed
    arguments[4].argument.number = _COPY
    assert library.rd_kafka_produceva(client, arguments, len(arguments)) is None
    assert library.rd_kafka_flush(client, 10_000) == 0
