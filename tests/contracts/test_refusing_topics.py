"""A topic that refuses what is sent to it, on a real Apache Kafka: that costs a few settlements, not one a ticket."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from tests.contracts.stream_backends import QUIET, ApacheBackend
from tests.contracts.test_stream import (
    Desk,
    Member,
    eventually,
    make_backend,
    name,
    numbered,
    settle,
    settlement,
)
from worker.adapters import kafka_refusals
from worker.adapters.kafka import KafkaStream
from worker.adapters.kafka_exactly_once import ExactlyOnce, _raise_if_failed, _Reports, _why
from worker.adapters.kafka_refusals import Refusal
from worker.ports import Delivery, Finished, Output, Partition, Settled

pytestmark = [pytest.mark.timeout(300)]

PARTITIONS = 6
EACH = 40


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as closing:
        yield closing


@pytest.fixture(
    params=[pytest.param(kind, marks=pytest.mark.kafka) for kind in ("apache", "apache-exactly-once")],
)
def desk(request: pytest.FixtureRequest, stack: ExitStack) -> Desk:
    return Desk(make_backend(request.param, request), PARTITIONS, stack)


@pytest.fixture
def exactly_once(request: pytest.FixtureRequest, stack: ExitStack) -> Desk:
    return Desk(make_backend("apache-exactly-once", request), 1, stack)


class Aborts:
    """Counts the transactions of a member that failed; none where it uses none."""

    def __init__(self, member: Member) -> None:
        self.count = 0
        assert isinstance(member.stream, KafkaStream)
        settler = member.stream._settler
        if isinstance(settler, ExactlyOnce):
            end_badly = settler._end_badly

            def counted(error: KafkaError, reports: _Reports, deadline: float) -> None:
                self.count += 1
                end_badly(error, reports, deadline)

            settler._end_badly = counted  # type: ignore[method-assign]


def member_with(desk: Desk, each: int, settle_timeout_s: float = 20.0) -> Member:
    for number in range(PARTITIONS):
        desk.put(number, [b"%d-%d" % (number, offset) for offset in range(each)])
    member = desk.join(settle_timeout_s=settle_timeout_s)
    eventually(lambda: len(member.got) == PARTITIONS * each, member)
    return member


def diverted(
    member: Member, outputs: Mapping[Delivery, Sequence[Output]], refusing: str, within_s: float = 120.0
) -> tuple[int, list[Settled]]:
    """As the runtime does: what is refused is offered again without that output. How many settlements it took."""
    left = dict(outputs)
    settlements: list[Settled] = []
    until = time.monotonic() + within_s
    while left:
        assert time.monotonic() < until, (len(left), len(settlements))
        settled = settle(member, settlement(left))
        settlements.append(settled)
        for refused in settled.refused:
            assert refused.output.topic == refusing
            left[refused.delivery] = [each for each in left[refused.delivery] if each.topic != refusing]
        left = {d: o for d, o in left.items() if d.offset >= settled.committed.get(d.partition, 0)}
        member.poll()
    return len(settlements), settlements


def assert_all_arrived_in_order(desk: Desk, each: int) -> None:
    found = [value or b"" for value in desk.outputs()]
    for number in range(PARTITIONS):
        mine = [value for value in found if value.startswith(b"%d-" % number)]
        wanted = [b"%d-%d" % (number, offset) for offset in range(each)]
        if desk.backend.name == "apache-exactly-once":
            assert mine == wanted
        else:
            assert list(dict.fromkeys(mine)) == wanted
    assert desk.committed() == dict.fromkeys(range(PARTITIONS), each)


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize(
    "setting", [("max.message.bytes", "300"), ("cleanup.policy", "compact")], ids=["too large", "without a key"]
)
def test_a_topic_that_refuses_every_record_costs_a_few_settlements(desk: Desk, setting: tuple[str, str]) -> None:
    tight = name("tight")
    desk.backend.create_topic(tight, 3, **dict([setting]))
    member = member_with(desk, EACH)
    aborts = Aborts(member)
    outputs = {
        d: [Output(desk.output, None, d.value), Output(tight, None, noise(900 + 7 * d.offset % 100, d.offset))]
        for d in member.got
    }
    count, settlements = diverted(member, outputs, tight)
    assert sum(len(each.refused) for each in settlements) == len(outputs)
    assert count <= EACH, "not one for each ticket of a partition"
    assert aborts.count <= EACH
    assert_all_arrived_in_order(desk, EACH)


def test_a_topic_that_was_deleted_costs_a_few_settlements(desk: Desk) -> None:
    brief = name("brief")
    desk.backend.create_topic(brief, 3)
    member = member_with(desk, EACH, settle_timeout_s=5.0)
    first = [d for d in member.got if d.offset == 0]
    settle(member, settlement({d: [Output(desk.output, None, d.value), Output(brief, None, d.value)] for d in first}))
    assert isinstance(desk.backend, ApacheBackend)
    desk.backend.delete_topic(brief)
    rest = [d for d in member.got if d.offset > 0]
    outputs = {d: [Output(desk.output, None, d.value), Output(brief, None, d.value)] for d in rest}
    count, settlements = diverted(member, outputs, brief)
    assert sum(len(each.refused) for each in settlements) == len(rest)
    assert count <= 10
    assert_all_arrived_in_order(desk, EACH)


@pytest.mark.parametrize("trouble", ["too large", "missing"])
def test_a_topic_that_was_mended_is_used_again_while_tickets_keep_coming(
    desk: Desk, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_refusals, "REFUSED_RECORD_RETRY_S", 3.0)
    monkeypatch.setattr(kafka_refusals, "REFUSED_TOPIC_RETRY_S", 3.0)
    tight = name("tight")
    if trouble == "too large":
        desk.backend.create_topic(tight, 1, **{"max.message.bytes": "300"})
    member = desk.join(settle_timeout_s=20.0)
    aborts = Aborts(member)
    mended = False
    until = time.monotonic() + 90
    for count in itertools.count(1):
        desk.put(0, numbered(1))
        eventually(lambda n=count: len(member.got) == n, member)  # type: ignore[misc]
        delivery = member.got[-1]
        settled = settle(member, settlement({delivery: [Output(tight, None, noise(1000, 1))]}))
        if not settled.refused:
            assert mended
            break
        settle(member, settlement({delivery: []}))
        if count == 3:
            if trouble == "too large":
                enlarge(desk, tight)
            else:
                desk.backend.create_topic(tight, 1)
            mended = True
            before = aborts.count
        assert time.monotonic() < until, "never used again"
    assert [record.value for record in desk.backend.records(tight)] == [noise(1000, 1)]
    assert aborts.count == before, "what the refused batch left behind failed the next transaction"


def enlarge(desk: Desk, topic: str) -> None:
    assert isinstance(desk.backend, ApacheBackend)
    admin = AdminClient({"bootstrap.servers": desk.backend.bootstrap_servers}, logger=QUIET)
    entry = ConfigEntry("max.message.bytes", "100000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(30)


def test_records_that_are_too_large_only_together_are_sent_apart_from_then_on(desk: Desk) -> None:
    tight = name("tight")
    desk.backend.create_topic(tight, 1, **{"max.message.bytes": "5000"})
    member = member_with(desk, EACH)
    aborts = Aborts(member)
    small = {
        d: [Output(tight, None, b"%d-%d " % (d.partition.number, d.offset) + noise(1000, seed))]
        for seed, d in enumerate(member.got)  # each its own, since batches are compressed
    }
    for upto in (10, 20, 30, 40):
        part = {d: o for d, o in small.items() if upto - 10 <= d.offset < upto}
        count, settlements = diverted(member, part, tight)
        assert not any(settled.refused for settled in settlements)
        if upto == 20:  # by then it is known how much fits
            before = aborts.count
        elif upto > 20:
            assert count == 1
    assert aborts.count == before
    assert before <= 4
    found = [(record.value or b"").split(b" ")[0] for record in desk.backend.records(tight)]
    for number in range(PARTITIONS):
        mine = [value for value in found if value.startswith(b"%d-" % number)]
        wanted = [b"%d-%d" % (number, offset) for offset in range(EACH)]
        assert (mine if desk.backend.name == "apache-exactly-once" else list(dict.fromkeys(mine))) == wanted
        assert mine[-20:] == wanted[-20:], "once each, since nothing fails any more"


def test_what_compresses_less_than_what_was_taken_before_goes_to_the_topic_too(desk: Desk) -> None:
    """Room is counted in bytes that are not compressed, and the broker's limit is one of bytes that are."""
    tight = name("tight")
    desk.backend.create_topic(tight, 1, **{"max.message.bytes": "60000"})
    desk.put(0, numbered(24))
    member = desk.join()
    eventually(lambda: len(member.got) == 24, member)
    outputs = {
        d: [Output(tight, b"k", noise(8_000, d.offset) + bytes(12_000) if d.offset < 12 else noise(20_000, d.offset))]
        for d in member.got
    }
    until = time.monotonic() + 60
    committed = 0
    while committed < 24:
        assert time.monotonic() < until
        for offset in settle(member, settlement(outputs)).committed.values():
            committed = max(committed, offset)
    assert len(desk.backend.records(tight)) >= 24


def test_smaller_records_than_the_one_refused_go_on_to_the_topic(desk: Desk) -> None:
    tight = name("tight")
    desk.backend.create_topic(tight, 1, **{"max.message.bytes": "20000"})
    member = member_with(desk, 20)
    outputs = {
        d: [Output(desk.output, None, d.value), Output(tight, None, noise(50_000 if d.offset % 5 == 3 else 2_000, 1))]
        for d in member.got
    }
    _, settlements = diverted(member, outputs, tight)
    refused = {each.delivery for settled in settlements for each in settled.refused}
    assert refused == {d for d in member.got if d.offset % 5 == 3}
    assert_all_arrived_in_order(desk, 20)


def test_of_a_failed_transaction_the_output_at_fault_is_named_and_not_one_that_was_dropped_with_it() -> None:
    delivery = Delivery(Partition("in", 0), 0, 1, None, None, (), -1)
    reports = _Reports()
    for topic, code in (("billing", KafkaError._PURGE_QUEUE), ("decisions", KafkaError.MSG_SIZE_TOO_LARGE)):
        output = Output(topic, None, b"")
        reports.failures.append(Refusal(Finished(delivery, (output,)), output, KafkaError(code)))
    dropped = reports.failures[0].error
    assert "'decisions' was not acknowledged: MSG_SIZE_TOO_LARGE" in _why(dropped, reports)
    del reports.failures[1]
    assert "billing" not in _why(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART), reports)


@pytest.mark.kafka
def test_an_open_transaction_tells_whether_and_why_it_can_only_be_aborted(exactly_once: Desk) -> None:
    desk = exactly_once
    tight = name("tight")
    desk.backend.create_topic(tight, 1, **{"max.message.bytes": "300"})
    assert isinstance(desk.backend, ApacheBackend)
    settings = {"bootstrap.servers": desk.backend.bootstrap_servers, "transactional.id": name("writer")}
    producer = Producer(settings, logger=QUIET)
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(tight, b"small")
    assert producer.flush(60) == 0
    _raise_if_failed(producer)
    producer.commit_transaction(60)
    producer.begin_transaction()
    producer.produce(tight, noise(1000, 1))
    assert producer.flush(60) == 0
    with pytest.raises(KafkaException) as raised:
        _raise_if_failed(producer)
    assert raised.value.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
    assert tight in raised.value.args[0].str()
    producer.abort_transaction(60)
    assert [record.value for record in desk.backend.records(tight)] == [b"small"]
