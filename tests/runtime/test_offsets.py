"""OffsetTracker: nothing passes an open delivery, nothing of an old assignment survives."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.ports import Delivery, Output, Partition
from worker.runtime.offsets import OffsetTracker

P0, P1 = Partition("tickets", 0), Partition("tickets", 1)


def delivery(offset: int, partition: Partition = P0, epoch: int = 1, value: bytes = b"x") -> Delivery:
    return Delivery(partition, offset, epoch, None, value, (), -1)


def output(offset: int) -> tuple[Output, ...]:
    return (Output("out", None, str(offset).encode()),)


def tracker(*partitions: Partition) -> OffsetTracker:
    made = OffsetTracker()
    made.assign(dict.fromkeys(partitions or (P0,), 1))
    return made


def test_commits_never_pass_an_open_offset() -> None:
    tracked = tracker()
    for offset in range(3):
        tracked.track(delivery(offset))
    tracked.complete(delivery(1), output(1))
    tracked.complete(delivery(2), output(2))
    assert not tracked.ready()
    tracked.complete(delivery(0), output(0))
    (part,) = tracked.ready().partitions
    assert part.next_offset == 3
    assert [item.delivery.offset for item in part.finished] == [0, 1, 2]


def test_a_gap_in_the_offsets_does_not_hold_the_commit_back() -> None:
    tracked = tracker()
    for offset in (4, 9):  # transactions and compaction leave offsets without a message
        tracked.track(delivery(offset))
        tracked.complete(delivery(offset), output(offset))
    assert tracked.ready().partitions[0].next_offset == 10


def test_results_of_an_old_assignment_are_dropped() -> None:
    tracked = tracker()
    tracked.track(delivery(0))
    tracked.assign({P0: 2})
    assert not tracked.complete(delivery(0), output(0))
    assert not tracked.track(delivery(1, epoch=1))
    assert tracked.in_flight == 0
    assert tracked.bytes_in_flight == 0


def test_offering_forgets_nothing_and_settling_forgets_only_what_was_offered() -> None:
    tracked = tracker()
    for offset in range(2):
        tracked.track(delivery(offset))
    tracked.complete(delivery(0), output(0))
    offered = tracked.ready()
    tracked.complete(delivery(1), output(1))
    assert tracked.settled(offered, {P0: 1}) == 1
    assert [f.delivery.offset for f in tracked.ready().partitions[0].finished] == [1]


def test_a_redelivered_offset_is_tracked_once() -> None:
    tracked = tracker()
    assert tracked.track(delivery(0))
    assert not tracked.track(delivery(0))
    assert tracked.in_flight == 1


def test_the_oldest_message_is_the_one_that_was_written_first_of_those_that_are_held() -> None:
    tracked = tracker(P0, P1)
    assert tracked.oldest_timestamp_ms() is None
    for offset, written_ms in ((0, 700), (1, 300)):
        tracked.track(replace(delivery(offset), timestamp_ms=written_ms))
    tracked.track(replace(delivery(0, P1), timestamp_ms=-1))  # the broker says nothing of it
    assert tracked.oldest_timestamp_ms() == 700, "of each partition, the delivery that holds its commits up"
    tracked.forget([P0])
    assert tracked.oldest_timestamp_ms() is None


def test_partial_commit_keeps_the_rest() -> None:
    tracked = tracker()
    for offset in range(4):
        tracked.track(delivery(offset))
        tracked.complete(delivery(offset), output(offset))
    offered = tracked.ready()
    assert tracked.settled(offered, {P0: 2}) == 2
    assert tracked.in_flight == 2


actions = st.lists(
    st.one_of(
        st.tuples(st.just("track"), st.sampled_from([P0, P1])),
        st.tuples(st.just("complete"), st.integers(0, 60)),
        st.tuples(st.just("settle"), st.integers(0, 60)),
        st.tuples(st.just("reassign"), st.sampled_from([P0, P1])),
        st.tuples(st.just("revoke"), st.sampled_from([P0, P1])),
    ),
    max_size=80,
)


@settings(max_examples=300)
@given(actions)
def test_against_a_model_nothing_is_lost_and_nothing_is_committed_early(steps: list[tuple[str, object]]) -> None:
    tracked = OffsetTracker()
    epochs: dict[Partition, int] = {P0: 1, P1: 1}
    tracked.assign(epochs)
    position = {P0: 0, P1: 0}  # next offset to arrive
    committed = {P0: 0, P1: 0}
    done: dict[Partition, set[int]] = {P0: set(), P1: set()}
    live: list[Delivery] = []
    assigned = {P0, P1}
    for step, argument in steps:
        if step == "track":
            assert isinstance(argument, Partition)
            if argument in assigned:
                arrived = delivery(position[argument], argument, epochs[argument])
                assert tracked.track(arrived)
                position[argument] += 1
                live.append(arrived)
        elif step == "complete" and live:
            assert isinstance(argument, int)
            chosen = live.pop(argument % len(live))
            current = chosen.partition in assigned and epochs[chosen.partition] == chosen.epoch
            assert tracked.complete(chosen, output(chosen.offset)) is current
            if current:
                done[chosen.partition].add(chosen.offset)
        elif step == "settle":
            offered = tracked.ready()
            for part in offered.partitions:
                # every offset between what is committed and what would be is done
                assert set(range(committed[part.partition], part.next_offset)) <= done[part.partition]
                committed[part.partition] = part.next_offset
            tracked.settled(offered, {part.partition: part.next_offset for part in offered.partitions})
        elif step in {"reassign", "revoke"}:
            assert isinstance(argument, Partition)
            if step == "revoke":
                tracked.forget([argument])
                assigned.discard(argument)
            else:
                epochs[argument] += 1
                tracked.assign({argument: epochs[argument]})
                assigned.add(argument)
                position[argument] = committed[argument]  # the broker delivers again from the commit on
                done[argument] = {offset for offset in done[argument] if offset < committed[argument]}
        held = sum(position[p] - committed[p] for p in assigned)
        assert tracked.in_flight == held
