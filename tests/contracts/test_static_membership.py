"""Static membership on a real Apache Kafka: a restarted worker gets its partitions back and disturbs nobody."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.contracts.test_stream import Desk, eventually, make_backend, numbered, settle
from worker.errors import StreamFatal

pytestmark = pytest.mark.kafka


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as closing:
        yield closing


@pytest.fixture(params=["apache", "apache-range", "apache-exactly-once"])
def desk(request: pytest.FixtureRequest, stack: ExitStack) -> Desk:
    return Desk(make_backend(request.param, request), 4, stack)


def test_a_restarted_member_gets_its_partitions_back_without_a_rebalance_of_others(desk: Desk) -> None:
    settings = {"session_timeout_ms": 30_000}
    first = desk.join(group_instance_id="one", **settings)
    second = desk.join(group_instance_id="two", **settings)
    eventually(lambda: len(first.epochs) == len(second.epochs) == 2, first, second)
    for number in range(4):
        desk.put(number, numbered(5))
    eventually(lambda: first.reads_from_all_it_holds() and second.reads_from_all_it_holds(), first, second)
    eventually(lambda: len([d for d in first.got if d.partition in first.epochs]) >= 10, first, second)
    mine = [d for d in first.got if d.epoch == first.epochs.get(d.partition)]
    settle(first, first.settlement(mine))
    theirs, before = set(first.epochs), len(second.events)

    first.stream.close()
    again = desk.join(group_instance_id="one", **settings)
    eventually(lambda: set(again.epochs) == theirs, again, second, within_s=25.0)
    quiet_until = time.monotonic() + 1.5  # three heartbeats
    while time.monotonic() < quiet_until:
        again.poll()
        second.poll()
    assert second.events[before:] == [], "the other member was rebalanced"
    assert again.got == [], "what was settled came again"
    for partition in theirs:
        desk.put(partition.number, [b"after"])
    eventually(lambda: again.values() == [b"after"] * 2, again, second)


def test_two_members_of_one_name_are_told_so(desk: Desk) -> None:
    """Whoever came first ends: a name stands for one worker."""
    first = desk.join(group_instance_id="same")
    eventually(lambda: len(first.epochs) == 4, first)
    second = desk.join(group_instance_id="same")
    with pytest.raises(StreamFatal, match=r"group\.instance\.id"):
        eventually(lambda: False, first, second, within_s=30.0)
