"""KnownTickets: which texts this worker has decided before, so that a card can name a ticket's duplicates."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

from worker.core.cards import Duplicates, Known
from worker.core.envelope import Envelope
from worker.core.ticket import Ticket

MOST_TEXTS = 20_000
"""Some 10 MB."""
NAMED = 5
"""Tickets of one text that are named; the rest are counted."""


_Said = tuple[str, str, str]
"""Ticket id, decision id and time of a decision."""
_Met = tuple[int, str, tuple[_Said, ...]]
"""How many tickets of a text were met, the decision of the latest (one that is delivered again right away is not its
own duplicate), and the first of them. Plain tuples, which the collector of cycles leaves alone."""

_NONE: Final = Duplicates(0, ())


class KnownTickets:
    """The texts met last, by digest and tenant; no text is kept. Written and read by the event loop alone."""

    def __init__(self, most_texts: int = MOST_TEXTS) -> None:
        self._most = most_texts
        self._met: OrderedDict[bytes, _Met] = OrderedDict()

    def meet(self, ticket: Ticket, envelope: Envelope) -> Duplicates:
        """Those met before with the tenant and scored text of this one, which is remembered from now on.

        A redelivery is told by its decision's id from the first few and the latest; between them it counts again.
        """
        digest = hashlib.blake2b(ticket.scored_text.encode(), digest_size=16)
        digest.update(b"\x00" if ticket.tenant is None else b"\x01" + ticket.tenant.encode())
        key = digest.digest()
        own = envelope.decision_id
        said = envelope.ticket_id, own, envelope.decided_at
        met = self._met.get(key)
        if met is None:
            self._met[key] = 1, own, (said,)
            if len(self._met) > self._most:
                self._met.popitem(last=False)
            return _NONE
        count, last, first = met
        others = tuple(Known(*each) for each in first if each[1] != own)
        again = len(others) < len(first) or last == own
        if not again:
            self._met[key] = count + 1, own, (*first, said) if len(first) < NAMED else first
        self._met.move_to_end(key)
        return Duplicates(count - again, others)
