"""Forgeries: what a message says of itself under our names is replaced, and a rule set can run nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.sets import artefact, rule_set, scores
from worker.adapters.files import load_rule_set
from worker.core.envelope import DECISION_HEADER, RESERVED_PREFIX
from worker.core.policy import Calibration, decide
from worker.core.ticket import Intake, parse_ticket
from worker.errors import ConfigError, InvalidTicket
from worker.ports import Delivery, Partition
from worker.runtime.outputs import Outputs, Provenance
from worker.runtime.router import Routed
from worker.settings import Settings
from worker.wiring import kafka_config

RULES = rule_set()
BODY = b'{"id": "t1", "text": "label bill"}'
FORGED = (
    (DECISION_HEADER, b'{"action": "route", "category": "forged"}'),
    ("ticket-router-reason", b"forged"),
    ("ticket-router-attempt", b"forged"),
    ("ticket-router-something-new", b"forged"),
    ("x-own", b"kept"),
)
HERE = Delivery(Partition(RULES.input_topic, 0), 5, 1, b"k", BODY, FORGED, 0)


def test_a_decision_that_comes_with_a_ticket_is_replaced_by_ours() -> None:
    outputs = Outputs(RULES, Provenance("e", "m", "c"))
    decision = decide(scores(0.8, 0.1, 0.05), RULES, Calibration(artefact(RULES)))
    ticket = parse_ticket(BODY, Intake(), 10_000)
    envelope = outputs.envelope(HERE, ticket, Routed(decision), "2026-01-01T00:00:00.000Z", 0.1)
    made = [*outputs.decided(HERE, envelope), *outputs.dead_letter(HERE, InvalidTicket("no_text", "x"))]
    for output in made:
        names = [name for name, _ in output.headers if name.startswith(RESERVED_PREFIX)]
        assert len(names) == len(set(names))
        assert b"forged" not in b" ".join(value or b"" for _, value in output.headers)
    assert all(("x-own", b"kept") in output.headers for output in made if output.value == BODY)


def test_a_worker_that_would_read_its_own_outputs_is_refused() -> None:
    """Every ticket would go round for ever."""
    for topic in RULES.output_topics:
        settings = Settings(_env_file=None, kafka_bootstrap_servers="127.0.0.1:1", kafka_input_topic=topic)
        with pytest.raises(ConfigError, match="round for ever"):
            kafka_config(settings, RULES)


@pytest.mark.parametrize(
    "line",
    [
        "version: !!python/object/apply:os.system ['touch pwned']",
        "version: !!python/name:os.system",
        "version: !include /etc/passwd",
        "version: &a [*a]",
        "version: ${ROUTER_CACHE_SECRET}",
        "version: {{ 7 * 7 }}",
    ],
)
def test_a_rule_set_file_runs_reads_and_expands_nothing(line: str, tmp_path: Path) -> None:
    (tmp_path / "categories.yaml").write_text(line + "\nid: x\n", encoding="utf-8")
    (tmp_path / "rules.yaml").write_text("version: 1\nalpha: 0.1\ndelta: 0.1\n", encoding="utf-8")
    with pytest.raises(ConfigError):
        load_rule_set(tmp_path)
    assert not Path("pwned").exists()
    assert not (tmp_path / "pwned").exists()
