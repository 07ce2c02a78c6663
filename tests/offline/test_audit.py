"""The audit finds what is lost, doubled or out of order, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import orjson
import pytest

from tests.core.sets import rule_set
from worker.adapters.topic_log import Record
from worker.core.envelope import ATTEMPT, DECISION_HEADER, POINTER, Headers, Origin, dead_letter_headers, origin_headers
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
        return Record(partition, 0, key, b"{}", dead_letter_headers((), of, "no_text", ""), 0)
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


def later(offset: int, value: bytes = b"new", at_ms: int = 2_000) -> Record:
    return replace(ticket(offset), value=value, timestamp_ms=at_ms)


def test_outputs_of_a_deleted_topic_are_not_taken_for_the_ends_of_the_new_one_s_tickets() -> None:
    """Offsets begin at 0 again: without a look at what was sent, three lost tickets would have their ends."""
    old = [replace(end(ROUTED, origin(n)), value=b"old", timestamp_ms=1_000 + n) for n in range(5)]
    own = replace(end(HUMAN, origin(2)), value=b"new", timestamp_ms=2_500)
    found = audit(RULES, [later(n) for n in range(3)], [*old, own], {IN: 3}, {IN: 0}, lambda: {IN: 3})
    assert found.missing == (origin(0), origin(1))
    assert (found.earlier, found.ends, found.duplicates) == (5, {"escalated": 1}, ())
    assert not found.clean


def test_once_the_topic_is_known_to_be_new_an_equal_ticket_s_older_end_is_not_its_own() -> None:
    """The same file was sent in again, and a worker read only some of it."""
    old = [replace(end(ROUTED, origin(n)), value=b"new", timestamp_ms=1_000) for n in range(4)]
    tickets = [later(n) for n in range(2)]
    found = audit(RULES, tickets, old, {IN: 2}, {IN: 0}, lambda: {IN: 2})
    assert (found.missing, found.earlier) == ((origin(0), origin(1)), 4)


def test_a_wrong_clock_alone_makes_no_earlier_topic() -> None:
    """Tickets stamped hours ahead: every end is older than its ticket."""
    tickets = [later(n, at_ms=9 * 3_600_000) for n in range(3)]
    ends = [replace(end(ROUTED, origin(n)), value=b"new", timestamp_ms=1_000) for n in range(3)]
    found = audit(RULES, tickets, ends, {IN: 3}, {IN: 0}, lambda: {IN: 3})
    assert found.clean
    assert found.earlier == 0


def test_a_later_message_that_states_a_ticket_s_origin_and_holds_something_else_is_a_duplicate() -> None:
    forged = replace(end(ROUTED, origin(0)), value=b"forged", timestamp_ms=5_000)
    own = replace(end(ROUTED, origin(0)), value=b"new", timestamp_ms=3_000)
    found = audit(RULES, [later(0)], [own, forged], {IN: 1}, {IN: 0}, lambda: {IN: 1})
    assert (found.duplicates, found.missing, found.earlier) == ((origin(0),), (), 0)


def test_a_pointer_is_the_end_of_the_ticket_that_it_points_to() -> None:
    headers = (*dead_letter_headers((), origin(0), "too_large", ""), (POINTER, b"value"))
    found = audit(RULES, [later(0)], [Record(DEAD, 0, None, None, headers, 3_000)], {IN: 1}, {IN: 0}, lambda: {IN: 1})
    assert found.clean


def test_what_retention_deleted_behind_the_committed_offset_is_expired() -> None:
    found = audit(RULES, [ticket(148)], [end(ROUTED, origin(n)) for n in range(78)], {IN: 78}, {IN: 148})
    assert found.expired == {IN: 70}
    assert found.waiting == 1
    assert not found.clean


def test_what_was_deleted_before_workers_went_on_shows_as_a_gap_in_what_was_decided() -> None:
    decided = [*range(78), *range(148, 200)]
    ends = [replace(end(ROUTED, origin(n)), offset=n) for n in decided]
    tickets = [ticket(n) for n in range(190, 200)]
    found = audit(RULES, tickets, ends, {IN: 200}, {IN: 190})
    assert found.expired == {IN: 70}


@pytest.mark.parametrize("why", ["outputs expired", "transactions", "sent in again", "an empty output topic expired"])
def test_a_gap_that_has_another_reason_is_no_loss(why: str) -> None:
    ends = [replace(end(ROUTED, origin(n)), offset=n) for n in range(200) if n not in (50, 51)]
    tickets = [ticket(n) for n in range(190, 200)]
    begins = {IN: 190}
    if why == "outputs expired":  # those of people last for less time, and 50 and 51 were among them
        ends.append(replace(end(HUMAN, origin(150)), offset=7, timestamp_ms=1_000_000))
    elif why == "transactions":  # of whoever sends tickets in: each leaves an offset without one
        tickets.remove(ticket(195))
        ends = [each for each in ends if each.offset != 195]
    elif why == "sent in again":
        ends += [
            replace(end(HUMAN, origin(n)), offset=n - 3, headers=(*end(HUMAN, origin(n)).headers, (ATTEMPT, b"1")))
            for n in (3, 4)
        ]
    else:
        begins[HUMAN] = 12
    assert audit(RULES, tickets, ends, {IN: 200}, begins).expired == {}
