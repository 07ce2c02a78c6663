"""Sending: alone knows how what is known of a ticket looks as the message that a rule set's intake reads."""

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
    message = as_ticket({**values, "id": ticket_id, "text": text}, None, rule_set)
    return Output(topic, ticket_id.encode(), message)


def as_ticket(parts: Mapping[str, str], metadata: Mapping[str, object] | None, rule_set: RuleSet) -> bytes:
    """What is known of a ticket, by the names of `intake`, as JSON in the shape that `intake` states; empty parts are
    left out. Raises ConfigError where the shape has no place for one.
    """
    pointers = rule_set.rules.intake.pointers
    document: dict[str, Any] = {}
    if metadata is not None:  # first, since it may be an object in which others have their places, or all of it
        if pointers["metadata"].parts:
            _put(document, pointers["metadata"].parts, dict(metadata), "metadata")
        else:
            document.update(metadata)
    for name, value in parts.items():
        if value:
            _put(document, pointers[name].parts, value, name)
    return orjson.dumps(document)


def _put(document: dict[str, Any], parts: list[str], value: object, name: str) -> None:
    place = document
    for part in parts[:-1]:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            break
    if not parts or not isinstance(place, dict) or parts[-1] in place:
        raise ConfigError(f"intake.{name} leaves no place for it; send with a producer of your own")
    place[parts[-1]] = value
