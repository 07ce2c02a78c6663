"""Answers: what the scores of a further question say, and which tickets they raise to people.

A yes/no question gives the probability of yes, a score question a distribution over its levels with an expected one,
a choice the most probable option. Rules go by calibrated probabilities alone. They only ever turn a route into an
escalation, or name other people: nothing here can open a queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from worker.core.artefact import Artefact
from worker.core.envelope import Answer, Reason
from worker.core.policy import Calibration, Decision, NoCalibration, decide_override, reason
from worker.core.questions import FurtherQuestion
from worker.core.rule_kinds import AnswerRule, Given, RuleTest
from worker.core.rules import RuleSet
from worker.core.scores import LabelScores


def read_answer(
    question: FurtherQuestion,
    scores: LabelScores,
    calibration: Calibration | NoCalibration,
    min_label_mass: float,
    *,
    cached: bool = False,
) -> Answer:
    """The answer in these scores, which are in the order of the question's options."""
    ids = tuple(option.id for option in question.options)
    if len(scores.logprobs) != len(ids):
        raise ValueError(f"{len(scores.logprobs)} scores for {len(ids)} answers")
    raw = Answer(
        question=question.id,
        kind=question.kind,
        answer=ids[scores.best_known],
        probability=None,
        distribution=None,
        expected=None,
        problem=None,
        label_mass=scores.mass,
        labels=ids,
        label_scores=scores.returned,
        calibration=None,
        cached=cached,
    )
    if isinstance(calibration, NoCalibration):
        return replace(raw, problem=calibration.reason)
    artefact = calibration.artefact
    raw = replace(raw, calibration=artefact.digest)
    problem = _not_to_be_trusted(scores, artefact, min_label_mass)
    if problem is not None:
        return replace(raw, problem=problem)
    distribution = dict(zip(ids, artefact.calibrator.apply_one(scores.logprobs), strict=True))
    return _with_distribution(raw, question, distribution)


def unanswered(question: FurtherQuestion, why: Reason) -> Answer:
    """A question that could not be scored."""
    ids = tuple(option.id for option in question.options)
    return Answer(question.id, question.kind, None, None, None, None, why, None, ids, None, None)


def raise_by_answers(decision: Decision, answers: Sequence[Answer], rule_set: RuleSet) -> Decision:
    """The decision with its answers, and escalated where a rule over them says so.

    The first rule that holds says to which topic. Rules whose question is unknown escalate too unless they say
    otherwise, always to the human topic: a question that nobody calibrated must not flood a duty desk. Reasons stand in
    this order: rules that hold, why the decision was an escalation already, questions that are unknown.
    """
    by_question = {answer.question: answer for answer in answers}
    held: list[tuple[AnswerRule, Reason]] = []
    unknown: list[Reason] = []
    for rule in rule_set.rules.answers:
        answer = by_question.get(rule.question)
        if answer is None or answer.distribution is None:
            if rule.when_unknown == "escalate":
                detail = (
                    "it was not asked"
                    if answer is None or answer.problem is None
                    else answer.problem.sentence.rstrip(".")
                )
                unknown.append(reason("question_unanswered", name=rule.name, question=rule.question, detail=detail))
        elif (what := _holds(rule, answer)) is not None:
            held.append((rule, reason("answer_escalation", name=rule.name, question=rule.question, what=what)))
    found = replace(decision, answers=tuple(answers))
    if not held and not unknown:
        return found
    topic = (held[0][0].topic if held else None) or rule_set.human_topic
    before = decision.reasons if decision.action == "escalate" else ()
    return replace(found, action="escalate", topic=topic, reasons=(*(why for _, why in held), *before, *unknown))


def outcome_of(test: RuleTest, rule_set: RuleSet) -> tuple[str, str | None]:
    """What the rules alone make of a test's ticket: `route` and the category, `escalate` and the topic, or `score`."""
    decision = decide_override(test.ticket(), rule_set)
    if decision is None and test.answers is not None:
        scored = Decision("route", rule_set.human_topic, None, ())
        answers = [_given(question, test.answers) for question in rule_set.questions.questions]
        decision = raise_by_answers(scored, answers, rule_set)
        if decision.action == "route":
            return "score", None
    if decision is None:
        return "score", None
    return (decision.action, decision.category if decision.action == "route" else decision.topic)


def failed_test(test: RuleTest, rule_set: RuleSet) -> str | None:
    """How the test does not come out as it says, in one sentence; None where it does."""
    action, where = outcome_of(test, rule_set)
    expect = test.expect
    wanted = expect.category if expect.action == "route" else expect.topic
    if action == expect.action and wanted in (None, where):
        return None
    got = _words(action, where if action == "route" or wanted is not None else None)
    return f"test '{test.name}': expected {_words(expect.action, wanted)}, got {got}"


def _not_to_be_trusted(scores: LabelScores, artefact: Artefact, min_label_mass: float) -> Reason | None:
    floor = max(min_label_mass, artefact.min_label_mass)
    if scores.unknown:
        size, what = len(scores.logprobs), "the answer"
        return reason("label_not_returned", missing=len(scores.unknown), labels=size, what=what)
    if scores.mass < floor:
        return reason("low_label_mass", mass=f"{100 * scores.mass:.3g} %", floor=f"{100 * floor:.3g} %")
    return None


def _with_distribution(raw: Answer, question: FurtherQuestion, distribution: dict[str, float]) -> Answer:
    answer = max(distribution, key=distribution.__getitem__)
    expected = None
    if question.kind == "score":
        expected = sum(int(level) * p for level, p in distribution.items())
    return replace(raw, answer=answer, probability=distribution[answer], distribution=distribution, expected=expected)


def _holds(rule: AnswerRule, answer: Answer) -> str | None:
    """What makes the rule hold, in words; None where it does not."""
    distribution = answer.distribution or {}
    if rule.expected_at_least is not None:
        if answer.expected is None or answer.expected < rule.expected_at_least:
            return None
        return f"the expected level is {answer.expected:.3g}, at least {rule.expected_at_least:g}"
    if rule.at_least is not None:
        p = sum(probability for level, probability in distribution.items() if int(level) >= rule.at_least)
        said = f"level {rule.at_least} or higher"
    else:
        p, said = distribution.get(rule.is_ or "", 0.0), f"'{rule.is_}'"
    if rule.probability is None or p < rule.probability:
        return None
    return f"{said} has probability {p:.3g}, at least {rule.probability:g}"


def _given(question: FurtherQuestion, answers: Mapping[str, Given]) -> Answer:
    """An answer as a test states it. Probabilities that are left out are shared by the other answers."""
    given = answers.get(question.id)
    blank = unanswered(question, reason("uncalibrated", detail="the test states no answer"))
    if given is None:
        return blank
    stated = {given: 1.0} if isinstance(given, str) else given
    ids = [option.id for option in question.options]
    others = [name for name in ids if name not in stated]
    rest = max(0.0, 1.0 - sum(stated.values())) / max(1, len(others))
    distribution = {name: stated.get(name, rest) for name in ids}
    return _with_distribution(replace(blank, problem=None), question, distribution)


def _words(action: str, where: str | None) -> str:
    return action if where is None else f"{action} to {where}"
