"""Answers: calibrated or unknown, and rules over them that raise tickets to people and do nothing else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.sets import artefact, scores
from tests.core.test_questions import EMERGENCY, URGENCY, with_questions
from worker.core.answers import failed_test, raise_by_answers, read_answer, unanswered
from worker.core.calibration import Calibrator
from worker.core.envelope import Answer
from worker.core.policy import Calibration, Decision, NoCalibration, reason
from worker.core.rule_kinds import RuleTest
from worker.core.rules import RuleSet
from worker.core.scores import LabelScores

DUTY = {
    "kind": "answer",
    "name": "duty",
    "question": "emergency",
    "is": "yes",
    "probability": 0.3,
    "then": "escalate",
    "topic": "desk.duty",
}
SOON = {"kind": "answer", "name": "soon", "question": "urgency", "expected_at_least": 2.5, "then": "escalate"}
LATE = {
    "kind": "answer",
    "name": "late",
    "question": "urgency",
    "at_least": 2,
    "probability": 0.6,
    "then": "escalate",
    "when_unknown": "ignore",
}
RULES = with_questions(EMERGENCY, URGENCY, answers=[DUTY, SOON])
EMERGENCY_Q, URGENCY_Q = RULES.questions.questions
ROUTE = Decision("route", "desk.bug", "bug", (reason("override", name="x"),))
BELOW = Decision("escalate", "desk.human", "bug", (reason("below_threshold", score="1", threshold="2"),))
NONE = NoCalibration(reason("uncalibrated", detail="nobody did"))


def calibrated(question_id: str, **changes: object) -> Calibration:
    question = RULES.questions.by_id(question_id)
    assert question is not None
    return Calibration(artefact(RULES.for_question(question), **changes))  # type: ignore[arg-type]


def answer(question_id: str, **distribution: float) -> Answer:
    question = RULES.questions.by_id(question_id)
    assert question is not None
    given = [distribution[f"_{o.id}" if o.id[0].isdigit() else o.id] for o in question.options]
    return read_answer(question, scores(*given), calibrated(question_id), 0.1)


CALM = (answer("emergency", yes=0.1, no=0.8), answer("urgency", _1=0.8, _2=0.1, _3=0.05))


def test_an_answer_has_the_calibrated_probability_of_every_option() -> None:
    bias = Calibrator("bias_temperature", (1.0, 1.0), (2.0, 0.0))
    found = read_answer(EMERGENCY_Q, scores(0.3, 0.6), calibrated("emergency", calibrator=bias), 0.1, cached=True)
    p = 0.3 * math.exp(2) / (0.3 * math.exp(2) + 0.6)
    assert (found.answer, found.problem, found.cached, found.expected) == ("yes", None, True, None)
    assert found.distribution == pytest.approx({"yes": p, "no": 1 - p})
    assert found.probability == pytest.approx(p)
    assert found.label_mass == pytest.approx(0.9)


def test_a_score_question_has_the_mean_of_its_distribution() -> None:
    found = answer("urgency", _1=0.2, _2=0.2, _3=0.4)
    assert found.expected == pytest.approx((0.25 * 1) + (0.25 * 2) + (0.5 * 3))
    assert found.answer == "3"


def test_without_a_calibration_the_raw_answer_is_recorded_and_nothing_is_said_of_its_probability() -> None:
    found = read_answer(EMERGENCY_Q, scores(0.6, 0.3), NONE, 0.1)
    assert (found.answer, found.label_scores) == ("yes", scores(0.6, 0.3).logprobs)
    assert (found.probability, found.distribution, found.expected, found.calibration) == (None,) * 4
    assert found.problem is not None
    assert found.problem.code == "uncalibrated"


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (LabelScores.from_logprobs((-4.0, -9.0)), "low_label_mass"),
        (LabelScores.from_logprobs((-0.1, -9.0), unknown=(1,)), "label_not_returned"),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_unknown_to_rules(row: LabelScores, code: str) -> None:
    found = read_answer(EMERGENCY_Q, row, calibrated("emergency"), 0.1)
    assert found.problem is not None
    assert (found.problem.code, found.distribution) == (code, None)
    assert raise_by_answers(ROUTE, [found, CALM[1]], RULES).reasons[0].code == "question_unanswered"


def test_an_emergency_goes_to_the_duty_desk_whatever_its_category_and_its_score() -> None:
    answers = [answer("emergency", yes=0.4, no=0.5), CALM[1]]
    for before in (ROUTE, BELOW):
        found = raise_by_answers(before, answers, RULES)
        assert (found.action, found.topic, found.category) == ("escalate", "desk.duty", "bug")
        assert found.reasons[0].code == "answer_escalation"
        assert "'yes' has probability 0.444, at least 0.3" in found.reasons[0].sentence
    assert [why.code for why in found.reasons] == ["answer_escalation", "below_threshold"]


def test_where_no_rule_holds_the_decision_stands_with_its_answers() -> None:
    found = raise_by_answers(ROUTE, CALM, RULES)
    assert (found.action, found.topic, found.reasons, found.answers) == ("route", "desk.bug", ROUTE.reasons, CALM)


def test_the_first_rule_that_holds_says_which_people() -> None:
    answers = [answer("emergency", yes=0.8, no=0.1), answer("urgency", _1=0.01, _2=0.01, _3=0.9)]
    both = with_questions(EMERGENCY, URGENCY, answers=[SOON, DUTY])
    assert raise_by_answers(ROUTE, answers, RULES).topic == "desk.duty"
    assert raise_by_answers(ROUTE, answers, both).topic == "desk.human"
    assert [why.code for why in raise_by_answers(ROUTE, answers, both).reasons] == ["answer_escalation"] * 2


def test_an_unknown_question_escalates_to_people_and_never_to_the_duty_desk() -> None:
    unknown = unanswered(EMERGENCY_Q, reason("engine_timeout", deadline="60"))
    found = raise_by_answers(ROUTE, [unknown, CALM[1]], RULES)
    assert (found.action, found.topic) == ("escalate", "desk.human")
    assert "was not scored within its deadline of 60 seconds)." in found.reasons[0].sentence
    assert raise_by_answers(ROUTE, [], RULES).topic == "desk.human"


def test_a_known_emergency_is_not_held_up_by_another_question_that_is_unknown() -> None:
    unknown = unanswered(URGENCY_Q, reason("engine_dropped"))
    found = raise_by_answers(ROUTE, [answer("emergency", yes=0.8, no=0.1), unknown], RULES)
    assert found.topic == "desk.duty"
    assert [why.code for why in found.reasons] == ["answer_escalation", "question_unanswered"]


def test_a_rule_may_ignore_what_it_does_not_know() -> None:
    rules = with_questions(EMERGENCY, URGENCY, answers=[LATE])
    unknown = unanswered(URGENCY_Q, reason("engine_dropped"))
    assert raise_by_answers(ROUTE, [CALM[0], unknown], rules).action == "route"


@pytest.mark.parametrize(("low", "action"), [(0.41, "route"), (0.39, "escalate")])
def test_levels_at_or_above_the_stated_one_count_together(low: float, action: str) -> None:
    rules = with_questions(EMERGENCY, URGENCY, answers=[LATE])
    rest = (1 - low) / 2
    found = raise_by_answers(ROUTE, [CALM[0], answer("urgency", _1=low, _2=rest, _3=rest)], rules)
    assert found.action == action


@given(
    yes=st.floats(0.01, 0.98),
    levels=st.tuples(*[st.floats(0.01, 0.3)] * 3),
    before=st.sampled_from([ROUTE, BELOW]),
    order=st.permutations([DUTY, SOON, LATE]),
    known=st.tuples(st.booleans(), st.booleans()),
)
def test_no_answer_opens_a_queue(
    yes: float, levels: tuple[float, ...], before: Decision, order: list[dict[str, object]], known: tuple[bool, bool]
) -> None:
    rules = with_questions(EMERGENCY, URGENCY, answers=order)
    calibrations = [
        calibrated(name) if there else NONE for name, there in zip(("emergency", "urgency"), known, strict=True)
    ]
    answers = [
        read_answer(EMERGENCY_Q, scores(yes, 0.99 - yes), calibrations[0], 0.1),
        read_answer(URGENCY_Q, scores(*levels), calibrations[1], 0.1),
    ]
    found = raise_by_answers(before, answers, rules)
    if found.action == "route":
        assert (before.action, found.topic, found.category) == ("route", before.topic, before.category)
    else:
        assert found.topic in rules.people_topics


def rule_test(rules: RuleSet, answers: object, **expect: object) -> str | None:
    body = {"name": "n", "text": "t", "answers": answers, "expect": expect}
    return failed_test(RuleTest.model_validate(body, strict=False), rules)


def test_a_rules_own_test_states_answers_and_topic() -> None:
    assert rule_test(RULES, {"emergency": "yes", "urgency": "1"}, action="escalate", topic="desk.duty") is None
    assert rule_test(RULES, {"emergency": {"yes": 0.31}, "urgency": "1"}, action="escalate", topic="desk.duty") is None
    assert rule_test(RULES, {"emergency": {"yes": 0.29}, "urgency": "1"}, action="score") is None
    assert rule_test(RULES, {"emergency": "no", "urgency": {"2": 0.5, "3": 0.5}}, action="escalate") is None
    assert rule_test(RULES, {"emergency": "no"}, action="escalate", topic="desk.human") is None
    assert rule_test(RULES, None, action="score") is None
    failed = rule_test(RULES, {"emergency": "yes", "urgency": "1"}, action="escalate", topic="desk.human")
    assert failed == "test 'n': expected escalate to desk.human, got escalate to desk.duty"
    assert (
        rule_test(RULES, {"emergency": "no", "urgency": "1"}, action="escalate")
        == "test 'n': expected escalate, got score"
    )


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"emergency": "maybe"}, "'maybe' is no answer to 'emergency' .yes, no."),
        ({"nope": "yes"}, "no question 'nope'"),
        ({"emergency": {"yes": 0.9, "no": 0.9}}, "1.8 together"),
        ({"emergency": {"yes": 0.5, "no": 0.2}}, "0.7 together"),
        ({"urgency": {"9": 0.5}}, "'9' is no answer"),
    ],
)
def test_a_test_cannot_state_an_answer_that_nobody_can_give(answers: dict[str, object], said: str) -> None:
    test = {"name": "n", "text": "t", "answers": answers, "expect": {"action": "score"}}
    for where in ({"tests": [test]}, {"answers": [{**DUTY, "tests": [test]}]}):
        with pytest.raises(ValueError, match=f"test 'n': .*{said}"):
            with_questions(EMERGENCY, URGENCY, **{"answers": [DUTY], **where})
