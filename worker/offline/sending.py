"""Sending: alone knows how a row of a file of tickets looks as the message that a rule set's intake reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from worker.core.rules import RuleSet
from worker.errors import ConfigError
from worker.ports import Output

COLUMNS = ("id", "language", "tenant", "channel", "created_at")
"""Of a row, besides its text. A label stays behind: the worker has to find it."""


def as_message(row: Mapping[str, str], number: int, rule_set: RuleSet, topic: str) -> Output | None:
    """The row as JSON in the shape that `intake` states, keyed by its id; None where it has no text.

    A row without an id is known as `row-<number>`. Raises ConfigError where the shape has no place for the text.
    """
    text = (row.get("text") or "").strip()
    if not text:
        return None
    ticket_id = (row.get("id") or "").strip() or f"row-{number}"
    values = {name: (row.get(name) or "").strip() for name in COLUMNS}
    document: dict[str, Any] = {}
    for name, value in ({**values, "id": ticket_id, "text": text}).items():
        if value:
            _put(document, rule_set.rules.intake.pointers[name].parts, value, name)
    return Output(topic, ticket_id.encode(), orjson.dumps(document))


def _put(document: dict[str, Any], parts: list[str], value: str, name: str) -> None:
    place = document
    for part in parts[:-1]:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            break
    if not parts or not isinstance(place, dict) or parts[-1] in place:
        raise ConfigError(f"intake.{name} leaves no place for it; send with a producer of your own")
    place[parts[-1]] = value
