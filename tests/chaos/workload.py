"""The tickets of a run: what is sent, and where each may end. Every value is unique, which is what tells them apart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import orjson

from tests.integration.desk import LABELS

Fate = Literal["routed", "escalated", "dead_lettered"]

POISON = "arsenic"
"""The engine closes the connection on which a ticket with this word comes."""
REFUSED = "unspeakable"
"""The engine answers 400 to it."""

KEYS = 60


@dataclass(frozen=True, slots=True)
class Sent:
    key: bytes
    value: bytes
    category: str | None
    """Where it is routed unless it is escalated; None where it cannot be routed."""
    ticket: bool
    """False: bytes that are no ticket."""


def tickets(seed: int, count: int) -> Iterator[Sent]:
    """Of a thousand about two kill their connection, eight are refused by the engine, and twenty are no tickets. A
    quarter of the texts repeat an earlier one."""
    chance = random.Random(f"{seed}/tickets")
    for number in range(count):
        key = b"key-%d" % chance.randrange(KEYS)
        draw = chance.random()
        if draw < 0.02:
            yield Sent(key, _no_ticket(number, chance), None, False)
            continue
        label = chance.choice(LABELS)
        story = number if chance.random() < 0.75 else chance.randrange(number + 1)
        text = f"story {story % 1000} of {story // 1000}: trouble with {label}"
        if draw < 0.022:
            text = f"{text}, {POISON} and {number}"
        elif draw < 0.03:
            text = f"{text}, {REFUSED} and {number}"
        body = orjson.dumps({"id": f"t{number}", "text": text})
        yield Sent(key, body, label if draw >= 0.03 else None, True)


def _no_ticket(number: int, chance: random.Random) -> bytes:
    return chance.choice(
        (
            b"number %d is no JSON" % number,
            b'["number %d is a list"]' % number,
            b'{"id": "t%d"}' % number,
            b'{"id": "t%d", "text": "\xc3\x28"}' % number,
            b'{"id": "t%d", "text": "cut' % number,
        )
    )
