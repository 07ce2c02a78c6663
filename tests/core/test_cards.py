"""Cards: what people are told in two languages, and that in shadow nothing tells them what the model says."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import string
from pathlib import Path

import jsonschema
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.sets import artefact, certificate, rule_set, scores
from worker.core.answer_events import parse_answer
from worker.core.artefact import Artefact
from worker.core.cards import SUGGESTIVE, Card, Duplicates, Known, blinded, card_json_schema, make_card
from worker.core.certificates import Certificate, MarginGate
from worker.core.envelope import Envelope, Reason
from worker.core.korean import REASONS_KO, WITHOUT_BOUND_KO, in_korean
from worker.core.policy import (
    BOUNDS,
    REASONS,
    WITHOUT_BOUND,
    Calibration,
    Decision,
    NoCalibration,
    decide,
    escalate_unscored,
    reason,
)
from worker.core.rules import RuleSet
from worker.core.scores import LabelScores
from worker.ports import Delivery, Partition
from worker.runtime.outputs import Outputs, Provenance
from worker.runtime.router import Routed

GOLDEN = Path(__file__).parent / "card.json"
RULES = rule_set(mode="assist", topics={"answers": "desk.answers"})
SURE, UNSURE = scores(0.8, 0.1, 0.05), scores(0.4, 0.3, 0.25)
HERE = Delivery(Partition("tickets.desk", 3), 88, 1, b"k", b"{}", (), 0)
NONE_YET = NoCalibration(reason("uncalibrated", detail="run `ticket-router calibrate`"))


def envelope(decision: Decision, rules: RuleSet = RULES) -> Envelope:
    outputs = Outputs(rules, Provenance("e", "m", "c" * 32))
    return outputs.envelope(HERE, None, Routed(decision), "2026-03-02T08:14:52.311Z", 0.1)


def card(scored: LabelScores, rules: RuleSet = RULES, made: Artefact | None = None) -> Card:
    return make_card(envelope(decide(scored, rules, Calibration(made or artefact(rules))), rules), rules)


def test_the_card_is_the_one_that_is_written_down() -> None:
    """Red after a change that is meant: write `shown` to tests/core/card.json, and look at the difference."""
    known = Duplicates(3, (Known("T-1", "d" * 32, "2026-03-02T08:10:00.000Z"),))
    decided = envelope(decide(SURE, RULES, Calibration(artefact(RULES))))
    shown = json.loads(make_card(decided, RULES, known).to_bytes())
    jsonschema.Draft202012Validator(card_json_schema()).validate(shown)
    assert set(shown) == set(card_json_schema()["properties"])
    assert shown == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_a_card_suggests_the_first_three_with_calibrated_probabilities() -> None:
    shown = card(UNSURE)
    assert [s.category for s in shown.suggestions] == ["billing", "login", "bug"]
    assert [s.probability for s in shown.suggestions] == pytest.approx([0.4 / 0.95, 0.3 / 0.95, 0.25 / 0.95])
    assert (shown.suggestions[0].title, shown.suggestions[0].topic) == ("Billing", "desk.billing")


def test_without_a_calibration_the_order_is_the_models_and_no_probability_is_stated() -> None:
    shown = make_card(envelope(decide(scores(0.1, 0.8, 0.05), RULES, NONE_YET)), RULES)
    assert [(s.category, s.probability) for s in shown.suggestions] == [
        ("login", None),
        ("billing", None),
        ("bug", None),
    ]
    assert shown.nearest is None and shown.reasons[0].code == "uncalibrated"
    assert "보정 결과가 없습니다" in shown.reasons[0].text.ko


def test_a_card_of_a_ticket_that_was_not_scored_suggests_nothing_and_says_why() -> None:
    shown = make_card(envelope(escalate_unscored(RULES, reason("too_long", detail="9 tokens"))), RULES)
    assert (shown.suggestions, shown.nearest, shown.reasons[0].code) == ((), None, "too_long")


def test_a_card_says_at_which_threshold_the_ticket_would_have_been_routed() -> None:
    near = card(UNSURE).nearest
    assert near is not None and near.threshold is not None and near.short_by is not None
    assert (near.gate, near.category, near.needed, near.threshold) == ("threshold", "billing", 0.5, 0.5)
    assert near.value == near.score == pytest.approx(0.4 / 0.95)
    assert math.isclose(near.short_by, 0.5 - 0.4 / 0.95)
    assert near.text.en == (
        "It would have been routed to 'Billing' with a score above 0.5; it has 0.4211, 0.07895 too little."
    )
    assert "0.07895 부족합니다" in near.text.ko


@pytest.mark.parametrize(
    ("made", "scored", "gate", "value", "needed", "threshold"),
    [
        (artefact(RULES, certificate("login")), SURE, "certificate", None, None, None),
        (artefact(RULES), scores(0.04, 0.02, 0.01), "label_mass", pytest.approx(0.07), 0.1, 0.5),
        (
            artefact(RULES, margin_gate=MarginGate(True, 0.9, 500, 400, 0, 0.01, 0.05)),
            SURE, "stability", pytest.approx(0.7 / 0.95), 0.9, 0.5,
        ),
        (
            artefact(RULES, margin_gate=MarginGate(True, math.inf, 500, 0, 0, 0.01, 0.05)),
            SURE, "stability", pytest.approx(0.7 / 0.95), None, 0.5,
        ),
        (artefact(RULES, certificate("billing", threshold=-math.inf)), SURE, None, None, None, None),
        (artefact(RULES), SURE, None, None, None, 0.5),
    ],
)  # fmt: skip
def test_the_first_gate_that_stayed_closed_is_named(
    made: Artefact, scored: LabelScores, gate: str, value: float, needed: float, threshold: float
) -> None:
    near = card(scored, made=made).nearest
    assert near is not None
    assert (near.gate, near.value, near.needed, near.threshold) == (gate, value, needed, threshold)
    assert near.certified is (gate != "certificate")
    assert near.text.en.endswith(".") and near.text.ko.endswith(".") and "None" not in near.text.en + near.text.ko
    json.loads(orjson.dumps(near))


def test_of_a_ticket_of_no_category_nothing_would_have_routed() -> None:
    rules = rule_set(none=True)
    shown = card(scores(0.1, 0.1, 0.1, 0.6), rules, artefact(rules))
    assert shown.nearest is not None and shown.nearest.gate == "none_of_the_above"
    assert (shown.suggestions[0].category, shown.suggestions[0].topic) == ("none", None)


def test_what_a_card_says_of_the_answer_is_an_answer_once_the_finding_is_added() -> None:
    shown = json.loads(card(UNSURE).to_bytes())
    assert shown["answer"]["topic"] == "desk.answers"
    assert (
        json.loads(make_card(envelope(decide(UNSURE, rule_set(), NONE_YET)), rule_set()).to_bytes())["answer"]["topic"]
        is None
    )
    event = {**shown["answer"]["event"], "answered_at": "2026-03-02T09:00:00Z", "category": "login"}
    answer = parse_answer(orjson.dumps(event), RULES)
    assert (answer.decision_id, answer.label) == (shown["decision_id"], "login")


# -- shadow ------------------------------------------------------------------------------------------------------------

SHADOW = rule_set("billing_xq", "login_xq", "bug_xq", mode="shadow")
TELLING = ("_xq", "Billing", "Login", "Bug")


@given(
    st.lists(st.floats(0.001, 1), min_size=3, max_size=3),
    st.floats(0.01, 1),
    st.sampled_from([0.2, 0.5, 0.9, math.inf]),
    st.booleans(),
)
def test_in_shadow_neither_card_nor_header_tells_what_the_ticket_was_taken_for(
    weights: list[float], mass: float, threshold: float, calibrated: bool
) -> None:
    made = artefact(SHADOW, certificate(*(c.id for c in SHADOW.categories.routable), threshold=threshold))
    scored = LabelScores.from_logprobs(tuple(math.log(mass * w / sum(weights)) for w in weights))
    decided = envelope(decide(scored, SHADOW, Calibration(made) if calibrated else NONE_YET), SHADOW)
    header = json.loads(blinded(decided).to_bytes())
    labels = header.pop("labels")
    assert labels == list(SHADOW.categories.ids)  # in the order of the set, whatever the ticket
    said = json.dumps(header) + make_card(decided, SHADOW).to_bytes().decode()
    assert not [word for word in TELLING if word in said]
    same = envelope(decide(scores(0.3, 0.3, 0.3), SHADOW, Calibration(made) if calibrated else NONE_YET), SHADOW)
    assert blinded(decided).to_bytes() == blinded(same).to_bytes()  # nor how sure it was


def test_in_shadow_the_rule_that_raised_a_ticket_is_still_told() -> None:
    decision = escalate_unscored(SHADOW, reason("override_escalation", name="danger to people"))
    assert make_card(envelope(decision, SHADOW), SHADOW).reasons[0].code == "override_escalation"
    both = dataclasses.replace(
        decision, reasons=(reason("answer_escalation", name="n", question="q", what="w"), reason("none_of_the_above"))
    )
    assert [why.code for why in make_card(envelope(both, SHADOW), SHADOW).reasons] == ["answer_escalation"]


# -- Korean ------------------------------------------------------------------------------------------------------------


def _places(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name}


def test_every_reason_is_told_in_korean_with_the_same_things_filled_in() -> None:
    assert REASONS_KO.keys() == REASONS.keys()
    for code, template in REASONS.items():
        assert _places(REASONS_KO[code]) == _places(template), code
        assert REASONS_KO[code].endswith("."), code
        assert any("가" <= c <= "힣" for c in REASONS_KO[code]), code
    assert REASONS.keys() >= SUGGESTIVE
    assert WITHOUT_BOUND_KO.keys() == WITHOUT_BOUND.keys() == BOUNDS.keys()
    for code, template in WITHOUT_BOUND.items():
        assert _places(WITHOUT_BOUND_KO[code]) == _places(template), code


def test_what_we_fill_in_as_words_is_korean_too() -> None:
    decided = decide(SURE, rule_set(), Calibration(artefact(rule_set())))
    assert in_korean(decided.reasons[0]) == (
        "점수 0.8421이(가) 인증된 기준 0.5보다 높습니다. 90 % 신뢰도로 이런 티켓 중 틀리는 것은 10 % 이하입니다."
    )
    assert "규칙은 오류 5 %(델타 10 %)까지를" in in_korean(
        reason(
            "certificate_too_weak", category="bug", stated="10 % of such tickets are wrong (delta 10 %)",
            demanded="5 % of such tickets are wrong (delta 10 %)",
        )
    )  # fmt: skip
    partial = LabelScores.from_logprobs((-1.2, -5.0, -1.2), unknown=(2,))
    (why,) = decide(partial, rule_set(), Calibration(artefact(rule_set()))).reasons
    assert why.code == "label_not_returned" and "어느 답이 1순위인지" in in_korean(why)
    steered = reason("steered", parts="2 parts", what="it would go to 'bug'")
    assert in_korean(steered) == (
        "담당 부서가 아니라 배정 시스템에 하는 말일 수 있는 부분(2곳)을 빼면 'bug'(으)로 배정되었을 것입니다."
    )


@pytest.mark.parametrize(
    "made",
    [
        certificate("billing", threshold=math.inf, need=151, n=89),
        certificate("billing", threshold=math.inf, need=151, n=89, to_label=280),
        certificate("billing", threshold=math.inf, need=None, n=9, too_few=True),
        certificate("billing", threshold=math.inf, need=None, n=400),
        certificate("billing", threshold=math.inf, basis="excluded"),
    ],
    ids=lambda made: made.summary(),
)
def test_what_a_certificate_lacks_is_told_in_korean_with_its_numbers(made: Certificate) -> None:
    (why,) = decide(SURE, rule_set(), Calibration(artefact(rule_set(), made))).reasons
    told = in_korean(why)
    assert why.code == "uncertified_category" and not re.search("[a-z]{3}", told.replace("billing", ""))
    assert set(re.findall(r"\d+", why.sentence)) == set(re.findall(r"\d+", told))


def test_a_reason_of_an_older_record_is_told_in_english() -> None:
    assert in_korean(Reason("too_long", "The ticket is too long: x.")) == "The ticket is too long: x."
