"""Publisher: turns what was decided about tickets into their messages, for tickets that end together at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from worker.core.envelope import Envelope
from worker.core.policy import escalate_unscored, reason
from worker.core.rules import RuleSet
from worker.core.ticket import Ticket
from worker.ports import Delivery, Output
from worker.runtime.journal import Journal
from worker.runtime.outputs import Outputs
from worker.runtime.router import Routed
from worker.runtime.ticket_spans import TicketSpans, say_decided
from worker.telemetry import Span

T = TypeVar("T")
U = TypeVar("U")

TOGETHER = 32
"""So many tickets pass through one step of the work before the next step begins. The processor then still has that
step's code, which for one ticket after the other takes a fifth more time; of more tickets it would not have the data.
"""


@dataclass(slots=True)
class _Decided:
    """A ticket on its way to its messages."""

    delivery: Delivery
    ticket: Ticket | None
    routed: Routed
    total_s: float
    span: Span | None


_Addressed = tuple[Envelope, tuple[Output, ...]]
"""What was decided, and the messages that it consists of."""


class Publisher:
    """What is handed in is published within this turn of the loop, by `flush` at the latest: whoever looks at what is
    finished flushes first."""

    def __init__(
        self,
        *,
        rule_set: RuleSet,
        outputs: Outputs,
        journal: Journal,
        spans: TicketSpans,
        now: Callable[[], datetime],
        complete: Callable[[Delivery, tuple[Output, ...]], object],
    ) -> None:
        """`complete` takes a delivery that has come to its end, with everything that has to be produced for it."""
        self._rule_set = rule_set
        self._outputs = outputs
        self._journal = journal
        self._spans = spans
        self._now = now
        self._complete = complete
        self._decided: list[_Decided] = []
        self._stamped = (-1, "")

    def decided(
        self, delivery: Delivery, ticket: Ticket | None, routed: Routed, total_s: float, span: Span | None
    ) -> None:
        """Without `ticket` it is known by its delivery alone."""
        decided = self._decided
        decided.append(_Decided(delivery, ticket, routed, total_s, span))
        if len(decided) >= TOGETHER:
            self.flush()
        elif len(decided) == 1:
            asyncio.get_running_loop().call_soon(self.flush)

    def failed(self, delivery: Delivery, error: Exception, span: Span | None) -> None:
        """A bug must cost a ticket its automation, never its delivery: people get it."""
        self._journal.failed(delivery, error)
        if span is not None:
            span.fail(error)
        why = reason("internal_error", detail=type(error).__name__)
        self.decided(delivery, None, Routed(escalate_unscored(self._rule_set, why)), 0.0, span)

    def flush(self) -> None:
        """Publishes what was handed in so far. Never raises."""
        decided, self._decided = self._decided, []
        described = self._through(self._describe, [(each, each.routed) for each in decided])
        addressed = self._through(self._address, described)
        # Only what has its messages is told: what fails before becomes another decision, and a ticket has one.
        self._past(self._tell, addressed)
        self._past(self._end, addressed)

    def timestamp(self) -> str:
        """Now, as envelopes state it."""
        now = self._now()
        millisecond = int(now.timestamp() * 1000)
        if millisecond != self._stamped[0]:  # written once for all tickets that are decided within it
            text = now.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            self._stamped = millisecond, text
        return self._stamped[1]

    def _through(
        self, step: Callable[[_Decided, T], U], items: Iterable[tuple[_Decided, T]]
    ) -> list[tuple[_Decided, U]]:
        """Those that this step does not fail on."""
        found = []
        for each, value in items:
            try:
                found.append((each, step(each, value)))
            except Exception as error:  # noqa: BLE001 - one ticket's, not its neighbours'
                # Where that fails too, the ticket stays open, uncommitted, and the watchdog says so.
                with contextlib.suppress(Exception):
                    if each.ticket is not None:
                        self.failed(each.delivery, error, each.span)
                    else:
                        self._journal.failed(each.delivery, error)
        return found

    def _past(self, step: Callable[[_Decided, T], object], items: Iterable[tuple[_Decided, T]]) -> None:
        """All of them, whichever this step fails on: by now a ticket's decision is made and stays what it is."""
        for each, value in items:
            try:
                step(each, value)
            except Exception as error:  # noqa: BLE001 - as above
                with contextlib.suppress(Exception):
                    self._journal.failed(each.delivery, error)

    def _describe(self, each: _Decided, routed: Routed) -> Envelope:
        return self._outputs.envelope(each.delivery, each.ticket, routed, self.timestamp(), each.total_s)

    def _address(self, each: _Decided, envelope: Envelope) -> _Addressed:
        return envelope, self._outputs.decided(self._spans.carrying(each.delivery), envelope, each.ticket)

    def _tell(self, each: _Decided, addressed: _Addressed) -> None:
        envelope, _ = addressed
        self._journal.decided(each.delivery, each.ticket, envelope)
        if each.span is not None:
            say_decided(each.span, envelope)

    def _end(self, each: _Decided, addressed: _Addressed) -> None:
        _, outputs = addressed
        self._complete(each.delivery, outputs)
