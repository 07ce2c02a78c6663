"""The audit finds what is lost, doubled or out of order, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson
import pytest

from tests.core.sets import rule_set
from worker.adapters.topic_log import Record
from worker.core.envelope import DECISION_HEADER, Headers, Origin, dead_letter_headers, origin_headers
from worker.offline.audit import Ledger, audit
from worker.ports import Partition

RULES = rule_set("billing", "login")
IN = Partition(RULES.input_topic, 0)
ROUTED, HUMAN, DEAD = (Partition(t, 0) for t in (f"{RULES.id}.billing", RULES.human_topic, RULES.dead_letter_topic))


def ticket(offset: int, headers: Headers = (), key: bytes = b"k") -> Record:
    return Record(IN, offset, key, b"{}", headers, 0)


def origin(offset: int) -> Origin:
    return Origin(IN.topic, IN.number, offset)


def end(partition: Partition, of: Origin, key: bytes = b"k") -> Record:
    if partition == DEAD:
        return Record(partition, 0, key, b"", dead_letter_headers((), of, "no_text", ""), 0)
    decision = orjson.dumps({"origin": {"topic": of.topic, "partition": of.partition, "offset": of.offset}})
    return Record(partition, 0, key, b"{}", ((DECISION_HEADER, decision),), 0)


def ledger(
    tickets: Sequence[Record], outputs: Sequence[Record], committed: Mapping[Partition, int] | None = None
) -> Ledger:
    return audit(RULES, tickets, outputs, {IN: 100} if committed is None else committed)


def test_every_ticket_in_one_place_is_clean() -> None:
    found = ledger([ticket(n) for n in range(3)], [end(ROUTED, origin(0)), end(HUMAN, origin(1)), end(DEAD, origin(2))])
    assert found.clean
    assert (found.tickets, found.ends) == (3, {"routed": 1, "escalated": 1, "dead_lettered": 1})


def test_a_committed_ticket_without_an_end_is_missing_and_an_uncommitted_one_waits() -> None:
    found = ledger([ticket(0), ticket(1)], [], {IN: 1})
    assert found.missing == (origin(0),)
    assert found.waiting == 1
    assert not found.clean


@pytest.mark.parametrize("second", [ROUTED, HUMAN, DEAD])
def test_a_second_end_is_a_duplicate_in_whichever_topic(second: Partition) -> None:
    found = ledger([ticket(0)], [end(ROUTED, origin(0)), end(second, origin(0))])
    assert found.duplicates == (origin(0),)
    assert not found.clean


def test_a_later_ticket_of_the_same_key_in_front_is_an_order_violation() -> None:
    tickets = [ticket(0), ticket(1), ticket(2, key=b"other")]
    found = ledger(tickets, [end(ROUTED, origin(2), b"other"), end(ROUTED, origin(1)), end(ROUTED, origin(0))])
    assert found.out_of_order == (origin(0),)
    assert not found.missing
    assert not found.clean


def test_a_duplicate_is_no_order_violation_too() -> None:
    found = ledger([ticket(0), ticket(1)], [end(ROUTED, origin(n)) for n in (0, 1, 0, 1)])
    assert len(found.duplicates) == 2
    assert not found.out_of_order


def test_a_ticket_that_was_sent_in_again_has_one_end_for_each_time() -> None:
    tickets = [ticket(0), ticket(1), ticket(2, origin_headers(origin(0)))]
    first, others = end(DEAD, origin(0)), [end(ROUTED, origin(1)), end(ROUTED, origin(0))]
    assert ledger(tickets, [first, *others]).clean
    assert ledger(tickets, others).missing == (origin(0),)
    assert ledger(tickets, [first, *others, others[1]]).duplicates == (origin(0),)


def test_what_came_in_before_the_window_is_left_out() -> None:
    tickets = [ticket(5), ticket(6, origin_headers(origin(2)))]
    found = ledger(
        tickets, [end(DEAD, origin(2)), end(ROUTED, origin(2)), end(ROUTED, origin(3)), end(HUMAN, origin(5))]
    )
    assert found.clean
    assert found.tickets == 1


def test_an_origin_that_cannot_be_true_is_not_believed() -> None:
    forged = [origin_headers(Origin(*claim)) for claim in (("other", 0, 0), (IN.topic, 1, 0), (IN.topic, 0, 9))]
    tickets = [ticket(offset, headers) for offset, headers in enumerate(forged)]
    assert ledger(tickets, [end(ROUTED, origin(n)) for n in range(3)]).clean


def test_messages_of_others_are_counted_apart() -> None:
    other = Record(ROUTED, 0, b"k", b"{}", ((DECISION_HEADER, b"no JSON"),), 0)
    found = ledger([ticket(0)], [end(ROUTED, origin(0)), other, end(ROUTED, Origin("elsewhere", 0, 0))])
    assert found.clean
    assert found.foreign == 1
