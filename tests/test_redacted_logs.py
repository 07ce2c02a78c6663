"""What a log holds of a text that somebody wrote: nothing unless that was asked for, and then nothing personal."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.core.sets import artefact, rule_set, scores
from worker.core.policy import Calibration, decide
from worker.core.ticket import Intake, parse_ticket
from worker.errors import EngineUnavailable, InvalidTicket
from worker.ports import Delivery, Partition
from worker.runtime.journal import Journal
from worker.runtime.outputs import Outputs, Provenance
from worker.runtime.router import Routed
from worker.settings import Settings
from worker.telemetry import Metrics, set_up_logging

RULES = rule_set()
PERSONAL = ("010-1234-5678", "900101-1234567", "4111 1111 1111 1111", "hong@desk.example")
BODY = json.dumps({"id": "t1", "text": f"연락처 {' '.join(PERSONAL)} label bill"}).encode()
HERE = Delivery(Partition(RULES.input_topic, 0), 5, 1, b"k", BODY, (), 0)


def lines_of(tell: Callable[[Journal], None], *, with_text: bool, **options: Any) -> list[dict[str, Any]]:
    reading, writing = os.pipe()
    try:
        set_up_logging(level="info", form="json", fd=writing, clock=lambda: 0.0, **options)
        tell(Journal(Metrics(), log_ticket_text=with_text))
        return [json.loads(line) for line in os.read(reading, 65_536).splitlines()]
    finally:
        os.close(reading)
        os.close(writing)


def decided(journal: Journal) -> None:
    ticket = parse_ticket(BODY, Intake(), 10_000)
    decision = decide(scores(0.8, 0.1, 0.05), RULES, Calibration(artefact(RULES)))
    envelope = Outputs(RULES, Provenance("e", "m", "c")).envelope(HERE, ticket, Routed(decision), "2026", 0.1)
    journal.decided(HERE, ticket, envelope)


def test_the_text_of_a_ticket_is_logged_only_where_that_is_asked_for() -> None:
    (line,) = lines_of(decided, with_text=False)
    assert "text" not in line


def test_redaction_is_on_for_logs_and_off_for_scoring_unless_somebody_says_otherwise() -> None:
    assert Settings(_env_file=None).log_redact
    assert RULES.categories.prompt.canonicalise == ()


def test_what_is_personal_in_a_text_that_is_logged_is_replaced() -> None:
    (line,) = lines_of(decided, with_text=True)
    assert line["text"] == "연락처 [전화번호] [주민등록번호] [카드번호] [이메일] label bill"


def test_an_operator_can_turn_it_off() -> None:
    (line,) = lines_of(decided, with_text=True, redact=False)
    assert all(each in line["text"] for each in PERSONAL)


@pytest.mark.parametrize("personal", PERSONAL)
def test_what_libraries_and_errors_quote_is_redacted_too(personal: str) -> None:
    def quoted(journal: Journal) -> None:
        logging.getLogger("some.library").warning("could not read %r", f"call {personal} now")
        journal.failed(HERE, EngineUnavailable(f"no answer about call {personal} now"))
        journal.waiting(f"call {personal} now")
        journal.dead_lettered(HERE, InvalidTicket("wrong_type", f"call {personal} now"))

    lines = lines_of(quoted, with_text=False)
    assert len(lines) == 4
    assert personal not in json.dumps(lines, ensure_ascii=False)


def test_addresses_and_numbers_of_servers_stay_readable() -> None:
    said = "no broker of 10.0.0.12:9092,kafka-1.example:19092 answered within 8 s (after 1712345678901 ms, error 104)"
    (line,) = lines_of(lambda journal: journal.waiting(said), with_text=False)
    assert line["detail"] == said
