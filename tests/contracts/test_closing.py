"""Closing a Kafka stream ends in time, whatever it was in the middle of when the broker fell silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from confluent_kafka import TopicPartition

from tests.contracts.test_stream import Desk, Member, eventually, make_backend, numbered, settle
from worker.adapters.kafka import KafkaStream
from worker.adapters.kafka_bounded import returns_within

IN_TIME_S = 18.0
"""2 s for settling, 4 s for leaving, and what a loaded machine takes besides."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as closing:
        yield closing


@pytest.fixture(params=["apache", "apache-exactly-once"])
def desk(request: pytest.FixtureRequest, stack: ExitStack) -> Desk:
    return Desk(make_backend(request.param, request), 1, stack)


def opened(member: Member) -> None: ...


def joining(member: Member) -> None:
    member.poll(0.05)


def working(member: Member) -> None:
    eventually(lambda: len(member.got) == 3, member)
    settle(member, member.settlement(member.got[:1]))


def commit_that_nobody_knows_of(member: Member) -> None:
    """Such as one that the client sends again by itself, to another coordinator."""
    working(member)
    member.after_silence = lambda: consumer_of(member).commit(  # type: ignore[attr-defined]
        offsets=[TopicPartition(member.got[0].partition.topic, 0, 2)], asynchronous=True
    )


def consumer_of(member: Member):  # type: ignore[no-untyped-def]
    assert isinstance(member.stream, KafkaStream)
    return member.stream._consumer


@pytest.mark.kafka
@pytest.mark.parametrize("state", [opened, joining, working, commit_that_nobody_knows_of])
def test_closing_ends_in_every_state_while_the_broker_is_silent(desk: Desk, state: Callable[[Member], None]) -> None:
    desk.put(0, numbered(3))
    member = desk.join(settle_timeout_s=2.0, release_timeout_s=2.0)
    state(member)
    desk.backend.stop_answering()
    try:
        getattr(member, "after_silence", lambda: None)()
        before = time.monotonic()
        member.stream.close()
        took = time.monotonic() - before
    finally:
        desk.backend.answer_again()
    assert took < IN_TIME_S
    assert member.epochs == {}


class TestReturnsWithin:
    def test_a_call_that_never_returns_is_left_behind(self) -> None:
        never = threading.Event()
        before = time.monotonic()
        assert not returns_within(never.wait, 0.1, "never")
        assert time.monotonic() - before < 5
        never.set()

    def test_what_the_call_raises_is_raised(self) -> None:
        assert returns_within(lambda: None, 5, "at once")
        with pytest.raises(ZeroDivisionError):
            returns_within(lambda: 1 / 0, 5, "bug")

        def late() -> None:
            raise TimeoutError("its own")

        with pytest.raises(TimeoutError, match="its own"):
            returns_within(late, 5, "late")
