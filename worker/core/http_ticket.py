"""Tickets that no topic holds, asked about over HTTP or at a terminal: alone knows their identity, and what a client is
told to do about a bad one.
"""

from __future__ import annotations

from collections.abc import Mapping

from worker.core.digest import fingerprint
from worker.core.envelope import Origin
from worker.core.ticket import Ticket

ORIGIN_PREFIX = "http:"
"""No Kafka topic may hold a colon, so such an origin is never taken for a message's."""

WHAT_TO_DO: Mapping[str, str] = {
    "null_value": "send the ticket as the request's body",
    "invalid_utf8": "encode the body as UTF-8",
    "invalid_json": "send one JSON object, without NaN, Infinity or a byte order mark",
    "too_deep": "nest objects and lists less deeply",
    "duplicate_key": "state each key once in an object",
    "not_an_object": "send one JSON object",
    "lone_surrogate": "send whole characters: an escape \\ud800 to \\udfff stands for half of one",
    "wrong_type": "send a string there (docs/messages.md, 'Tickets in')",
    "no_text": "send the text where the rule set's `intake` looks for it (docs/messages.md, 'Tickets in')",
    "too_large": "send less; ROUTER_MAX_TICKET_BYTES is the limit",
}
"""For every code of an InvalidTicket that bytes can have."""


def http_origin(ticket: Ticket) -> Origin:
    """Where a ticket came in that no topic holds: a digest of tenant, id and canonical text stands for the topic.

    Equal for the same ticket asked about again, so its decision has the same id under the same rules and calibration.
    """
    parts = ("-" if part is None else f"+{part}" for part in (ticket.tenant, ticket.id))
    return Origin(ORIGIN_PREFIX + fingerprint("http-origin/1", *parts, ticket.text), 0, 0)
