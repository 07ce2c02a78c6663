"""KnownTickets: which texts this worker has decided before, so that a card can name a ticket's duplicates."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from worker.core.cards import Duplicates, Known
from worker.core.envelope import Envelope
from worker.core.ticket import Ticket

MOST_TEXTS = 20_000
"""Some 10 MB."""
NAMED = 5
"""Tickets of one text that are named; the rest are counted."""


@dataclass(slots=True)
class _Met:
    last: str
    """Decision of the latest: one that is delivered again right away is not its own duplicate."""
    first: list[Known]
    count: int = 1


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
        met = self._met.get(key)
        if met is None:
            self._met[key] = _Met(own, [Known(envelope.ticket_id, own, envelope.decided_at)])
            if len(self._met) > self._most:
                self._met.popitem(last=False)
            return _NONE
        self._met.move_to_end(key)
        others = tuple(known for known in met.first if known.decision_id != own)
        again = len(others) < len(met.first) or met.last == own
        found = Duplicates(met.count - again, others)
        if not again:
            met.count += 1
            met.last = own
            if len(met.first) < NAMED:
                met.first.append(Known(envelope.ticket_id, own, envelope.decided_at))
        return found
