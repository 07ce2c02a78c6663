"""Where a ticket first came in is believed only where it can be true; a decision says what was not returned."""

from __future__ import annotations

import json

import jsonschema
import pytest

from tests.core.sets import artefact, rule_set
from worker.core.envelope import DecisionIds, Headers, Origin, decision_id, envelope_json_schema, origin_headers
from worker.core.policy import Calibration, decide
from worker.core.scores import LabelScores
from worker.ports import Delivery, Partition
from worker.runtime.outputs import Outputs, Provenance, origin_in
from worker.runtime.router import Routed

HERE = Partition("tickets", 2)


def test_a_ticket_that_was_sent_in_again_keeps_its_origin() -> None:
    assert origin_in(origin_headers(Origin("tickets", 2, 7)), HERE, 90) == Origin("tickets", 2, 7)


@pytest.mark.parametrize(
    "headers",
    [
        (),
        origin_headers(Origin("elsewhere", 2, 7)),
        origin_headers(Origin("tickets", 1, 7)),
        origin_headers(Origin("tickets", 2, 90)),
        origin_headers(Origin("tickets", 2, 91)),
        origin_headers(Origin("tickets", 2, -7)),
        origin_headers(Origin("tickets", 2, 7))[:2],
        (*origin_headers(Origin("tickets", 2, 7))[:2], ("ticket-router-origin-offset", None)),
    ],
)
def test_an_origin_that_is_not_an_earlier_message_of_the_partition_is_not_believed(headers: Headers) -> None:
    assert origin_in(headers, HERE, 90) == Origin("tickets", 2, 90)


def test_labels_that_were_not_returned_are_null_in_the_decision_and_bounded() -> None:
    rules = rule_set()
    partial = LabelScores.from_logprobs((-0.25, -5.0, -5.0), unknown=(1, 2))
    outputs = Outputs(rules, Provenance("openai_compat", "m", None))
    delivery = Delivery(HERE, 7, 1, None, b"{}", (), -1)
    decided = decide(partial, rules, Calibration(artefact(rules)))
    record = json.loads(outputs.envelope(delivery, None, Routed(decided), "2026-01-01T00:00:00Z", 0.1).to_bytes())
    assert (record["label_scores"], record["label_scores_bound"]) == ([-0.25, None, None], -5.0)
    assert record["label_mass"] == pytest.approx(0.7788, abs=1e-4)
    jsonschema.Draft202012Validator(envelope_json_schema()).validate(record)


@pytest.mark.parametrize("calibration", [None, "a" * 32])
def test_what_is_hashed_once_for_all_tickets_changes_no_decision_id(calibration: str | None) -> None:
    ids = DecisionIds("desk/1/abc", calibration)
    for origin in (Origin("tickets", 2, 7), Origin("tickets", 2, 8), Origin("others", 0, 7), Origin("tickets", 2, 7)):
        assert ids(origin) == decision_id(origin, "desk/1/abc", calibration)
