"""The ledger finds what is missing, doubled, out of order, misplaced, undecided or committed too early."""

from __future__ import annotations

import orjson
import pytest

from tests.chaos.ledger import Entry, Sample, Topics, Verdict, judge
from tests.chaos.workload import Sent, tickets

TOPICS = Topics("in", "human", "dead", "decisions", {"billing": "b", "login": "l", "bug": "g"})
TICKETS = tuple(tickets(1, 400))


def played(partitions: int = 3) -> tuple[list[Entry], list[Entry]]:
    """A run in which all is well: the input topic, and the outputs of which each took ten milliseconds."""
    came_in: list[Entry] = []
    came_out: list[Entry] = []
    for ticket in TICKETS:
        number = sum(ticket.key) % partitions
        offset = sum(entry.partition == number for entry in came_in)
        came_in.append(Entry("in", number, offset, ticket.key, ticket.value, 0))
        came_out += ends(ticket, number, offset)
    return came_in, came_out


def ends(ticket: Sent, partition: int, offset: int) -> list[Entry]:
    produced_ms = 10 * offset
    topic = TOPICS.routes[ticket.category] if ticket.category else TOPICS.human if ticket.ticket else TOPICS.dead_letter
    entries = [Entry(topic, partition, offset, ticket.key, ticket.value, produced_ms)]
    if ticket.ticket:
        decision = orjson.dumps({"origin": {"topic": "in", "partition": partition, "offset": offset}})
        entries.append(Entry("decisions", partition, offset, ticket.key, decision, produced_ms))
    return entries


def verdict(came_out: list[Entry], samples: tuple[Sample, ...] = ()) -> Verdict:
    return judge(TOPICS, TICKETS, played()[0], came_out, samples)


def routed(came_out: list[Entry]) -> int:
    """Index of the output of a ticket that was routed, in the middle, and followed by its decision."""
    return next(i for i, entry in enumerate(came_out) if i > 300 and entry.topic in TOPICS.routes.values())


def test_a_run_in_which_all_is_well_has_no_problems() -> None:
    came_out = played()[1]
    found = verdict(came_out, (Sample(1_000, {0: 100, 1: 100, 2: 100}),))
    assert not found.problems
    assert found.tickets == found.ends.total() == 400
    assert all(found.ends[fate] > 0 for fate in ("routed", "escalated", "dead_lettered"))


def test_a_dropped_output_is_missing() -> None:
    came_out = played()[1]
    gone = came_out.pop(routed(came_out))
    assert verdict(came_out).problems == {"missing": [f"{gone.partition}/{gone.offset}"]}


def test_a_copy_is_a_duplicate_in_whichever_topic_and_no_order_violation() -> None:
    for topic in ("same", TOPICS.human):
        came_out = played()[1]
        entry = came_out[routed(came_out)]
        where = entry.topic if topic == "same" else topic
        came_out.append(Entry(where, entry.partition, 9_999, entry.key, entry.value, 0))
        assert verdict(came_out).problems == {"duplicates": [f"{entry.partition}/{entry.offset}"]}


def test_an_output_behind_a_later_one_of_its_key_is_out_of_order() -> None:
    came_out = played()[1]
    lanes: dict[tuple[str, bytes | None], int] = {}
    for index, entry in enumerate(came_out):
        earlier = lanes.setdefault((entry.topic, entry.key), index)
        if entry.topic in TOPICS.routes.values() and earlier < index:
            came_out[earlier], came_out[index] = entry, came_out[earlier]
            late = came_out[index]
            assert verdict(came_out).problems == {"order violations": [f"{late.partition}/{late.offset}"]}
            return
    pytest.fail("no key twice")


def test_a_ticket_in_a_topic_that_is_not_its_own_is_misplaced() -> None:
    came_out = played()[1]
    index = routed(came_out)
    entry = came_out[index]
    other = next(topic for topic in TOPICS.routes.values() if topic != entry.topic)
    came_out[index] = Entry(other, entry.partition, entry.offset, entry.key, entry.value, entry.timestamp_ms)
    assert "in a wrong topic" in verdict(came_out).problems


def test_a_decision_that_lacks_or_comes_twice_is_told() -> None:
    came_out = played()[1]
    index = routed(came_out)
    entry, decision = came_out[index : index + 2]
    assert decision.topic == "decisions"
    name = f"{entry.partition}/{entry.offset}"
    assert verdict([*came_out, decision]).problems == {"without one decision": [name]}
    assert verdict([each for each in came_out if each != decision]).problems == {"without one decision": [name]}


def test_an_offset_that_was_committed_before_its_output_was_produced_is_told() -> None:
    came_out = played()[1]
    assert not verdict(came_out, (Sample(90, {0: 10}),)).problems
    assert verdict(came_out, (Sample(89, {0: 10}),)).problems == {"committed before its output": ["0/9"]}


def test_an_output_that_is_no_ticket_of_the_run_is_told() -> None:
    assert "from nowhere" in verdict([*played()[1], Entry("human", 0, 1, None, b"who knows", 0)]).problems


def test_an_input_topic_that_differs_from_what_was_sent_is_no_verdict() -> None:
    came_in, came_out = played()
    with pytest.raises(ValueError, match="not what was sent"):
        judge(TOPICS, TICKETS, came_in[:-1], came_out, ())
