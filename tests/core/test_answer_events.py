"""Answer events: what a person found, or nothing."""

from __future__ import annotations

from typing import Any

import jsonschema
import orjson
import pytest

from tests.core.sets import rule_set
from worker.core.answer_events import answer_json_schema, parse_answer

RULES = rule_set()
GOOD: dict[str, Any] = {
    "schema": "ticket-router/answer/1",
    "decision_id": "0" * 32,
    "ticket_id": "T-1",
    "origin": {"topic": "tickets.desk", "partition": 0, "offset": 7},
    "answered_at": "2026-03-02T09:00:00+09:00",
    "by": "agent-7",
    "category": "login",
}


@pytest.mark.parametrize(
    ("change", "label"),
    [
        ({}, "login"),
        ({"category": "none"}, "none"),
        ({"category": None, "not_a_ticket": True}, "none"),
        ({"category": None, "duplicate_of": "T-0"}, None),
        ({"by": None, "note": "두 번 왔음", "ticket_id": None, "origin": None}, "login"),
        ({"colour_of_the_desk": "blue"}, "login"),
    ],
)
def test_an_answer_says_which_category_or_that_there_is_none(change: dict[str, Any], label: str | None) -> None:
    body = GOOD | change
    jsonschema.Draft202012Validator(answer_json_schema(RULES)).validate(body)
    assert parse_answer(orjson.dumps(body), RULES).label == label


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"category": "logout"}, "'logout' is no category of 'desk'"),
        ({"category": None}, "state one of category, not_a_ticket, duplicate_of, not none of them"),
        ({"not_a_ticket": True}, "category and not_a_ticket"),
        ({"category": None, "not_a_ticket": False}, "not_a_ticket"),
        ({"answered_at": "2026-03-02T09:00:00"}, "answered_at"),
        ({"answered_at": "yesterday"}, "answered_at"),
        ({"decision_id": "T-1"}, "decision_id"),
        ({"decision_id": None}, "decision_id"),
        ({"schema": "ticket-router/answer/2"}, "schema"),
        ({"origin": {"topic": "t", "partition": "0", "offset": 1}}, "origin.partition"),
        ({"note": "x" * 10_001}, "note"),
    ],
)
def test_what_is_no_answer_is_refused_with_the_field_and_by_the_schema(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match="(?i)" + problem.split(",")[0]):
        parse_answer(orjson.dumps(GOOD | change), RULES)
    if "answered_at" not in change:  # formats are not asserted by default
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(answer_json_schema(RULES)).validate(GOOD | change)


@pytest.mark.parametrize("value", [b"", b"[]", b"null", b'{"schema": 1, "schema": 2}', b"\xff", b"{" * 2000])
def test_bytes_that_are_no_object_are_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="_"):
        parse_answer(value, RULES)
