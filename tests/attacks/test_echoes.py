"""Echoes: what an author writes comes out in headers, logs and metrics as data, never as a line of its own.

Reports are looked at in tests/offline/test_report.py.
"""

from __future__ import annotations

import json
import os
import re

import pytest

from tests.core.sets import artefact, rule_set, scores
from worker.core.policy import Calibration, decide
from worker.core.ticket import Intake, parse_ticket
from worker.errors import InvalidTicket
from worker.ports import Delivery, Partition
from worker.runtime.journal import Journal
from worker.runtime.outputs import Outputs, Provenance
from worker.runtime.router import Routed
from worker.telemetry import Metrics, set_up_logging

RULES = rule_set()
NASTY = "\x1b[31mred\r\nSet-Cookie: a=b\n\u2028<script>alert(1)</script>{{7*7}}[bold]\u202e\x00\x9b1m"
BODY = json.dumps(
    {"id": NASTY, "text": f"label {NASTY} bill", "tenant": NASTY, "channel": NASTY, "language": NASTY}
).encode()
HERE = Delivery(Partition(RULES.input_topic, 0), 5, 1, b"k", BODY, (("x", NASTY.encode()),), 0)
CONTROL = re.compile(rb"[\x00-\x1f\x7f]")


def test_headers_and_records_of_ours_hold_no_character_that_ends_a_line() -> None:
    ticket = parse_ticket(BODY, Intake(), 10_000)
    decision = decide(scores(0.8, 0.1, 0.05), RULES, Calibration(artefact(RULES)))
    outputs = Outputs(RULES, Provenance("e", "m", "c"))
    envelope = outputs.envelope(HERE, ticket, Routed(decision), "2026-01-01T00:00:00.000Z", 0.1)
    for output in outputs.decided(HERE, envelope):
        ours = [value for name, value in output.headers if name.startswith("ticket-router-") and value is not None]
        assert not any(CONTROL.search(value) for value in ours)
    assert json.loads(envelope.to_bytes())["tenant"] == NASTY  # as data, whole
    for _, value in outputs.dead_letter(HERE, InvalidTicket("no_text", "x"))[0].headers[1:]:
        assert value is not None
        assert not CONTROL.search(value)


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("with_text", [False, True])
def test_a_decision_is_one_line_of_the_log_that_no_terminal_obeys(form: str, with_text: bool) -> None:
    ticket = parse_ticket(BODY, Intake(), 10_000)
    decision = decide(scores(0.8, 0.1, 0.05), RULES, Calibration(artefact(RULES)))
    envelope = Outputs(RULES, Provenance("e", "m", "c")).envelope(HERE, ticket, Routed(decision), "2026", 0.1)
    reading, writing = os.pipe()
    try:
        set_up_logging(level="info", form=form, fd=writing, clock=lambda: 0.0)  # type: ignore[arg-type]
        journal = Journal(Metrics(), log_ticket_text=with_text)
        journal.decided(HERE, ticket, envelope)
        journal.dead_lettered(HERE, InvalidTicket("wrong_type", NASTY))
        written = os.read(reading, 65_536)
    finally:
        os.close(reading)
        os.close(writing)
    lines = written.splitlines()
    assert len(lines) == 2
    assert not any(CONTROL.search(line) for line in lines)
    assert (b"script" in written) is with_text


def test_a_source_in_metrics_is_one_line_of_printable_characters() -> None:
    metrics = Metrics()
    ticket = parse_ticket(BODY, Intake(), 10_000)
    Journal(metrics, log_ticket_text=False).checked(ticket, "steered")
    (line,) = [line for line in metrics.prometheus().split("\n") if line.startswith("ticket_router_steering_total{")]
    assert line.isprintable()
    assert line.count('outcome="steered"') == 1
