"""The evaluator: nothing routes but inside a certificate, and every decision says why."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.sets import PRINTS, artefact, certificate, rule_set, scores
from worker.core.artefact import Artefact
from worker.core.certificates import Certificate, MarginGate
from worker.core.korean import in_korean
from worker.core.policy import (
    REASONS,
    Calibration,
    NoCalibration,
    calibration_in_force,
    decide,
    decide_override,
    escalate_unscored,
    reason,
)
from worker.core.scores import LabelScores
from worker.core.ticket import Ticket
from worker.errors import ArtefactError

RULES = rule_set()
SURE = scores(0.8, 0.1, 0.05)


def code(label_scores: LabelScores, made: Artefact, rules: object = RULES) -> str:
    decision = decide(label_scores, rules, Calibration(made))  # type: ignore[arg-type]
    (why,) = decision.reasons
    assert (decision.action == "route") is (why.code == "certified")
    return why.code


def test_a_score_above_the_certified_threshold_routes_to_the_categorys_topic() -> None:
    decision = decide(SURE, RULES, Calibration(artefact(RULES)))
    assert (decision.action, decision.topic, decision.category) == ("route", "desk.billing", "billing")
    assert decision.reasons[0].code == "certified"
    assert "at most 10 % of such tickets are wrong, with 90 % confidence" in decision.reasons[0].sentence
    assert decision.top[0].category == "billing"
    assert math.isclose(decision.top[0].probability, 0.8 / 0.95)


def test_where_a_whole_category_is_certified_no_infinite_threshold_is_told() -> None:
    made = artefact(RULES, certificate("billing", threshold=-math.inf))
    (why,) = decide(SURE, RULES, Calibration(made)).reasons
    assert why.code == "certified" and why.sentence == (
        "Every ticket predicted as 'billing' is certified, whatever its score (0.8421 here): at most 10 % of such "
        "tickets are wrong, with 90 % confidence."
    )
    assert "threshold" not in why.values and why.values["score"] == "0.8421"
    assert in_korean(why) == (
        "'billing'(으)로 예측된 티켓은 점수와 관계없이(이 티켓: 0.8421) 모두 인증되었습니다. "
        "90 % 신뢰도로 이런 티켓 중 틀리는 것은 10 % 이하입니다."
    )
    assert made.certificates[0].summary().endswith("whatever the score: every ticket predicted as it")


def test_a_gate_that_no_margin_passes_tells_no_infinite_margin() -> None:
    gate = MarginGate(measured=True, m_star=math.inf, n=600, m=0, k=0, phi=0.01, delta=0.05)
    (why,) = decide(SURE, RULES, Calibration(artefact(RULES, margin_gate=gate))).reasons
    assert why.code == "inside_flip_band" and "gate" not in why.values
    for told in (why.sentence, in_korean(why), gate.summary()):
        assert "inf" not in told
    assert why.sentence.endswith("may change its mind at any distance when asked again.")


def test_a_score_equal_to_the_threshold_escalates() -> None:
    exact = artefact(RULES).calibrator.apply_one(SURE.logprobs)[0]
    assert code(SURE, artefact(RULES, certificate("billing", threshold=exact))) == "below_threshold"
    assert code(SURE, artefact(RULES, certificate("billing", threshold=math.nextafter(exact, 0)))) == "certified"


def test_without_an_artefact_the_surest_score_escalates() -> None:
    state = calibration_in_force(None, PRINTS)
    decision = decide(scores(0.999998, 1e-6, 1e-6), RULES, state)
    assert (decision.action, decision.topic, decision.reasons[0].code) == ("escalate", "desk.human", "uncalibrated")
    assert decision.probability is None


@pytest.mark.parametrize("changed", ["model", "tokenizer", "prompt", "labels", "categories", "normaliser"])
def test_any_other_fingerprint_voids_the_calibration_and_is_named(changed: str) -> None:
    now = PRINTS.model_copy(update={changed: "other"})
    state = calibration_in_force(artefact(RULES), now)
    assert isinstance(state, NoCalibration)
    assert state.reason.code == "fingerprint_changed"
    assert changed in state.reason.sentence
    assert decide(SURE, RULES, state).action == "escalate"


def test_low_label_mass_escalates_however_sure_the_share() -> None:
    assert code(LabelScores.from_logprobs((-3.0, -9.0, -9.0)), artefact(RULES)) == "low_label_mass"


def test_the_artefacts_mass_floor_holds_where_the_rules_were_loosened_afterwards() -> None:
    loose = rule_set(gates={"min_label_mass": 0.0})
    assert code(LabelScores.from_logprobs((-3.0, -9.0, -9.0)), artefact(loose), loose) == "low_label_mass"


def test_predicting_none_escalates() -> None:
    rules = rule_set(none=True)
    assert code(scores(0.1, 0.1, 0.1, 0.6), artefact(rules), rules) == "none_of_the_above"


def test_a_category_without_certificate_escalates() -> None:
    assert code(SURE, artefact(RULES, certificate("login", "bug"))) == "uncertified_category"
    refused = certificate("billing", threshold=math.inf, n=37, m=0, k=0, need=59)
    decision = decide(SURE, RULES, Calibration(artefact(RULES, refused)))
    assert decision.reasons[0].code == "uncertified_category"
    assert "n=37, need 59" in decision.reasons[0].sentence


def test_a_certificate_weaker_than_the_rules_demand_counts_as_none() -> None:
    stricter = rule_set(categories={"billing": {"alpha": 0.05}})
    assert code(SURE, artefact(stricter), stricter) == "certificate_too_weak"
    assert code(scores(0.1, 0.8, 0.05), artefact(stricter), stricter) == "certified"
    assert code(SURE, artefact(rule_set(delta=0.05)), rule_set(delta=0.05)) == "certificate_too_weak"


def test_the_looser_target_routes_only_where_the_rules_ask_for_no_more() -> None:
    per_ticket = certificate("billing", procedure="misroutes_per_ticket")
    assert code(SURE, artefact(RULES, per_ticket)) == "certificate_too_weak"
    loose = rule_set(target="misroutes_per_ticket")
    decision = decide(SURE, loose, Calibration(artefact(loose, per_ticket)))
    assert "at most 10 % of all tickets are misrouted" in decision.reasons[0].sentence
    assert code(SURE, artefact(loose), loose) == "certified"


def test_the_raw_form_compares_the_margin_of_the_raw_scores() -> None:
    made = artefact(RULES, certificate("billing", "login", "bug", threshold=2.0, score="raw_margin"), form="raw_margin")
    assert code(scores(0.8, 0.1, 0.05), made) == "certified"  # ln 8 = 2.08
    assert code(scores(0.7, 0.1, 0.05), made) == "below_threshold"  # ln 7 = 1.95


def test_scores_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 scores for 3"):
        decide(scores(0.5, 0.5), RULES, Calibration(artefact(RULES)))


@given(st.lists(st.floats(-50, 0), min_size=3, max_size=3), st.floats(0, 1))
def test_no_scores_route_unless_every_gate_is_open(logprobs: list[float], threshold: float) -> None:
    if math.fsum(map(math.exp, logprobs)) > 1:
        logprobs = [value - math.log(3) for value in logprobs]
    made = artefact(RULES, certificate("billing", threshold=threshold))
    given_scores = LabelScores.from_logprobs(tuple(logprobs))
    decision = decide(given_scores, RULES, Calibration(made))
    if decision.action == "route":
        probabilities = made.calibrator.apply_one(logprobs)
        assert decision.category == "billing"
        assert probabilities[0] == max(probabilities) > threshold
        assert given_scores.mass >= 0.1
    else:
        assert decision.topic == "desk.human"


def test_overrides_decide_before_any_score() -> None:
    rules = rule_set(
        overrides=[
            {"kind": "keyword", "name": "safety", "any": ["gas leak", "불이야"], "whole_word": False},
            {"kind": "field", "name": "vip", "pointer": "/vip", "equals": True, "then": "escalate"},
            {
                "kind": "field",
                "name": "monitoring",
                "pointer": "/channel",
                "equals": "alerts",
                "then": "route",
                "category": "bug",
            },
            {"kind": "language", "name": "french", "any": ["fr"], "then": "escalate"},
        ]
    )

    def of(text: str = "hello", **fields: object) -> object:
        return decide_override(Ticket(id="1", text=text, **fields), rules)  # type: ignore[arg-type]

    assert of() is None
    assert of("I smell a GAS LEAK!").reasons[0].code == "override_escalation"  # type: ignore[attr-defined]
    assert of("빨리요 불이야불이야").topic == "desk.human"  # type: ignore[attr-defined]
    assert of(metadata={"vip": True}).action == "escalate"  # type: ignore[attr-defined]
    assert of(metadata={"vip": 1}) is None
    assert of(channel="alerts").topic == "desk.bug"  # type: ignore[attr-defined]
    assert of(channel="alerts").reasons[0].code == "override"  # type: ignore[attr-defined]
    assert of(language="fr").action == "escalate"  # type: ignore[attr-defined]


def test_whole_words_only_unless_told_otherwise() -> None:
    rules = rule_set(overrides=[{"kind": "keyword", "name": "fire", "any": ["fire"]}])
    assert decide_override(Ticket(id=None, text="fired from my job"), rules) is None
    assert decide_override(Ticket(id=None, text="Fire!"), rules) is not None


def test_every_reason_has_a_sentence_that_can_be_filled() -> None:
    class Anything(dict[str, str]):
        def __missing__(self, key: str) -> str:
            return f"<{key}>"

    for name, template in REASONS.items():
        assert template.format_map(Anything()).endswith("."), name
    with pytest.raises(KeyError):
        reason("no_such_code")


def test_unscored_tickets_go_to_people() -> None:
    decision = escalate_unscored(RULES, reason("too_long", detail="9 tokens"))
    assert (decision.action, decision.topic, decision.category) == ("escalate", "desk.human", None)


def test_an_artefact_survives_its_file_and_an_edit_is_noticed() -> None:
    made = artefact(RULES, certificate("billing", threshold=-math.inf), certificate("login", threshold=0.3))
    data = made.to_bytes()
    assert Artefact.from_bytes(data, "calibration.json") == made
    short = certificate("billing", threshold=math.inf, need=151, n=89, m=0, k=0, to_label=280)
    few = certificate("billing", threshold=math.inf, need=None, n=9, m=0, k=0, too_few=True)
    for each in (short, few):
        assert Certificate.from_dict(each.to_dict()) == each
    # Or the digests of older files would not fit.
    assert {"to_label", "too_few"}.isdisjoint(made.certificates[0].to_dict())
    with pytest.raises(ArtefactError, match="edited"):
        Artefact.from_bytes(data.replace(b'"lambda": 0.3', b'"lambda": 0.2'), "calibration.json")
    for broken in (b"", b"{", b"[]", b"{}", data.replace(b"calibration/1", b"calibration/9"), data[:-40]):
        with pytest.raises(ArtefactError, match="calibration.json"):
            Artefact.from_bytes(broken, "calibration.json")
