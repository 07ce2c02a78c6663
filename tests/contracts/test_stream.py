"""What every ticket stream promises, on the broker in memory, the embedded one and a real Apache Kafka."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from confluent_kafka import KafkaError

from tests.contracts.stream_backends import (
    ApacheBackend,
    Backend,
    EmbeddedBackend,
    MemoryBackend,
    partitions,
)
from tests.servers.faulty_broker import FaultyBroker, Request, produce_raw
from worker.adapters import kafka_lag
from worker.adapters.kafka_records import UNREADABLE_HEADERS
from worker.errors import ConfigError, StreamRetriable
from worker.ports import (
    Delivery,
    Finished,
    Gap,
    Headers,
    Output,
    Partition,
    PartitionSettlement,
    Paused,
    Settled,
    Settlement,
    TicketStream,
)

PATIENCE_S = 40.0
"""How long something that should happen soon may take on a loaded machine."""

NAMES = itertools.count()


def name(what: str) -> str:
    """Brokers outlive tests: no two tests share a topic or a group."""
    return f"{what}-{next(NAMES)}"


class Member:
    """A stream and its listener; remembers all it was told. Finished work is settled when it is asked to hand over."""

    def __init__(self, stream: TicketStream, output_topic: str) -> None:
        self.stream = stream
        self.output_topic = output_topic
        self.got: list[Delivery] = []
        self.events: list[tuple[str, tuple[Partition, ...]]] = []
        self.handed_over: list[Settled] = []
        self.epochs: dict[Partition, int] = {}
        self.seen_epochs: list[int] = []
        self.gaps: list[Gap] = []
        self.finished_when_revoked: Callable[[Delivery], bool] = lambda _: False
        stream.open(self)

    def assigned(self, epochs: Mapping[Partition, int]) -> None:
        self.events.append(("assigned", tuple(sorted(epochs))))
        assert not set(epochs) & set(self.epochs), "assigned twice without leaving"
        assert min(epochs.values()) > max(self.seen_epochs, default=0), "an epoch that is not new"
        self.epochs.update(epochs)
        self.seen_epochs.extend(epochs.values())

    def revoking(self, leaving: Sequence[Partition]) -> Settlement:
        self.events.append(("revoking", tuple(sorted(leaving))))
        held = [d for d in self.got if d.partition in leaving and d.epoch == self.epochs[d.partition]]
        return self.settlement([delivery for delivery in held if self.finished_when_revoked(delivery)])

    def released(self, left: Sequence[Partition], settled: Settled) -> None:
        self.events.append(("released", tuple(sorted(left))))
        self.handed_over.append(settled)
        for partition in left:
            del self.epochs[partition]

    def lost(self, left: Sequence[Partition]) -> None:
        self.events.append(("lost", tuple(sorted(left))))
        for partition in left:
            del self.epochs[partition]

    def gap(self, gap: Gap) -> None:
        self.gaps.append(gap)

    def poll(self, timeout_s: float = 0.05) -> None:
        self.got.extend(self.stream.poll(500, timeout_s))
        assert dict(self.stream.assignment()) == self.epochs

    def reads_from_all_it_holds(self) -> bool:
        return {d.partition for d in self.got if d.epoch == self.epochs.get(d.partition)} == set(self.epochs)

    def values(self) -> list[bytes | None]:
        return [delivery.value for delivery in self.got]

    def settlement(self, deliveries: Sequence[Delivery], topic: str | None = None) -> Settlement:
        """Each delivery's output is itself, on the output topic."""
        return settlement({d: [Output(topic or self.output_topic, d.key, d.value, d.headers)] for d in deliveries})


def settlement(outputs: Mapping[Delivery, Sequence[Output]]) -> Settlement:
    lanes: dict[tuple[Partition, int], list[Finished]] = {}
    for delivery, produced in outputs.items():
        lanes.setdefault((delivery.partition, delivery.epoch), []).append(Finished(delivery, tuple(produced)))
    parts = [
        PartitionSettlement(partition, epoch, tuple(items), items[-1].delivery.offset + 1)
        for (partition, epoch), items in lanes.items()
    ]
    return Settlement(tuple(parts))


def eventually(done: Callable[[], bool], *members: Member, within_s: float = PATIENCE_S) -> None:
    until = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < until, [(m.events, len(m.got), m.stream.trouble()) for m in members]
        for member in members:
            member.poll()


def settle(member: Member, wanted: Settlement, within_s: float = PATIENCE_S) -> Settled:
    """As the runtime does: again, as long as it may be tried again."""
    until = time.monotonic() + within_s
    while True:
        try:
            return member.stream.settle(wanted)
        except StreamRetriable:
            assert time.monotonic() < until
            member.poll()


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


class Desk:
    """An input topic, an output topic and a group on one broker."""

    def __init__(self, backend: Backend, partition_count: int, stack: ExitStack) -> None:
        self.backend = backend
        self.stack = stack
        self.input, self.output, self.group = name("tickets"), name("routed"), name("group")
        backend.create_topic(self.input, partition_count)
        backend.create_topic(self.output, 1)

    def join(self, **settings: Any) -> Member:
        stream = self.backend.stream(self.input, self.group, **settings)
        self.stack.callback(stream.close)
        return Member(stream, self.output)

    def put(self, partition: int, values: Sequence[bytes | None]) -> None:
        for value in values:
            self.backend.produce(self.input, partition, value)
        delivered = getattr(self.backend, "delivered", None)
        if delivered is not None:
            delivered()

    def committed(self) -> Mapping[int, int]:
        return self.backend.committed(self.group, self.input)

    def outputs(self) -> list[bytes | None]:
        return [record.value for record in self.backend.records(self.output)]


BACKENDS = ["memory", "embedded", "apache", "apache-exactly-once"]
GROUPS = [*BACKENDS, "apache-range", "apache-kip848", "apache-kip848-exactly-once"]
"""Rebalances differ by protocol."""


def make_backend(kind: str, request: pytest.FixtureRequest) -> Backend:
    if kind == "memory":
        return MemoryBackend()
    if kind == "embedded":
        return EmbeddedBackend(request.getfixturevalue("embedded_broker"))
    settings: dict[str, dict[str, Any]] = {
        "apache": {},
        "apache-range": {"assignment_strategy": "range"},
        "apache-kip848": {"group_protocol": "consumer"},
        "apache-exactly-once": {"delivery": "exactly_once"},
        "apache-kip848-exactly-once": {"group_protocol": "consumer", "delivery": "exactly_once"},
    }
    return ApacheBackend(request.getfixturevalue("apache_kafka"), kind, **settings[kind])


def marked(kinds: Sequence[str]) -> list[Any]:
    return [pytest.param(kind, marks=[pytest.mark.kafka] if "apache" in kind else []) for kind in kinds]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as closing:
        yield closing


@pytest.fixture(params=marked(BACKENDS))
def desk(request: pytest.FixtureRequest, stack: ExitStack) -> Desk:
    """One partition."""
    return Desk(make_backend(request.param, request), 1, stack)


@pytest.fixture(params=marked([kind for kind in GROUPS if kind not in ("embedded", "apache-range")]))
def lively_desk(request: pytest.FixtureRequest, stack: ExitStack) -> Desk:
    """Four partitions, where members leave and die as they should: on the mock cluster a member that left keeps its
    partitions until its session ends."""
    return Desk(make_backend(request.param, request), 4, stack)


@pytest.fixture(params=marked(GROUPS))
def wide_desk(request: pytest.FixtureRequest, stack: ExitStack) -> Desk:
    """Four partitions."""
    return Desk(make_backend(request.param, request), 4, stack)


class TestMessages:
    def test_arrive_in_order_and_leave_byte_by_byte_as_they_came(self, desk: Desk) -> None:
        headers: Headers = (
            ("invalid", b"\xc3\x28"),
            ("none", None),
            ("", b""),
            ("twice", b"1"),
            ("twice", b"2"),
            ("한글", b"x"),
        )
        sent = [
            (b"\xff\x00", b"\xc3\x28", headers),
            (b"", b"", ()),
            (None, None, (("tombstone", b"1"),)),
            ("키".encode(), "표".encode() * 1_000, ()),
        ]
        for key, value, each in sent:
            desk.backend.produce(desk.input, 0, value, key, each)
        desk.put(0, numbered(50))
        sent += [(None, value, ()) for value in numbered(50)]

        member = desk.join()
        eventually(lambda: len(member.got) == len(sent), member)

        assert [(d.key, d.value, d.headers) for d in member.got] == sent
        assert [d.offset for d in member.got] == list(range(len(sent)))
        assert all(abs(d.timestamp_ms / 1_000 - time.time()) < 300 for d in member.got)

        settle(member, member.settlement(member.got))
        assert [(r.key, r.value, r.headers) for r in desk.backend.records(desk.output)] == sent

    def test_a_header_name_that_is_not_utf8_costs_the_headers_but_not_the_message(
        self, embedded_broker: FaultyBroker, stack: ExitStack
    ) -> None:
        """Among many others, because the interpreter calls what it calls often without looking for errors."""
        desk = Desk(EmbeddedBackend(embedded_broker), 1, stack)
        for round_ in range(3):
            desk.put(0, numbered(100))
            headers = [(b"\xc3\x28", b"x"), (b"fine", b"y")]
            produce_raw(embedded_broker, desk.input, b"key", b"unreadable %d" % round_, headers)
        member = desk.join()
        eventually(lambda: len(member.got) == 303, member)
        unreadable = [d for d in member.got if d.headers]
        assert [d.headers for d in unreadable] == [UNREADABLE_HEADERS] * 3
        assert [(d.key, d.value) for d in unreadable] == [(b"key", b"unreadable %d" % n) for n in range(3)]
        settle(member, member.settlement(member.got))
        assert desk.outputs() == member.values()

    def test_no_more_come_than_were_asked_for(self, desk: Desk) -> None:
        desk.put(0, numbered(30))
        member = desk.join()
        got: list[Delivery] = []
        until = time.monotonic() + PATIENCE_S
        while len(got) < 30 and time.monotonic() < until:
            batch = member.stream.poll(7, 0.5)
            assert len(batch) <= 7
            got.extend(batch)
        assert [d.value for d in got] == numbered(30)

    def test_one_message_does_not_wait_for_more(self, desk: Desk) -> None:
        member = desk.join()
        eventually(lambda: bool(member.epochs), member)
        desk.put(0, numbered(1))
        before = time.monotonic()
        assert [d.value for d in member.stream.poll(500, 60.0)] == numbered(1)
        assert time.monotonic() - before < 30.0


class TestSettling:
    def test_commits_what_was_settled_and_resumes_behind_it(self, desk: Desk) -> None:
        desk.put(0, numbered(10))
        first = desk.join()
        eventually(lambda: len(first.got) == 10, first)
        settled = settle(first, first.settlement(first.got[:4]))

        assert settled == Settled({Partition(desk.input, 0): 4})
        assert desk.committed() == {0: 4}
        assert desk.outputs() == numbered(4)
        first.stream.close()

        second = desk.join()
        eventually(lambda: len(second.got) == 6, second)
        assert second.values() == numbered(10)[4:]

    def test_settles_in_steps_without_producing_anything_twice(self, desk: Desk) -> None:
        desk.put(0, numbered(12))
        member = desk.join()
        eventually(lambda: len(member.got) == 12, member)
        for start in range(0, 12, 3):
            settle(member, member.settlement(member.got[start : start + 3]))
        assert desk.committed() == {0: 12}
        assert desk.outputs() == numbered(12)

    def test_an_offset_without_outputs_is_committed_too(self, desk: Desk) -> None:
        desk.put(0, numbered(3))
        member = desk.join()
        eventually(lambda: len(member.got) == 3, member)
        assert settle(member, settlement({d: [] for d in member.got})).committed == {Partition(desk.input, 0): 3}
        assert desk.outputs() == []

    def test_commits_nothing_while_outputs_are_not_acknowledged(self, desk: Desk) -> None:
        desk.put(0, numbered(5))
        member = desk.join()
        eventually(lambda: len(member.got) == 5, member)
        settle(member, member.settlement(member.got[:1]))  # connections and topics are known by now
        desk.backend.stop_answering()
        try:
            before = time.monotonic()
            with pytest.raises(StreamRetriable):
                member.stream.settle(member.settlement(member.got[1:]))
            assert time.monotonic() - before < 15.0
        finally:
            desk.backend.answer_again()
        assert desk.committed() == {0: 1}

        eventually(lambda: bool(member.epochs), member)
        remaining = [d for d in member.got[1:] if d.epoch == member.epochs[d.partition]]
        if not remaining:  # away for longer than the session: everything unsettled came again
            eventually(lambda: len(member.got) == 9, member)
            remaining = member.got[5:]
        settle(member, member.settlement(remaining))
        assert desk.committed() == {0: 5}
        # The attempt that failed may have arrived all the same: twice is allowed, missing or out of order is not.
        assert list(dict.fromkeys(desk.outputs())) == numbered(5)

    def test_a_settlement_of_another_epoch_is_left_out(self, wide_desk: Desk) -> None:
        wide_desk.put(0, numbered(4))
        wide_desk.put(1, numbered(4))
        member = wide_desk.join()
        eventually(lambda: len(member.got) == 8, member)
        stale = member.settlement(member.got)
        old = stale.partitions[0]
        wrong = PartitionSettlement(old.partition, old.epoch - 100, old.finished, old.next_offset)

        settled = settle(member, Settlement((wrong, stale.partitions[1])))
        assert set(settled.committed) == {stale.partitions[1].partition}
        assert member.stream.settle(Settlement((wrong,))) == Settled()
        assert len(wide_desk.outputs()) == 4


class TestRefusedOutputs:
    def test_an_unknown_topic_holds_up_its_own_partition_only(self, wide_desk: Desk) -> None:
        wide_desk.put(0, numbered(5))
        wide_desk.put(1, numbered(5))
        member = wide_desk.join()
        eventually(lambda: len(member.got) == 10, member)
        bad = next(d for d in member.got if d.partition.number == 0 and d.offset == 2)
        nowhere = Output(name("no-such-topic"), b"k", b"v")
        good = {d: [Output(wide_desk.output, None, b"%d-%d" % (d.partition.number, d.offset))] for d in member.got}

        before = time.monotonic()
        settled = settle(member, settlement({**good, bad: [nowhere]}))
        assert time.monotonic() - before < 20.0
        assert [(r.delivery, r.output, r.code) for r in settled.refused] == [(bad, nowhere, "UNKNOWN_TOPIC_OR_PART")]
        assert nowhere.topic in settled.refused[0].detail
        assert settled.committed == dict(zip(partitions(wide_desk.input, 0, 1), [2, 5], strict=True))
        assert wide_desk.committed() == {0: 2, 1: 5}

        rest = {d: outputs for d, outputs in good.items() if d.partition.number == 0 and d.offset >= 2}
        assert settle(member, settlement(rest)).committed == {Partition(wide_desk.input, 0): 5}
        assert [value for value in wide_desk.outputs() if value and value.startswith(b"0-")] == [
            b"0-%d" % offset for offset in range(5)
        ]

    def test_an_output_that_is_too_large_is_refused_before_it_is_produced(self, desk: Desk) -> None:
        desk.put(0, numbered(5))
        member = desk.join()
        eventually(lambda: len(member.got) == 5, member)
        outputs = {d: [Output(desk.output, None, d.value)] for d in member.got}
        large = Output(desk.output, None, b"x" * 1_000_001)
        before_it = Output(desk.output, None, b"of the same delivery")
        settled = settle(member, settlement({**outputs, member.got[3]: [before_it, large]}))
        assert [(r.delivery, r.code) for r in settled.refused] == [(member.got[3], "MSG_SIZE_TOO_LARGE")]
        assert desk.committed() == {0: 3}
        assert desk.outputs() == numbered(3)

    def test_headers_count_towards_the_size(self, desk: Desk) -> None:
        desk.put(0, numbered(1))
        member = desk.join()
        eventually(lambda: len(member.got) == 1, member)
        output = Output(desk.output, b"k" * 400_000, b"v" * 400_000, (("h", b"x" * 200_001),))
        settled = settle(member, settlement({member.got[0]: [output]}))
        assert [r.code for r in settled.refused] == ["MSG_SIZE_TOO_LARGE"]
        assert settled.committed == {}

    def test_an_output_below_the_limit_goes_through(self, desk: Desk) -> None:
        desk.put(0, numbered(1))
        member = desk.join()
        eventually(lambda: len(member.got) == 1, member)
        settled = settle(member, settlement({member.got[0]: [Output(desk.output, None, b"v" * 999_000)]}))
        assert settled == Settled({Partition(desk.input, 0): 1})


class TestGroups:
    def test_two_members_share_the_partitions_and_settle_what_is_revoked(self, wide_desk: Desk) -> None:
        for number in range(4):
            wide_desk.put(number, numbered(20))
        first = wide_desk.join()
        first.finished_when_revoked = lambda delivery: delivery.offset < 15
        eventually(lambda: len(first.got) == 80, first)

        second = wide_desk.join()
        eventually(lambda: len(first.epochs) == 2 and len(second.epochs) == 2, first, second)
        assert set(first.epochs).isdisjoint(second.epochs)
        assert set(first.epochs) | set(second.epochs) == set(partitions(wide_desk.input, 0, 1, 2, 3))
        resumed = 15 if wide_desk.backend.commits_in_rebalances else 0
        handed_over = {p: offset for settled in first.handed_over for p, offset in settled.committed.items()}
        if resumed:  # eager protocols revoke all, others only what moves
            assert handed_over.items() >= dict.fromkeys(second.epochs, 15).items()
            assert set(handed_over.values()) == {15}

        eventually(lambda: len(second.got) == 2 * (20 - resumed), second, first)
        assert sorted(d.offset for d in second.got) == sorted([*range(resumed, 20)] * 2)
        assert {d.partition for d in second.got} == set(second.epochs)

    def test_a_member_that_closes_hands_over_at_once(self, lively_desk: Desk) -> None:
        for number in range(4):
            lively_desk.put(number, numbered(5))
        first, second = (lively_desk.join(session_timeout_ms=30_000) for _ in range(2))
        eventually(lambda: len(first.epochs) == len(second.epochs) == 2, first, second)
        # Whoever joined first may have had all four for a while, and have read from them: what counts is what it holds.
        eventually(second.reads_from_all_it_holds, second, first)
        second.finished_when_revoked = lambda _: True
        theirs = set(second.epochs)

        before = time.monotonic()
        second.stream.close()
        assert second.events[-2:] == [("revoking", tuple(sorted(theirs))), ("released", tuple(sorted(theirs)))]
        assert all(second.handed_over[-1].committed[partition] > 0 for partition in theirs)
        eventually(lambda: len(first.epochs) == 4, first, within_s=20.0)
        assert time.monotonic() - before < 20.0, "it was the session timeout that freed the partitions"
        second.stream.close()  # does no harm

    def test_a_member_that_was_taken_for_dead_settles_nothing_and_starts_afresh(self, lively_desk: Desk) -> None:
        desk = lively_desk
        desk.put(0, numbered(5))
        member = desk.join(max_poll_interval_ms=6_000)
        eventually(lambda: len(member.got) == 5, member)
        stale = member.settlement(member.got)
        desk.backend.lose_member(member.stream)

        with pytest.raises(StreamRetriable):
            member.stream.settle(stale)  # Kafka itself would take it for a KIP-848 group without members, from anybody
        assert desk.committed() == {}

        eventually(lambda: any(what == "lost" for what, _ in member.events), member)
        assert not any(what == "revoking" for what, _ in member.events)
        eventually(lambda: len(member.got) == 10, member)
        produced = len(desk.outputs())
        assert member.stream.settle(stale) == Settled()
        assert len(desk.outputs()) == produced, "what belongs to an old epoch was produced"
        assert settle(member, member.settlement(member.got[5:])).committed == {Partition(desk.input, 0): 5}


class TestPauses:
    def test_hold_across_rebalances_and_end(self, wide_desk: Desk) -> None:
        first = wide_desk.join()
        first.stream.set_paused(Paused(everything=True))
        for number in range(4):
            wide_desk.put(number, numbered(5))
        eventually(lambda: len(first.epochs) == 4, first)

        second = wide_desk.join()
        second.stream.set_paused(Paused(everything=True))
        eventually(lambda: len(first.epochs) == len(second.epochs) == 2, first, second)
        second.stream.close()
        eventually(lambda: len(first.epochs) == 4, first)
        quiet_until = time.monotonic() + 1.0
        while time.monotonic() < quiet_until:
            first.poll()
        assert first.got == second.got == []

        first.stream.set_paused(Paused())
        eventually(lambda: len(first.got) == 20, first)

    def test_that_end_while_nothing_is_assigned_do_not_come_back_with_the_partition(self, lively_desk: Desk) -> None:
        member = lively_desk.join(max_poll_interval_ms=6_000)
        eventually(lambda: len(member.epochs) == 4, member)
        member.stream.set_paused(Paused(everything=True))
        lively_desk.put(0, numbered(5))
        lively_desk.backend.lose_member(member.stream)
        eventually(lambda: any(what == "lost" for what, _ in member.events), member)
        member.stream.set_paused(Paused())
        eventually(lambda: len(member.got) == 5, member)

    def test_of_one_partition_leaves_the_others_flowing_and_loses_nothing(self, wide_desk: Desk) -> None:
        member = wide_desk.join()
        eventually(lambda: len(member.epochs) == 4, member)
        stopped = Partition(wide_desk.input, 2)
        member.stream.set_paused(Paused(partitions=frozenset({stopped, Partition("another topic", 0)})))
        for number in range(4):
            wide_desk.put(number, numbered(10))
        eventually(lambda: len(member.got) == 30, member)
        for _ in range(10):
            member.poll()
        assert stopped not in {d.partition for d in member.got}

        member.stream.set_paused(Paused())
        eventually(lambda: len(member.got) == 40, member)
        assert [d.value for d in member.got if d.partition == stopped] == numbered(10)


class TestTrouble:
    def test_a_missing_input_topic_is_named_at_the_start(self, desk: Desk) -> None:
        missing = name("misspelt")
        stream = desk.backend.stream(missing, desk.group)
        before = time.monotonic()
        with pytest.raises(ConfigError, match=missing):
            stream.open(Member.__new__(Member))
        assert time.monotonic() - before < 20.0
        stream.close()

    def test_brokers_that_are_away_are_told_of_until_they_are_back(self, desk: Desk) -> None:
        desk.put(0, numbered(2))
        member = desk.join(session_timeout_ms=60_000)  # an orderly end of the broker may take longer than a short one
        eventually(lambda: len(member.got) == 2, member)
        assert member.stream.trouble() is None
        stop, start = desk.backend.stop_answering, desk.backend.answer_again
        if isinstance(desk.backend, ApacheBackend):
            stop, start = desk.backend.server.stop, desk.backend.server.start
        stop()
        try:
            eventually(lambda: member.stream.trouble() is not None, member)
            told = member.stream.trouble() or ""
            assert "broker" in told
            before = time.monotonic()
            with pytest.raises(StreamRetriable):
                member.stream.settle(member.settlement(member.got))
            assert time.monotonic() - before < 20.0
        finally:
            start()
        eventually(lambda: member.stream.trouble() is None, member, within_s=60.0)
        desk.put(0, [b"after"])
        eventually(lambda: member.values()[-1] == b"after", member, within_s=60.0)


class TestLag:
    def test_counts_what_was_not_polled_and_reaches_nothing(self, wide_desk: Desk) -> None:
        for number in range(3):  # the fourth partition stays empty
            wide_desk.put(number, numbered(10))
        member = wide_desk.join()
        eventually(lambda: len(member.got) == 30, member)
        every = partitions(wide_desk.input, 0, 1, 2, 3)
        eventually(lambda: member.stream.lag() == dict.fromkeys(every, 0), member)

        settle(member, member.settlement(member.got))
        member.stream.close()
        wide_desk.put(0, numbered(7))
        again = wide_desk.join()
        eventually(lambda: len(again.got) == 7, again)
        eventually(lambda: again.stream.lag() == dict.fromkeys(every, 0), again)

    def test_is_told_for_each_partition(self, wide_desk: Desk) -> None:
        for number in range(3):
            wide_desk.put(number, numbered(10))
        member = wide_desk.join()
        eventually(lambda: len(member.got) == 30, member)
        stopped, flowing = partitions(wide_desk.input, 0, 1)
        member.stream.set_paused(Paused(everything=True))
        member.poll()
        for partition in (stopped, flowing):
            wide_desk.put(partition.number, numbered(5))
        member.stream.set_paused(Paused(partitions=frozenset({stopped})))
        eventually(lambda: len(member.got) == 35 and member.stream.lag()[flowing] == 0, member)
        member.stream.set_paused(Paused())
        eventually(lambda: len(member.got) == 40 and set(member.stream.lag().values()) == {0}, member)

    def test_goes_on_counting_what_comes_into_partitions_that_are_paused(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No fetch tells of it: those who wait for an engine for an hour would see the backlog of its first second."""
        monkeypatch.setattr(kafka_lag, "ASK_EVERY_S", 0.2)
        desk.put(0, numbered(10))
        member = desk.join()
        eventually(lambda: len(member.got) == 10, member)
        member.stream.set_paused(Paused(everything=True))
        held = Partition(desk.input, 0)
        desk.put(0, numbered(20))
        eventually(lambda: member.stream.lag() == {held: 20}, member)
        desk.put(0, numbered(10))
        eventually(lambda: member.stream.lag() == {held: 30}, member)
        member.stream.set_paused(Paused())
        eventually(lambda: len(member.got) == 40 and member.stream.lag() == {held: 0}, member)

    def test_is_that_of_the_partitions_held_and_of_no_others(self, wide_desk: Desk) -> None:
        first, second = wide_desk.join(), None
        eventually(lambda: len(first.epochs) == 4, first)
        second = wide_desk.join()
        eventually(lambda: len(first.epochs) == len(second.epochs) == 2, first, second)
        assert set(first.stream.lag()) == set(first.epochs)
        assert set(second.stream.lag()) == set(second.epochs)


@pytest.mark.kafka
class TestApacheKafka:
    """What only a real broker can show."""

    @pytest.fixture
    def desk(self, request: pytest.FixtureRequest, stack: ExitStack) -> Desk:
        return Desk(make_backend("apache", request), 1, stack)

    def test_one_record_above_a_topics_limit_leaves_its_neighbours_alone(self, desk: Desk) -> None:
        tight = name("tight")
        desk.backend.create_topic(tight, 1, **{"max.message.bytes": "20000"})
        desk.put(0, numbered(200))
        member = desk.join()
        eventually(lambda: len(member.got) == 200, member)
        large = member.got[120]
        outputs = {d: [Output(tight, None, d.value)] for d in member.got}
        before = time.monotonic()
        settled = settle(member, settlement({**outputs, large: [Output(tight, None, noise(50_000))]}))
        assert time.monotonic() - before < 20.0
        assert [(r.delivery, r.code) for r in settled.refused] == [(large, "MSG_SIZE_TOO_LARGE")]
        assert tight in settled.refused[0].detail
        assert desk.committed() == {0: 120}

        settle(member, settlement({d: outputs[d] for d in member.got[120:]}))
        assert desk.committed() == {0: 200}
        assert in_order_with_repeats([r.value for r in desk.backend.records(tight)], numbered(200))

    def test_a_topic_that_is_deleted_later_is_refused_and_one_that_comes_is_found(self, desk: Desk) -> None:
        assert isinstance(desk.backend, ApacheBackend)
        brief = name("brief")
        desk.backend.create_topic(brief, 1)
        desk.put(0, numbered(2))
        member = desk.join()
        eventually(lambda: len(member.got) == 2, member)
        settle(member, settlement({member.got[0]: [Output(brief, None, b"a")]}))
        desk.backend.delete_topic(brief)
        second = settlement({member.got[1]: [Output(brief, None, b"b")]})
        settled = settle(member, second, within_s=90.0)
        assert [r.output.topic for r in settled.refused] == [brief]
        assert desk.committed() == {0: 1}

    def test_closing_ends_while_the_broker_is_silent(self, desk: Desk) -> None:
        desk.put(0, numbered(3))
        member = desk.join(release_timeout_s=2.0)
        eventually(lambda: len(member.got) == 3, member)
        settle(member, member.settlement(member.got[:1]))
        member.finished_when_revoked = lambda delivery: delivery.offset >= 1
        desk.backend.stop_answering()
        try:
            before = time.monotonic()
            member.stream.close()
            assert time.monotonic() - before < 25.0
        finally:
            desk.backend.answer_again()
        assert member.events[-1][0] == "released"

    def test_a_commit_that_the_broker_does_not_answer_is_given_up_and_closing_ends(self, desk: Desk) -> None:
        desk.put(0, numbered(3))
        member = desk.join(settle_timeout_s=2.0, release_timeout_s=2.0)
        eventually(lambda: len(member.got) == 3, member)
        settle(member, member.settlement(member.got[:1]))
        desk.backend.stop_answering()
        try:
            before = time.monotonic()
            with pytest.raises(StreamRetriable, match="coordinator"):
                member.stream.settle(settlement({member.got[1]: []}))  # nothing to produce: only the commit is left
            member.stream.close()
            assert time.monotonic() - before < 30.0
        finally:
            desk.backend.answer_again()

    def test_a_member_whose_assignment_strategy_is_not_the_group_s_says_so_until_it_is_let_in(self, desk: Desk) -> None:
        first = desk.join()
        eventually(lambda: len(first.epochs) == 1, first)
        stranger = desk.join(assignment_strategy="range")
        eventually(lambda: stranger.stream.trouble() is not None, first, stranger)
        told = stranger.stream.trouble() or ""
        assert desk.group in told
        assert "ROUTER_KAFKA_ASSIGNMENT_STRATEGY" in told
        first.stream.close()
        eventually(lambda: len(stranger.epochs) == 1, stranger)
        assert stranger.stream.trouble() is None

    def test_lag_reaches_nothing_behind_transactions(self, desk: Desk) -> None:
        assert isinstance(desk.backend, ApacheBackend)
        desk.backend.produce_in_transactions(desk.input, numbered(3))
        member = desk.join()
        eventually(lambda: len(member.got) == 3, member)
        eventually(lambda: member.stream.lag() == {Partition(desk.input, 0): 0}, member)

    def test_what_an_open_transaction_holds_back_counts_as_lag_until_it_ends(self, desk: Desk) -> None:
        assert isinstance(desk.backend, ApacheBackend)
        desk.put(0, numbered(2))
        member = desk.join()
        eventually(lambda: len(member.got) == 2, member)
        with desk.backend.open_transaction(desk.input, numbered(3)):
            eventually(lambda: (member.stream.lag()[Partition(desk.input, 0)] or 0) >= 3, member)
            assert len(member.got) == 2
        eventually(lambda: member.stream.lag() == {Partition(desk.input, 0): 0}, member)
        assert len(member.got) == 2, "what was aborted was delivered"


class TestFaultsOfTheCoordinator:
    """What librdkafka's mock cluster answers on demand."""

    @pytest.fixture
    def broker(self, embedded_broker: FaultyBroker) -> FaultyBroker:
        return embedded_broker

    @pytest.fixture
    def desk(self, broker: FaultyBroker, stack: ExitStack) -> Desk:
        return Desk(EmbeddedBackend(broker), 1, stack)

    @pytest.mark.parametrize("error", [KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.REQUEST_TIMED_OUT])
    def test_a_commit_that_fails_for_now_is_made_in_the_end(self, desk: Desk, broker: FaultyBroker, error: int) -> None:
        desk.put(0, numbered(5))
        member = desk.join()
        eventually(lambda: len(member.got) == 5, member)
        broker.fail(Request.OFFSET_COMMIT, [error])
        assert settle(member, member.settlement(member.got)).committed == {Partition(desk.input, 0): 5}
        assert desk.committed() == {0: 5}
        assert desk.outputs() == numbered(5), "outputs that were acknowledged were produced again"

    def test_a_coordinator_that_moved_costs_time_but_no_ticket(self, desk: Desk, broker: FaultyBroker) -> None:
        """librdkafka 2.16 may look for the coordinator until the session ends; then all comes again."""
        desk.put(0, numbered(5))
        member = desk.join()
        eventually(lambda: len(member.got) == 5, member)
        broker.fail(Request.OFFSET_COMMIT, [KafkaError.NOT_COORDINATOR])

        def settled_at_last() -> bool:
            held = [d for d in member.got if member.epochs.get(d.partition) == d.epoch]
            with suppress(StreamRetriable):
                member.stream.settle(member.settlement(held))
            return desk.committed() == {0: 5}

        eventually(settled_at_last, member)
        assert in_order_with_repeats(desk.outputs(), numbered(5))

    @pytest.mark.parametrize(
        "error", [KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID, KafkaError.REBALANCE_IN_PROGRESS]
    )
    def test_a_commit_of_an_old_generation_is_not_reported_as_made(
        self, desk: Desk, broker: FaultyBroker, error: int
    ) -> None:
        desk.put(0, numbered(5))
        member = desk.join()
        eventually(lambda: len(member.got) == 5, member)
        broker.fail(Request.OFFSET_COMMIT, [error])
        with pytest.raises(StreamRetriable):
            member.stream.settle(member.settlement(member.got))
        assert desk.committed() == {}
        member.poll()
        held = [d for d in member.got if member.epochs.get(d.partition) == d.epoch]
        if not held:
            eventually(lambda: len(member.got) == 10, member)
            held = member.got[5:]
        settle(member, member.settlement(held))
        assert desk.committed() == {0: 5}
        if held[0] is member.got[0]:
            assert desk.outputs() == numbered(5), "outputs that were acknowledged were produced again"
        assert in_order_with_repeats(desk.outputs(), numbered(5))

    def test_outputs_that_fail_for_now_are_acknowledged_in_the_end_once_and_in_order(
        self, desk: Desk, broker: FaultyBroker
    ) -> None:
        desk.put(0, numbered(50))
        member = desk.join()
        eventually(lambda: len(member.got) == 50, member)
        broker.fail(Request.PRODUCE, [KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.NOT_ENOUGH_REPLICAS] * 2)
        settle(member, member.settlement(member.got))
        assert desk.committed() == {0: 50}
        assert desk.outputs() == numbered(50)

    def test_a_topic_that_is_forbidden_is_refused_with_its_name(self, desk: Desk, broker: FaultyBroker) -> None:
        forbidden = name("forbidden")
        broker.create_topic(forbidden, 1)
        broker.fail_topic(forbidden, KafkaError.TOPIC_AUTHORIZATION_FAILED)
        desk.put(0, numbered(3))
        member = desk.join()
        eventually(lambda: len(member.got) == 3, member)
        outputs = {d: [Output(desk.output, None, d.value)] for d in member.got}
        settled = settle(member, settlement({**outputs, member.got[1]: [Output(forbidden, None, b"x")]}))
        assert [(r.output.topic, r.code) for r in settled.refused] == [(forbidden, "TOPIC_AUTHORIZATION_FAILED")]
        assert desk.committed() == {0: 1}

    def test_a_producer_that_lost_its_place_is_replaced(self, desk: Desk, broker: FaultyBroker) -> None:
        desk.put(0, numbered(3))
        member = desk.join()
        eventually(lambda: len(member.got) == 3, member)
        settle(member, member.settlement(member.got[:1]))
        broker.fail(Request.PRODUCE, [KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER])  # fatal to an idempotent producer
        settle(member, member.settlement(member.got[1:]))
        assert desk.committed() == {0: 3}
        assert in_order_with_repeats(desk.outputs(), numbered(3))


def noise(size: int) -> bytes:
    """Does not compress."""
    return random.Random(1).randbytes(size)


def in_order_with_repeats(found: Sequence[bytes | None], wanted: Sequence[bytes]) -> bool:
    """At least once, in order: repeats step back to something seen, never over something unseen."""
    reached = -1
    for value in found:
        at = wanted.index(value or b"")
        if at > reached + 1:
            return False
        reached = max(reached, at)
    return reached == len(wanted) - 1
