"""What goes wrong with other clients of Kafka, tried on the stream (docs/pitfalls.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.contracts.stream_backends import ApacheBackend
from tests.contracts.test_stream import Desk, eventually, make_backend, marked, numbered, settle, settlement
from worker.ports import Output


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as closing:
        yield closing


@pytest.fixture(params=marked(["embedded", "apache", "apache-exactly-once"]))
def desk(request: pytest.FixtureRequest, stack: ExitStack) -> Desk:
    return Desk(make_backend(request.param, request), 1, stack)


def test_a_producer_queue_of_ten_records_delivers_two_hundred_in_one_settlement(desk: Desk) -> None:
    desk.put(0, numbered(200))
    member = desk.join(properties={"queue.buffering.max.messages": 10, "heartbeat.interval.ms": 500})
    eventually(lambda: len(member.got) == 200, member)
    two_each = {
        d: [Output(desk.output, d.key, d.value), Output(desk.output, d.key, b"of " + d.value)]
        for d in member.got
        if d.value
    }
    settle(member, settlement(two_each))
    assert desk.committed() == {0: 200}
    assert desk.outputs() == [value for n in range(200) for value in (b"%d" % n, b"of %d" % n)]


@pytest.mark.kafka
def test_an_input_topic_that_is_deleted_under_the_worker_is_told_of(
    request: pytest.FixtureRequest, stack: ExitStack
) -> None:
    desk = Desk(make_backend("apache", request), 1, stack)
    assert isinstance(desk.backend, ApacheBackend)
    desk.put(0, numbered(2))
    member = desk.join(properties={"topic.metadata.refresh.interval.ms": 1_000, "heartbeat.interval.ms": 500})
    eventually(lambda: len(member.got) == 2, member)
    desk.backend.delete_topic(desk.input)
    eventually(lambda: desk.input in (member.stream.trouble() or ""), member, within_s=90.0)
    assert "gone" in (member.stream.trouble() or "")
