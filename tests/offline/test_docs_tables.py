"""docs/messages.md says what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from worker.core.envelope import (
    DEAD_LETTER_REASONS,
    RESERVED_PREFIX,
    Origin,
    dead_letter_headers,
    envelope_json_schema,
)
from worker.core.policy import REASONS
from worker.core.schemas import SCHEMAS
from worker.offline.docs_tables import TABLES, renew, renew_schemas, schema_files, with_tables

MESSAGES = Path(__file__).parents[2] / "docs/messages.md"
DOCUMENT = MESSAGES.read_text(encoding="utf-8")


def test_the_tables_are_those_that_the_code_makes() -> None:
    """Red means: run `python -c "from pathlib import Path; from worker.offline.docs_tables import renew;
    renew(Path('docs/messages.md'))"`."""
    assert with_tables(DOCUMENT) == DOCUMENT


def test_every_reason_is_in_its_table() -> None:
    assert all(f"| `{code}` |" in TABLES["reasons"]() for code in REASONS)
    assert all(f"| `{code}` |" in TABLES["dead letters"]() for code in DEAD_LETTER_REASONS)


def test_a_stale_table_is_made_anew_and_the_rest_left_alone(tmp_path: Path) -> None:
    stale = tmp_path / "messages.md"
    stale.write_text(DOCUMENT.replace("The bytes are not UTF-8.", "It is Latin-1."), encoding="utf-8")
    assert renew(stale)
    assert stale.read_text(encoding="utf-8") == DOCUMENT
    assert not renew(stale)


def test_a_document_that_lost_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="end of reasons"):
        with_tables(DOCUMENT.replace("<!-- end of reasons -->", ""))


def test_the_decision_shown_follows_the_schema() -> None:
    shown = next(text for text in re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL) if "decision_id" in text)
    decision = json.loads(shown)
    jsonschema.Draft202012Validator(envelope_json_schema()).validate(decision)
    assert set(decision) == set(envelope_json_schema()["properties"])
    assert {reason["code"] for reason in decision["reasons"]} <= set(REASONS)


def test_every_field_of_a_decision_is_explained() -> None:
    explained = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`[^|]+) \|", DOCUMENT, re.MULTILINE))))
    trivial = {"schema", "ticket_id", "tenant", "decided_at"}
    assert set(envelope_json_schema()["properties"]) - trivial <= explained


def test_the_schemas_beside_the_documents_are_those_that_the_code_makes(tmp_path: Path) -> None:
    """Red means: run `python -c "from pathlib import Path; from worker.offline.docs_tables import renew_schemas;
    renew_schemas(Path('docs/schemas'))"`."""
    folder = MESSAGES.parent / "schemas"
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == schema_files()
    renew_schemas(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.json" for name in SCHEMAS}
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema())


def test_the_headers_of_a_dead_letter_follow_their_schema() -> None:
    for again in ((), (("ticket-router-attempt", b"3"),)):
        headers = dead_letter_headers(again, Origin("t", 0, 12), "no_text", "d")
        shown = {name: (value or b"").decode() for name, value in headers}
        jsonschema.Draft202012Validator(SCHEMAS["dead_letter"]()).validate(shown)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(SCHEMAS["dead_letter"]()).validate(shown | {"ticket-router-reason": "x"})


def test_every_header_of_a_dead_letter_is_named() -> None:
    headers = dead_letter_headers((), Origin("t", 0, 0), "no_text", "d")
    for name, _ in headers:
        assert name.startswith(RESERVED_PREFIX)
        assert name in DOCUMENT or name.removeprefix("ticket-router-origin") in DOCUMENT
