"""An input log that is not what it was: made anew, or cut before it was read. No ticket in it is passed over unsaid."""

from __future__ import annotations

import logging
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import cast

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.contracts.stream_backends import QUIET, ApacheBackend
from tests.contracts.test_stream import Desk, Member, eventually, make_backend, numbered, settle
from tests.servers.kafka import ApacheKafka
from tests.waiting import wait_for
from worker.adapters.kafka import KafkaStream
from worker.adapters.kafka_exactly_once import ExactlyOnce
from worker.adapters.kafka_records import metadata_of
from worker.adapters.kafka_topic_identity import Identity, TopicIdentity
from worker.ports import Gap, Partition, Paused

EARLIER = "AAAAAAAAAAAAAAAAAAAAAQ"
"""The id of no topic that is there."""

pytestmark = [pytest.mark.timeout(300), pytest.mark.kafka]


@pytest.fixture(params=["apache", "apache-exactly-once"])
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    with ExitStack() as stack:
        yield Desk(make_backend(request.param, request), 1, stack)


@pytest.fixture(params=["apache", "apache-range", "apache-kip848", "apache-exactly-once", "apache-kip848-exactly-once"])
def any_desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    """By each protocol of groups, since each has offsets of its own kind."""
    with ExitStack() as stack:
        yield Desk(make_backend(request.param, request), 1, stack)


@pytest.fixture
def plain_desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    with ExitStack() as stack:
        yield Desk(make_backend("apache", request), 1, stack)


def admin_of(desk: Desk) -> AdminClient:
    assert isinstance(desk.backend, ApacheBackend)
    return AdminClient({"bootstrap.servers": desk.backend.bootstrap_servers}, logger=QUIET)


def make_anew(desk: Desk, copies: int = 1) -> None:
    admin = admin_of(desk)
    admin.delete_topics([desk.input])[desk.input].result(30)
    desk.backend.forget_topics()
    until, unheard = time.monotonic() + 90, False
    while True:  # the broker goes on deleting for a while, and of three nodes the one that was asked may be dead
        try:
            admin.create_topics([NewTopic(desk.input, 1, copies)], request_timeout=10)[desk.input].result(30)
            return
        except KafkaException as error:
            code = error.args[0].code()
            if unheard and code == KafkaError.TOPIC_ALREADY_EXISTS:
                return
            unheard = unheard or code == KafkaError._TIMED_OUT
            assert time.monotonic() < until
            time.sleep(0.1)


def cut(desk: Desk, offset: int) -> None:
    """As retention does."""
    at = TopicPartition(desk.input, 0, offset)
    admin = admin_of(desk)
    admin.delete_records([at])[at].result(30)


def committed_with(desk: Desk) -> tuple[int, str | None]:
    """The group's offset of the one partition, and what was noted with it."""
    assert isinstance(desk.backend, ApacheBackend)
    settings = {"bootstrap.servers": desk.backend.bootstrap_servers, "group.id": desk.group}
    consumer = Consumer(settings, logger=QUIET)
    try:
        (found,) = consumer.committed([TopicPartition(desk.input, 0)], timeout=20)
        return found.offset, found.metadata
    finally:
        consumer.close()


def commit_from_outside(desk: Desk, offset: int, metadata: str) -> None:
    """As tools do, for a group without members."""
    assert isinstance(desk.backend, ApacheBackend)
    settings = {"bootstrap.servers": desk.backend.bootstrap_servers, "group.id": desk.group}
    consumer = Consumer(settings, logger=QUIET)
    try:
        consumer.commit(offsets=[TopicPartition(desk.input, 0, offset, metadata)], asynchronous=False)
    finally:
        consumer.close()


def commit_as_other_clients_do(desk: Desk, places: Mapping[int, tuple[int, bytes]]) -> None:
    """Partition numbers to an offset and metadata, which no NUL follows: OffsetCommit 2 of Kafka's protocol."""
    assert isinstance(desk.backend, ApacheBackend)

    def text(content: bytes) -> bytes:
        return struct.pack(">h", len(content)) + content

    commits = [struct.pack(">iq", number, offset) + text(noted) for number, (offset, noted) in places.items()]
    of_no_member = text(desk.group.encode()) + struct.pack(">i", -1) + text(b"") + struct.pack(">q", -1)
    topic = struct.pack(">i", 1) + text(desk.input.encode()) + struct.pack(">i", len(commits)) + b"".join(commits)
    request = struct.pack(">hhi", 8, 2, 1) + text(b"another client") + of_no_member + topic
    host, port = desk.backend.bootstrap_servers.split(":")

    def taken() -> bool:
        with socket.create_connection((host, int(port)), 20) as connection, connection.makefile("rb") as answers:
            connection.sendall(struct.pack(">i", len(request)) + request)
            answer = answers.read(struct.unpack(">i", answers.read(4))[0])
        codes = answer[-6 * len(commits) :]
        return all(code == 0 for _, code in struct.iter_unpack(">ih", codes))

    wait_for(taken, "the group's coordinator to take the offsets")  # it may be on its way still


def identity_of(desk: Desk) -> Identity:
    admin = admin_of(desk)
    topic = admin.describe_topics(TopicCollection([desk.input]))[desk.input].result(30)
    cluster = admin.describe_cluster().result(30)
    return Identity(str(topic.topic_id).replace("+", "-").replace("/", "_"), str(cluster.cluster_id))


def leave_an_offset_of_the_topic_before(desk: Desk) -> list[bytes]:
    """A worker settles its last tickets when the topic is another one already, and ends before it sees that. Returns
    what is in the new topic: its first twenty lie before the group's offset."""
    desk.put(0, numbered(20))
    member = desk.join()
    eventually(lambda: len(member.got) == 20, member)
    settle(member, member.settlement(member.got[:10]))
    make_anew(desk)
    settle(member, member.settlement(member.got[10:]))
    member.stream.close()
    assert desk.committed() == {0: 20}
    fresh = [b"new %d" % n for n in range(30)]
    desk.put(0, fresh)
    return fresh


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


def test_brokers_forget_a_group_s_offsets_together_with_the_topic(any_desk: Desk) -> None:
    """Apache Kafka 4.3: so the worker that starts next begins at the beginning, without knowing what happened."""
    any_desk.put(0, numbered(20))
    member = any_desk.join()
    eventually(lambda: len(member.got) == 20, member)
    settle_what_came(member)
    member.stream.close()
    make_anew(any_desk)
    eventually(lambda: any_desk.committed() == {})


def test_a_worker_started_on_a_topic_that_was_made_anew_reads_it_whole(any_desk: Desk) -> None:
    fresh = leave_an_offset_of_the_topic_before(any_desk)
    started = any_desk.join()
    eventually(lambda: len(started.got) == 30, started)
    assert started.values() == fresh
    assert started.gaps == [Gap(Partition(any_desk.input, 0), 20, 0)]
    settle_what_came(started)
    assert any_desk.outputs() == numbered(20) + fresh
    assert any_desk.committed() == {0: 30}


def test_an_offset_of_the_topic_before_confirms_no_settlement(request: pytest.FixtureRequest) -> None:
    with ExitStack() as stack:
        desk = Desk(make_backend("apache-exactly-once", request), 1, stack)
        fresh = leave_an_offset_of_the_topic_before(desk)
        started = desk.join()
        eventually(lambda: len(started.got) == 30, started)
        assert isinstance(started.stream, KafkaStream)
        settler = started.stream._settler
        assert isinstance(settler, ExactlyOnce)
        settler._in_doubt = {Partition(desk.input, 0): 5}  # a transaction's answer was lost, and it was aborted
        settle_what_came(started)
        assert desk.outputs() == numbered(20) + fresh


def test_what_is_committed_names_the_topic_that_it_counts_in(desk: Desk) -> None:
    desk.put(0, numbered(20))
    member = desk.join()
    eventually(lambda: len(member.got) == 20, member)
    settle(member, member.settlement(member.got[:10]))
    offset, metadata = committed_with(desk)
    before = Identity.noted(metadata)
    assert offset == 10
    assert before is not None and len(metadata or "") < 63

    make_anew(desk)
    desk.put(0, numbered(5))
    eventually(lambda: member.values()[-5:] == numbered(5) and bool(member.gaps), member, within_s=90.0)

    def settled_in_the_new_one() -> bool:
        # Where the client stepped back by itself, which topic it is comes to light a little later.
        settle_what_came(member)
        offset, metadata = committed_with(desk)
        after = Identity.noted(metadata)
        return offset == 5 and after is not None and after.has_replaced(before)

    eventually(settled_in_the_new_one, member, within_s=90.0)


@pytest.mark.parametrize(
    ("metadata", "begins_at"),
    [
        ("", 20),
        ("set by hand", 20),
        ("ticket-router/1 {earlier} AnotherClusterAltogether;", 20),
        ("ticket-router/1 {earlier} {cluster}", 20),
        ("ticket-router/1 {present} {cluster};", 20),
        ("ticket-router/1 {earlier} {cluster};", 0),
    ],
    ids=["without a note", "a stranger's", "from another cluster", "cut off", "of this topic", "of an earlier topic"],
)
def test_only_an_offset_that_is_known_to_be_of_an_earlier_topic_is_not_gone_by(
    plain_desk: Desk, metadata: str, begins_at: int
) -> None:
    desk = plain_desk
    desk.put(0, numbered(30))
    present = identity_of(desk)
    note = metadata.format(earlier=EARLIER, present=present.topic_id, cluster=present.cluster_id)
    commit_from_outside(desk, 20, note)
    member = desk.join()
    eventually(lambda: bool(member.got) and member.got[-1].offset == 29, member)
    assert member.got[0].offset == begins_at
    assert len(member.gaps) == (begins_at == 0)


def test_what_another_client_noted_with_its_offsets_ends_no_worker(request: pytest.FixtureRequest) -> None:
    """confluent-kafka 2.16 reads on behind what was noted, so that it is of many lengths, with many an end."""
    with ExitStack() as stack:
        desk = Desk(make_backend("apache", request), 60, stack)
        for number in range(60):
            desk.put(number, numbered(2))
        commit_as_other_clients_do(desk, {number: (1, b"\xc3\xa9" * (1 + number)) for number in range(60)})
        for _ in range(3):
            member = desk.join()
            eventually(lambda member=member: len(member.got) == 60, member)  # type: ignore[misc]
            assert {delivery.offset for delivery in member.got} == {1}
            assert member.gaps == []
            member.stream.close()


def test_a_note_of_an_earlier_topic_is_read_whatever_follows_it(request: pytest.FixtureRequest) -> None:
    """As when a tool carries offsets over without the NUL behind their metadata."""
    with ExitStack() as stack:
        desk = Desk(make_backend("apache", request), 60, stack)
        for number in range(60):
            desk.put(number, numbered(2))
        note = Identity(EARLIER, identity_of(desk).cluster_id).note.encode()
        commit_as_other_clients_do(desk, {number: (1, note + b" " * number) for number in range(60)})
        member = desk.join()
        eventually(lambda: len(member.got) == 120, member)
        assert {gap.partition.number for gap in member.gaps} == set(range(60))


class _UnreadablePlace:
    def __init__(self, problem: Exception) -> None:
        self._problem = problem

    @property
    def metadata(self) -> str:
        raise self._problem


@pytest.mark.parametrize(
    ("problem", "read"),
    [
        (UnicodeDecodeError("utf-8", b"ticket-router/1 ;\xff\xfe", 17, 18, "invalid"), "ticket-router/1 ;\ufffd\ufffd"),
        (SystemError("error return without exception set"), None),
    ],
)
def test_metadata_that_the_client_cannot_show_is_read_as_far_as_it_goes(problem: Exception, read: str | None) -> None:
    assert metadata_of(cast("TopicPartition", _UnreadablePlace(problem))) == read


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        "",
        "ticket-router/1",
        "ticket-router/1 ;",
        f"ticket-router/1 {EARLIER} a cluster;",
        f"ticket-router/1 {EARLIER} {'c' * 101};",
        f"ticket-router/1 {EARLIER}Q cluster;",
        f"ticket-router/2 {EARLIER} cluster;",
        f" ticket-router/1 {EARLIER} cluster;",
        f"ticket-router/1 topic-id={EARLIER} cluster-id=cluster",
    ],
)
def test_what_is_not_wholly_a_note_is_none(metadata: str | None) -> None:
    assert Identity.noted(metadata) is None


@pytest.fixture(scope="module")
def kafka_without_notes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    with ApacheKafka(tmp_path_factory.mktemp("kafka"), {"offset.metadata.max.bytes": "62"}) as server:
        yield server


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_brokers_that_take_no_note_take_the_offsets(
    kafka_without_notes: ApacheKafka, delivery: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        QUIET.addHandler(caplog.handler)
        stack.callback(QUIET.removeHandler, caplog.handler)
        desk = Desk(ApacheBackend(kafka_without_notes, delivery, delivery=delivery), 2, stack)
        desk.put(0, numbered(5))
        desk.put(1, numbered(5))
        member = desk.join()
        eventually(lambda: len(member.got) == 10, member)
        # At once, since it may be the last settlement of this worker.
        settled = member.stream.settle(member.settlement(member.got))
        assert {partition.number: offset for partition, offset in settled.committed.items()} == {0: 5, 1: 5}
        assert desk.committed() == {0: 5, 1: 5}
        desk.put(0, numbered(7)[5:])
        eventually(lambda: len(member.got) == 12, member)
        settle(member, member.settlement(member.got[10:]))
        member.stream.close()
        assert desk.committed() == {0: 7, 1: 5}
        assert sorted(desk.outputs(), key=str) == sorted([*numbered(7), *numbered(5)], key=str)
        told = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        assert len([line for line in told if "offset.metadata.max.bytes" in line]) == 1
        assert not [line for line in told if "commit refused" in line]


def test_while_the_topic_s_id_is_not_known_an_offset_that_names_one_is_not_gone_by(
    plain_desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = plain_desk
    desk.put(0, numbered(30))
    commit_from_outside(desk, 20, Identity(EARLIER, identity_of(desk).cluster_id).note)
    away = True
    ask = TopicIdentity.ask

    def unanswered(identity: TopicIdentity, timeout_s: float) -> Identity | None:
        if away:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "nobody answers"))
        return ask(identity, timeout_s)

    monkeypatch.setattr(TopicIdentity, "ask", unanswered)
    monkeypatch.setattr(TopicIdentity, "replaced", lambda _: ())  # which asks by itself
    member = desk.join()
    eventually(lambda: "where to begin is not known yet" in (member.stream.trouble() or ""), member)
    assert member.got == []
    away = False
    eventually(lambda: len(member.got) == 30, member)
    assert member.stream.trouble() is None
    assert member.gaps == [Gap(Partition(desk.input, 0), 20, 0)]


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
