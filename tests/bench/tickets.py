"""The tickets of the benchmarks: the helpdesk's samples in a payload of about 280 bytes, numbered so that no two are
alike unless repeats are asked for."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import orjson

SURE: Mapping[str, str] = {"Invoice": " billing", "Parcel": " shipping"}
"""Words that stand in one ticket of four each, and the labels that the stub engine is sure of where it meets them: half
of all tickets route, and half go to people."""
ABOUT = ("Invoice", "Order", "Parcel", "Case")
CATEGORIES = ("billing", "login", "bug", "shipping", "refund", "account", "hardware", "feedback")
SAMPLES = Path(__file__).parents[2] / "routing_rules" / "helpdesk" / "samples" / "tickets.csv"


@cache
def _texts() -> tuple[str, ...]:
    with SAMPLES.open(encoding="utf-8", newline="") as file:
        return tuple(row["text"] for row in csv.DictReader(file))


@cache
def _long_text(characters: int) -> str:
    """One sample after the other."""
    text = " ".join(_texts())
    return (text * (characters // len(text) + 1))[:characters].strip()


def ticket_bytes(
    count: int, *, distinct: int | None = None, first: int = 0, characters: int | None = None
) -> Iterator[bytes]:
    """`distinct`: so many different texts come again and again; each ticket keeps an id of its own. `characters`: about
    so many, and no more, in each text."""
    texts = _texts()
    for number in range(first, first + count):
        which = number if distinct is None else number % distinct
        order = f" {ABOUT[which % len(ABOUT)]} {which}"
        text = texts[which % len(texts)] if characters is None else _long_text(characters - len(order))
        yield orjson.dumps(
            {
                "id": f"T-{number:09d}",
                "text": text + order,
                "tenant": f"tenant-{which % 20}",
                "channel": "email",
                "language": "en",
                "created_at": "2026-07-28T09:30:00Z",
                "metadata": {"queue": CATEGORIES[which % len(CATEGORIES)], "priority": which % 4},
            }
        )
