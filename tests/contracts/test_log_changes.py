"""An input log that is not what it was: made anew, or cut before it was read. No ticket in it is passed over unsaid."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.contracts.stream_backends import QUIET, ApacheBackend
from tests.contracts.test_stream import Desk, Member, eventually, make_backend, numbered, settle
from worker.ports import Gap, Partition, Paused

pytestmark = [pytest.mark.timeout(300), pytest.mark.kafka]


@pytest.fixture(params=["apache", "apache-exactly-once"])
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    with ExitStack() as stack:
        yield Desk(make_backend(request.param, request), 1, stack)


def admin_of(desk: Desk) -> AdminClient:
    assert isinstance(desk.backend, ApacheBackend)
    return AdminClient({"bootstrap.servers": desk.backend.bootstrap_servers}, logger=QUIET)


def make_anew(desk: Desk) -> None:
    admin = admin_of(desk)
    admin.delete_topics([desk.input])[desk.input].result(30)
    until = time.monotonic() + 30
    while True:  # the broker goes on deleting for a while
        try:
            admin.create_topics([NewTopic(desk.input, 1, 1)])[desk.input].result(30)
            return
        except KafkaException:
            assert time.monotonic() < until
            time.sleep(0.1)


def cut(desk: Desk, offset: int) -> None:
    """As retention does."""
    at = TopicPartition(desk.input, 0, offset)
    admin = admin_of(desk)
    admin.delete_records([at])[at].result(30)


def settle_what_came(member: Member) -> None:
    """What is of the assignment that is in force."""
    owned = [d for d in member.got if member.epochs.get(d.partition) == d.epoch]
    settle(member, member.settlement(owned))


def test_a_topic_that_was_made_anew_is_read_whole_and_every_ticket_in_it_settled(desk: Desk) -> None:
    desk.put(0, numbered(20))
    member = desk.join()
    eventually(lambda: len(member.got) == 20, member)
    settle_what_came(member)
    assert desk.outputs() == numbered(20)

    make_anew(desk)
    fresh = [b"new %d" % n for n in range(30)]
    desk.put(0, fresh)
    # The client may go on at offset 20 of the new log, until the worker sees that it is another one.
    eventually(lambda: member.values()[-30:] == fresh, member, within_s=90.0)
    assert all(gap.stepped_back for gap in member.gaps)
    settle_what_came(member)
    assert desk.outputs() == numbered(20) + fresh
    assert desk.committed() == {0: 30}


def test_what_was_deleted_before_it_was_read_is_counted(desk: Desk) -> None:
    desk.put(0, numbered(10))
    member = desk.join()
    eventually(lambda: len(member.got) == 10, member)
    settle_what_came(member)
    member.stream.set_paused(Paused(everything=True))
    desk.put(0, numbered(100))
    cut(desk, 80)
    member.stream.set_paused(Paused())
    eventually(lambda: member.values()[-30:] == numbered(100)[70:], member, within_s=60.0)
    # What the client had fetched already is read all the same.
    read = {d.offset for d in member.got}
    assert sum(gap.expired for gap in member.gaps) == len(set(range(110)) - read)
    assert not any(gap.stepped_back for gap in member.gaps)


def test_what_was_deleted_while_nobody_was_there_is_counted(desk: Desk) -> None:
    desk.put(0, numbered(100))
    first = desk.join()
    eventually(lambda: len(first.got) == 100, first)
    settle(first, first.settlement(first.got[:10]))
    first.stream.close()
    cut(desk, 50)
    second = desk.join()
    eventually(lambda: len(second.got) == 50, second, within_s=60.0)
    assert second.gaps == [Gap(Partition(desk.input, 0), 10, 50)]
    assert second.values() == numbered(100)[50:]
