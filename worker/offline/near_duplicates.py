"""Near-duplicates: which tickets count as one, since a certificate counts independent tickets only."""

from __future__ import annotations

import base64
import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from worker.offline.scoring import ScoredTicket

RULE = (
    "Tickets are near-duplicates where their canonical texts are equal once case, digits, punctuation, symbols and "
    "white space are removed; the one whose id sorts first is kept."
)

DIGEST_BYTES = 5
"""40 bits: among 10,000 tickets and 10,000 others one false match is to be expected in ten thousand such pairs of
files, and the digest says little about a text."""


@dataclass(frozen=True, slots=True)
class Collapsed:
    """One ticket of each kind, by rising id. `dropped` pairs a dropped id with the one kept in its place."""

    kept: tuple[ScoredTicket, ...]
    dropped: tuple[tuple[str, str], ...]
    conflicting: tuple[tuple[str, str], ...]
    """Those of `dropped` whose label differs from the kept one's: somebody should look at them."""


def collapse(tickets: Iterable[ScoredTicket]) -> Collapsed:
    """By the RULE; the order given decides nothing. Raises ValueError where an id stands twice."""
    kept: dict[str, ScoredTicket] = {}
    dropped: list[tuple[str, str]] = []
    conflicting: list[tuple[str, str]] = []
    ids: set[str] = set()
    for ticket in sorted(tickets, key=lambda t: t.id):
        if ticket.id in ids:
            raise ValueError(f"ticket id {ticket.id!r} stands twice")
        ids.add(ticket.id)
        first = kept.setdefault(letters(ticket.text), ticket)
        if first is not ticket:
            dropped.append((ticket.id, first.id))
            if first.label != ticket.label:
                conflicting.append((ticket.id, first.id))
    return Collapsed(tuple(kept.values()), tuple(dropped), tuple(conflicting))


def letters(text: str) -> str:
    """What near-duplicates have in common: letters and their marks, case folded; the text itself where it has none."""
    folded = unicodedata.normalize("NFC", text.casefold())
    return "".join(c for c in folded if unicodedata.category(c)[0] in "LM") or folded


def pack_digests(tickets: Sequence[ScoredTicket]) -> str:
    """Digests of what the tickets' texts have in common with their near-duplicates, for `unpack_digests`."""
    return base64.b64encode(b"".join(sorted(digest(ticket.text) for ticket in tickets))).decode()


def unpack_digests(packed: str) -> frozenset[bytes]:
    """Inverse of `pack_digests`. Raises ValueError."""
    data = base64.b64decode(packed, validate=True)
    return frozenset(data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES))


def digest(text: str) -> bytes:
    """Equal for near-duplicates."""
    return hashlib.sha256(letters(text).encode(errors="surrogatepass")).digest()[:DIGEST_BYTES]
