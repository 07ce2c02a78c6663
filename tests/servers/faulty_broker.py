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
