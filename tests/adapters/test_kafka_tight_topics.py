"""Topics that refused a batch: who is to blame, and how much of them may wait for one flush."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from worker.adapters.kafka_refusals import REFUSED_RECORD_RETRY_S, record_bytes
from worker.adapters.kafka_tight_topics import TightTopics
from worker.ports import Output

BILLING = Output("billing", b"key", b"a ticket", (("decision", "청구".encode()), ("none", None)))
DECISION = Output("decisions", b"key", b"a decision")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refused_among(*sent: Output) -> tuple[TightTopics, bool, Clock]:
    """After `billing` refused one of these; and whether it was to blame."""
    clock = Clock()
    tight = TightTopics(clock)
    tight.begin()
    for output in sent:
        assert not tight.no_room(output)  # nothing is known yet
        tight.sent(output)
    alone = tight.refused("billing")
    tight.begin()
    return tight, alone, clock


def sent_until_full(tight: TightTopics) -> int:
    count = 0
    while not tight.no_room(BILLING):
        tight.sent(BILLING)
        count += 1
    return count


def test_who_was_alone_of_its_topic_is_to_blame_whatever_waited_for_others() -> None:
    assert refused_among(DECISION, BILLING, DECISION)[1]
    assert not refused_among(BILLING, DECISION, BILLING)[1]


def test_what_was_flushed_waits_no_more_and_shares_no_blame() -> None:
    tight = TightTopics(Clock())
    tight.begin()
    tight.sent(BILLING)
    assert tight.waiting == {"billing"}
    tight.flushed()
    assert tight.waiting == frozenset()
    tight.sent(BILLING)
    assert tight.refused("billing")


def test_the_first_goes_alone_and_then_twice_as_many_as_were_taken() -> None:
    tight, _, _ = refused_among(BILLING, BILLING)
    assert tight.any
    counts = []
    for _ in range(4):
        counts.append(sent_until_full(tight))
        assert not tight.no_room(DECISION)  # only the topic that refused is tight
        tight.flushed()
    assert counts == [1, 2, 4, 8]


def test_after_a_second_refusal_no_more_waits_than_was_taken_before() -> None:
    tight, _, _ = refused_among(BILLING, BILLING)
    for _ in range(2):
        sent_until_full(tight)
        tight.flushed()
    assert sent_until_full(tight) == 4
    assert not tight.refused("billing")
    for _ in range(2):
        tight.begin()
        assert sent_until_full(tight) == 2
        tight.flushed()


@example(shares=[3, 2, 0], at_once=[1])
@example(shares=[6, 6], at_once=[6, 2])
@given(
    shares=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    at_once=st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_whatever_a_topic_takes_only_apart_is_taken_in_the_end(shares: list[int], at_once: list[int]) -> None:
    """Batches are those of a partition, and what a batch may hold is known of nobody: of these records it takes two
    times as many, or five, since they compress."""
    clock = Clock()
    tight = TightTopics(clock)
    records = [partition for partition, count in enumerate(shares) for _ in range(count)]

    def transaction() -> bool:
        tight.begin()
        waiting: Counter[int] = Counter()
        for partition in [*records, None]:
            if partition is None or tight.no_room(BILLING):
                if any(count > at_once[each % len(at_once)] for each, count in waiting.items()):
                    assert not tight.refused("billing"), "nobody is to blame"
                    return False
                tight.flushed()
                waiting.clear()
            if partition is not None:
                tight.sent(BILLING)
                waiting[partition] += 1
        return True

    attempts = 1
    while not transaction():
        clock.now += 0.1
        attempts += 1
        assert attempts < 20


def test_a_topic_is_tight_for_a_while_after_its_last_refusal() -> None:
    tight, _, clock = refused_among(BILLING, BILLING)
    clock.now = REFUSED_RECORD_RETRY_S - 1
    tight.begin()
    assert tight.any
    clock.now = REFUSED_RECORD_RETRY_S
    tight.begin()
    assert not tight.any


def test_a_record_is_counted_with_names_in_bytes_and_headers_without_a_value() -> None:
    output = Output("t", None, None, (("제목", None), ("a", b"12")))
    assert record_bytes(output) - record_bytes(Output("t", None, None)) == 2 * 10 + 6 + 1 + 2
