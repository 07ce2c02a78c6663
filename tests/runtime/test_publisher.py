"""Publisher: tickets that end together are published together, and a bug costs the ticket that meets it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import orjson

from tests.core.sets import rule_set
from worker.core.envelope import Envelope
from worker.core.policy import Decision, reason
from worker.core.ticket import Ticket
from worker.ports import Delivery, Output, Partition
from worker.runtime.journal import Journal
from worker.runtime.outputs import Outputs, Provenance
from worker.runtime.publisher import TOGETHER, Publisher
from worker.runtime.router import Routed
from worker.runtime.ticket_spans import TicketSpans
from worker.telemetry import DECISIONS, TICKET_FAILURES, Metrics, NoTracing

RULES = rule_set()
ROUTED = Routed(Decision("route", "desk.login", "login", (reason("override", name="a rule"),)))


class Failing(Outputs):
    """Fails on these offsets; `always`: on what is made in their place, too."""

    def __init__(self, *offsets: int, always: bool = False) -> None:
        super().__init__(RULES, Provenance(None, None, None))
        self._offsets = offsets
        self._always = always

    def decided(self, delivery: Delivery, envelope: Envelope, ticket: Ticket | None = None) -> tuple[Output, ...]:
        if delivery.offset in self._offsets and (self._always or envelope.action == "route"):
            raise ZeroDivisionError
        return super().decided(delivery, envelope, ticket)


class Telling(Journal):
    """Keeps what was told of which offset."""

    def __init__(self, metrics: Metrics, *, log_ticket_text: bool) -> None:
        super().__init__(metrics, log_ticket_text=log_ticket_text)
        self.told: list[tuple[int, str]] = []

    def decided(self, delivery: Delivery, ticket: Ticket | None, envelope: Envelope) -> None:
        super().decided(delivery, ticket, envelope)
        self.told.append((delivery.offset, envelope.action))


class Desk:
    """A publisher and what came to its end."""

    def __init__(self, outputs: Outputs, journal: type[Journal] = Journal) -> None:
        self.metrics = Metrics()
        self.ended: dict[int, tuple[Output, ...]] = {}
        self.journal = journal(self.metrics, log_ticket_text=False)
        self.publisher = Publisher(
            rule_set=RULES,
            outputs=outputs,
            journal=self.journal,
            spans=TicketSpans(NoTracing()),
            now=lambda: datetime(2026, 1, 1, tzinfo=UTC),
            complete=lambda delivery, outputs: self.ended.update({delivery.offset: outputs}),
        )

    def decide(self, offset: int) -> None:
        delivery = Delivery(Partition("tickets", 0), offset, 1, None, b"{}", (), -1)
        self.publisher.decided(delivery, Ticket(f"t{offset}", "a text"), ROUTED, 0.1, None)

    @property
    def told(self) -> list[tuple[int, str]]:
        """(offset, action), where the journal is a Telling one."""
        assert isinstance(self.journal, Telling)
        return self.journal.told

    def topics(self) -> dict[int, str]:
        return {offset: outputs[0].topic for offset, outputs in self.ended.items()}


async def test_what_is_decided_in_one_turn_is_published_by_the_next_without_being_asked() -> None:
    desk = Desk(Failing())
    for offset in range(3):
        desk.decide(offset)
    assert not desk.ended
    await asyncio.sleep(0)
    assert desk.topics() == dict.fromkeys(range(3), "desk.login")


async def test_a_flush_publishes_at_once_and_each_ticket_once() -> None:
    desk = Desk(Failing())
    desk.decide(1)
    desk.publisher.flush()
    assert list(desk.ended) == [1]
    desk.ended.clear()
    await asyncio.sleep(0)
    assert not desk.ended


async def test_many_tickets_do_not_wait_for_the_end_of_the_turn() -> None:
    desk = Desk(Failing())
    for offset in range(2 * TOGETHER + 1):
        desk.decide(offset)
    assert len(desk.ended) == 2 * TOGETHER
    await asyncio.sleep(0)
    assert len(desk.ended) == 2 * TOGETHER + 1


async def test_a_bug_in_one_tickets_messages_sends_it_to_people_and_its_neighbours_on_their_way() -> None:
    desk = Desk(Failing(2))
    for offset in range(5):
        desk.decide(offset)
    await asyncio.sleep(0.01)
    assert desk.topics() == {0: "desk.login", 1: "desk.login", 2: "desk.human", 3: "desk.login", 4: "desk.login"}
    told = orjson.loads(dict(desk.ended[2][0].headers)["ticket-router-decision"] or b"")
    assert told["reasons"][0]["code"] == "internal_error"
    assert [sample.value for sample in desk.metrics.samples(TICKET_FAILURES)] == [1]


async def test_a_ticket_whose_messages_fail_is_told_and_counted_as_one_decision_the_one_that_is_published() -> None:
    desk = Desk(Failing(2), Telling)
    for offset in range(5):
        desk.decide(offset)
    await asyncio.sleep(0)
    desk.publisher.flush()
    assert sorted(desk.told) == [(0, "route"), (1, "route"), (2, "escalate"), (3, "route"), (4, "route")]
    assert sum(sample.value for sample in desk.metrics.samples(DECISIONS)) == 5


async def test_a_bug_in_telling_of_a_decision_leaves_it_as_it_is_and_is_not_told_again() -> None:
    class Stumbling(Telling):
        """Fails when all is told, as a log that goes away between its lines."""

        def decided(self, delivery: Delivery, ticket: Ticket | None, envelope: Envelope) -> None:
            super().decided(delivery, ticket, envelope)
            if delivery.offset == 2:
                raise OSError

    desk = Desk(Failing(), Stumbling)
    for offset in range(5):
        desk.decide(offset)
    await asyncio.sleep(0)
    desk.publisher.flush()
    assert sorted(desk.told) == [(offset, "route") for offset in range(5)]
    assert sum(sample.value for sample in desk.metrics.samples(DECISIONS)) == 5
    assert desk.topics() == dict.fromkeys(range(5), "desk.login")
    assert [sample.value for sample in desk.metrics.samples(TICKET_FAILURES)] == [1]


async def test_a_bug_in_ending_one_ticket_costs_no_neighbour_and_tells_none_twice() -> None:
    desk = Desk(Failing(), Telling)
    ended = desk.ended.update

    def complete(delivery: Delivery, outputs: tuple[Output, ...]) -> None:
        if delivery.offset == 2:
            raise KeyError
        ended({delivery.offset: outputs})

    desk.publisher._complete = complete
    for offset in range(TOGETHER):  # the last of them flushes while it is handed in
        desk.decide(offset)
    desk.publisher.flush()
    assert sorted(desk.ended) == [offset for offset in range(TOGETHER) if offset != 2]
    assert len(desk.told) == TOGETHER
    assert [sample.value for sample in desk.metrics.samples(TICKET_FAILURES)] == [1]


async def test_a_ticket_for_which_nothing_can_be_published_stays_open_and_no_neighbour_does() -> None:
    desk = Desk(Failing(2, always=True))
    for offset in range(5):
        desk.decide(offset)
    await asyncio.sleep(0.01)
    assert sorted(desk.ended) == [0, 1, 3, 4]
    assert [sample.value for sample in desk.metrics.samples(TICKET_FAILURES)] == [2]


async def test_not_even_a_bug_in_saying_so_reaches_the_neighbours() -> None:
    class Mute(Journal):
        def failed(self, delivery: Delivery, error: Exception) -> None:
            raise error

    desk = Desk(Failing(2), Mute)
    for offset in range(5):
        desk.decide(offset)
    await asyncio.sleep(0.01)
    assert sorted(desk.ended) == [0, 1, 3, 4]
