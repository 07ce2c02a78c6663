"""What exactly-once delivery adds to a stream's promises: readers of committed records see every output once."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException

from tests.contracts.stream_backends import QUIET, ApacheBackend, EmbeddedBackend
from tests.contracts.test_stream import (
    Desk,
    Member,
    eventually,
    make_backend,
    name,
    noise,
    numbered,
    settle,
    settlement,
)
from tests.servers.faulty_broker import FaultyBroker, Request
from worker.adapters.kafka import KafkaStream
from worker.adapters.kafka_client import RationedLog
from worker.adapters.kafka_exactly_once import ExactlyOnce, _send_offsets
from worker.adapters.kafka_topic_identity import TopicIdentity
from worker.adapters.kafka_topics import TopicLookup
from worker.errors import ConfigError, StreamRetriable
from worker.ports import Output, Settled

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as closing:
        yield closing


@pytest.fixture
def desk(request: pytest.FixtureRequest, stack: ExitStack) -> Desk:
    return Desk(make_backend("apache-exactly-once", request), 1, stack)


@pytest.fixture
def wide_desk(request: pytest.FixtureRequest, stack: ExitStack) -> Desk:
    return Desk(make_backend("apache-exactly-once", request), 6, stack)


def settler_of(member: Member) -> ExactlyOnce:
    assert isinstance(member.stream, KafkaStream)
    settler = member.stream._settler
    assert isinstance(settler, ExactlyOnce)
    return settler


@contextmanager
def process(desk: Desk, count: int, stops_before: str) -> Iterator[subprocess.Popen[str]]:
    """A worker in the middle of its transaction."""
    assert isinstance(desk.backend, ApacheBackend)
    arguments = [desk.backend.bootstrap_servers, desk.input, desk.group, desk.output, str(count), stops_before]
    command = [sys.executable, "-m", "tests.contracts.settling_process", *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "reached\n"
        yield child
    finally:
        child.kill()
        child.wait()


def take_over(desk: Desk, count: int) -> Member:
    """Another worker gets everything that is not committed, and settles it."""
    member = desk.join()
    eventually(lambda: len(member.got) == count, member, within_s=90.0)
    settle(member, member.settlement(member.got))
    return member


@pytest.mark.kafka
class TestCrashes:
    @pytest.mark.parametrize("stops_before", ["outputs", "offsets"])
    def test_killed_between_producing_and_committing_no_output_is_seen_twice(
        self, desk: Desk, stops_before: str
    ) -> None:
        desk.put(0, numbered(20))
        with process(desk, 20, stops_before) as child:
            child.kill()
            member = take_over(desk, 20)
        # Readers wait until the coordinator ends what the dead one left open.
        eventually(lambda: len(desk.outputs()) >= 20, member, within_s=60.0)
        assert desk.outputs() == numbered(20)
        assert desk.committed() == {0: 20}

    @pytest.mark.parametrize("stops_before", ["outputs", "offsets"])
    def test_a_worker_that_slept_until_its_partitions_had_moved_commits_nothing(
        self, desk: Desk, stops_before: str
    ) -> None:
        desk.put(0, numbered(20))
        with process(desk, 20, stops_before) as child:
            child.send_signal(signal.SIGSTOP)
            take_over(desk, 20)
            child.send_signal(signal.SIGCONT)
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("go\n")
            child.stdin.flush()
            assert child.stdout.readline() == "StreamRetriable\n"
        assert desk.outputs() == numbered(20)
        assert desk.committed() == {0: 20}

    def test_what_an_open_transaction_holds_back_while_the_assignment_changes_is_not_begun_again(
        self, wide_desk: Desk
    ) -> None:
        desk = wide_desk
        for number in range(6):
            desk.put(number, numbered(8))
        first = desk.join()
        eventually(lambda: len(first.got) == 48, first)
        settle(first, first.settlement([d for d in first.got if d.offset < 5]))
        first.stream.close()
        with process(desk, 18, "offsets") as child:
            child.kill()

        members = [desk.join()]
        eventually(lambda: len(members[0].epochs) == 6, *members, within_s=60.0)
        members.append(desk.join())
        eventually(lambda: all(len(member.epochs) == 3 for member in members), *members)
        # Nothing comes until the coordinator ends what the dead one left open.
        eventually(lambda: all(member.reads_from_all_it_holds() for member in members), *members, within_s=60.0)
        assert min(d.offset for member in members for d in member.got) == 5


@pytest.mark.kafka
class TestUncertainty:
    """The answer to a commit is lost on its way, after or before the broker has heard of it."""

    @pytest.mark.parametrize("heard", [True, False])
    def test_a_commit_without_an_answer_is_looked_up_and_nothing_is_seen_twice(self, desk: Desk, heard: bool) -> None:
        desk.put(0, numbered(9))
        member = desk.join()
        eventually(lambda: len(member.got) == 9, member)
        settle(member, member.settlement(member.got[:3]))
        lose_answer(settler_of(member), heard)
        with pytest.raises(StreamRetriable):
            member.stream.settle(member.settlement(member.got[3:6]))

        settled = settle(member, member.settlement(member.got[3:]))
        assert list(settled.committed.values()) == [9]
        assert desk.outputs() == numbered(9)
        assert desk.committed() == {0: 9}

    def test_what_was_committed_without_an_answer_is_reported_when_it_is_offered_again(self, desk: Desk) -> None:
        desk.put(0, numbered(6))
        member = desk.join()
        eventually(lambda: len(member.got) == 6, member)
        lose_answer(settler_of(member), heard=True)
        with pytest.raises(StreamRetriable):
            member.stream.settle(member.settlement(member.got))
        assert list(settle(member, member.settlement(member.got)).committed.values()) == [6]
        assert desk.outputs() == numbered(6)


def lose_answer(settler: ExactlyOnce, heard: bool) -> None:
    """Once. The client cannot be made to lose an answer at will, so its step is taken and the answer thrown away."""
    insist = settler._insist

    def lossy(call: Callable[[float], None], deadline: float) -> None:
        if getattr(call, "__name__", "") != "commit_transaction":
            insist(call, deadline)
            return
        settler._insist = insist  # type: ignore[method-assign]
        if heard:
            insist(call, deadline)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "lost", retriable=True))

    settler._insist = lossy  # type: ignore[method-assign]


@pytest.mark.kafka
class TestRefusals:
    def test_a_record_that_one_topic_refuses_spoils_no_transaction(self, wide_desk: Desk) -> None:
        desk = wide_desk
        tight = name("tight")
        desk.backend.create_topic(tight, 1, **{"max.message.bytes": "20000"})
        desk.put(0, numbered(60))
        desk.put(1, numbered(60))
        member = desk.join()
        eventually(lambda: len(member.got) == 120, member)
        large = next(d for d in member.got if (d.partition.number, d.offset) == (0, 40))
        outputs: dict[Any, list[Output]] = {
            d: [Output(tight, None, b"%d-%d" % (d.partition.number, d.offset))] for d in member.got
        }
        settled = settle(member, settlement({**outputs, large: [Output(tight, None, noise(50_000))]}))
        assert [(r.delivery, r.code) for r in settled.refused] == [(large, "MSG_SIZE_TOO_LARGE")]
        assert desk.committed() == {0: 40, 1: 60}

        settle(member, settlement({d: o for d, o in outputs.items() if d.partition.number == 0 and d.offset >= 40}))
        assert desk.committed() == {0: 60, 1: 60}
        found = [record.value or b"" for record in desk.backend.records(tight)]
        for number in (0, 1):
            mine = [value for value in found if value.startswith(b"%d-" % number)]
            assert mine == [b"%d-%d" % (number, offset) for offset in range(60)]

    def test_a_topic_that_was_deleted_meanwhile_is_refused_and_the_others_flow(self, wide_desk: Desk) -> None:
        desk = wide_desk
        assert isinstance(desk.backend, ApacheBackend)
        brief = name("brief")
        desk.backend.create_topic(brief, 1)
        desk.put(0, numbered(2))
        desk.put(1, numbered(2))
        member = desk.join()
        eventually(lambda: len(member.got) == 4, member)
        first, second = ([d for d in member.got if d.offset == offset] for offset in (0, 1))
        targets = {0: brief, 1: desk.output}
        settle(member, settlement({d: [Output(targets[d.partition.number], None, d.value)] for d in first}))
        desk.backend.delete_topic(brief)
        again = settlement({d: [Output(targets[d.partition.number], None, d.value)] for d in second})
        settled = settle(member, again, within_s=90.0)
        assert [r.output.topic for r in settled.refused] == [brief]
        assert desk.committed() == {0: 1, 1: 2}
        assert desk.outputs() == numbered(2)


@pytest.mark.kafka
class TestSeveralWorkers:
    def test_workers_with_the_same_settings_never_fence_each_other(self, wide_desk: Desk) -> None:
        desk = wide_desk
        members = [desk.join() for _ in range(3)]
        eventually(lambda: all(len(member.epochs) == 2 for member in members), *members)
        done: set[tuple[int, int]] = set()
        for round_number in range(8):
            for number in range(6):
                desk.put(number, [b"%d-%d" % (number, round_number)])
            eventually(lambda n=round_number: sum(len(m.got) for m in members) == 6 * (n + 1), *members)
            for member in members:
                new = [d for d in member.got if (d.partition.number, d.offset) not in done]
                member.stream.settle(member.settlement(new))  # at the first attempt
                done |= {(d.partition.number, d.offset) for d in new}
        assert len({settler_of(member)._id for member in members}) == 3
        assert len(desk.outputs()) == len(set(desk.outputs())) == 48


class TestCallsThatNeverReturn:
    def test_sending_offsets_is_given_up_with_its_producer(self) -> None:
        """librdkafka 2.16 can be brought to this by killing the broker at the right moment, but not at will."""
        released = threading.Event()

        class Deaf:
            def send_offsets_to_transaction(self, *_: object) -> None:
                released.wait(60)

        before = time.monotonic()
        try:
            with pytest.raises(KafkaException) as raised:
                _send_offsets(Deaf(), [], None, 0.1)  # type: ignore[arg-type]
        finally:
            released.set()
        assert raised.value.args[0].fatal()
        assert time.monotonic() - before < 30.0


@pytest.mark.kafka
class TestSilence:
    @pytest.mark.parametrize("in_doubt", [False, True])
    def test_closing_ends_while_the_broker_is_silent(self, desk: Desk, in_doubt: bool) -> None:
        desk.put(0, numbered(3))
        member = desk.join(settle_timeout_s=2.0, release_timeout_s=2.0)
        eventually(lambda: len(member.got) == 3, member)
        settle(member, member.settlement(member.got[:1]))
        if not in_doubt:
            member.finished_when_revoked = lambda delivery: delivery.offset >= 1
        desk.backend.stop_answering()
        try:
            before = time.monotonic()
            if in_doubt:
                with pytest.raises(StreamRetriable):
                    member.stream.settle(member.settlement(member.got[1:]))
            member.stream.close()
            assert time.monotonic() - before < 25.0
        finally:
            desk.backend.answer_again()
        assert member.events[-1][0] == "released"
        after = desk.join()
        eventually(lambda: len(after.got) == 2, after, within_s=60.0)
        settle(after, after.settlement(after.got))
        eventually(lambda: len(desk.outputs()) >= 3, after, within_s=60.0)
        assert desk.outputs() == numbered(3)


class TestWithoutTransactions:
    def test_the_embedded_broker_is_refused_with_the_reason(self, embedded_broker: FaultyBroker) -> None:
        embedded_broker.create_topic("tickets", 1)
        stream = EmbeddedBackend(embedded_broker).stream("tickets", "group", delivery="exactly_once")
        with pytest.raises(ConfigError, match=r"embedded broker.*ROUTER_DELIVERY=at_least_once"):
            stream.open(Member.__new__(Member))
        stream.close()

    def test_a_coordinator_that_is_away_at_the_start_is_waited_for(self, embedded_broker: FaultyBroker) -> None:
        embedded_broker.set_down(True)
        settler, close = bare_settler(embedded_broker, [KafkaError.COORDINATOR_NOT_AVAILABLE] * 2)
        until = time.monotonic() + 60
        try:
            with pytest.raises(StreamRetriable, match="coordinator"):
                settler.settle([], 0.3)
            embedded_broker.set_down(False)
            while True:
                try:
                    assert settler.settle([], 1.0) == Settled()
                    break
                except StreamRetriable:
                    assert time.monotonic() < until
        finally:
            close()

    def test_a_client_that_may_not_use_transactions_is_told_at_the_start(self, embedded_broker: FaultyBroker) -> None:
        with pytest.raises(ConfigError, match="transactional ids that begin with 'group'"):
            bare_settler(embedded_broker, [KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED])


def bare_settler(broker: FaultyBroker, errors: list[int]) -> tuple[ExactlyOnce, Callable[[], None]]:
    """Without the stream that would refuse this broker."""
    broker.fail(Request.INIT_PRODUCER_ID, errors)
    config = EmbeddedBackend(broker).config("tickets", "group")
    topics, log = TopicLookup(config), RationedLog(QUIET, time.monotonic)
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "group"}, logger=QUIET)

    def close() -> None:
        topics.close()
        consumer.close()

    try:
        identity = TopicIdentity(config, log, time.monotonic)
        return ExactlyOnce(config, consumer, topics, identity, log, lambda _: None, time.monotonic), close
    except ConfigError:
        close()
        raise
