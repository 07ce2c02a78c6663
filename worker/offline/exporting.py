"""Exporting: what one line of an exported topic is: decisions and answers as they are, tickets as texts to label."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import orjson

from worker.adapters.topic_log import Record
from worker.core.envelope import DECISION_HEADER
from worker.core.rules import RuleSet
from worker.core.ticket import parse_ticket
from worker.errors import ConfigError, InvalidTicket

Exported = Literal["decisions", "tickets", "answers"]
Line = Callable[[Record], bytes | None]


def lines_of(what: Exported, rule_set: RuleSet, max_ticket_bytes: int) -> tuple[tuple[str, ...], Line]:
    """The topics to read, and what makes a line of each record; None of those that are left out. Raises ConfigError."""
    if what == "decisions":
        return (rule_set.decisions_topic,), lambda record: record.value
    if what == "answers":
        if rule_set.rules.topics.answers is None:
            raise ConfigError(f"rule set '{rule_set.id}' names no topic of answers: state topics.answers in rules.yaml")
        return (rule_set.rules.topics.answers,), _one_line
    return rule_set.people_topics, lambda record: _ticket(record, rule_set, max_ticket_bytes)


def _one_line(record: Record) -> bytes | None:
    """An answer as it is. White space between its parts may hold line ends, and means nothing in JSON."""
    return None if record.value is None else record.value.replace(b"\r", b" ").replace(b"\n", b" ")


def _ticket(record: Record, rule_set: RuleSet, max_ticket_bytes: int) -> bytes | None:
    """Id, decision and the text that was scored. None for what holds no decision of ours."""
    rules = rule_set.rules
    try:
        decision = orjson.loads(dict(record.headers).get(DECISION_HEADER) or b"")
        ticket = parse_ticket(record.value, rules.intake, max_ticket_bytes, rule_set.categories.prompt.canonicalise)
        ids = {"id": decision["ticket_id"], "decision_id": decision["decision_id"]}
    except (InvalidTicket, ValueError, TypeError, KeyError):
        return None
    return orjson.dumps({**ids, "text": ticket.scored_text, "language": ticket.language})
