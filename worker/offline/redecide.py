"""Redeciding: what becomes of one recorded decision under other rules, as far as its record tells; without an engine.

`core.policy.decide` decides from the recorded label scores, and `core.answers` from the recorded answers. What needs
the ticket's text (overrides, a second look at what addresses the router) is not in the record and is kept as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from worker.core.answers import raise_by_answers, read_answer, unanswered
from worker.core.artefact import Artefact
from worker.core.digest import fingerprint
from worker.core.envelope import Answer, Reason
from worker.core.policy import Calibration, Decision, NoCalibration, reason
from worker.core.questions import FurtherQuestion
from worker.core.rules import RuleSet
from worker.core.scores import LabelScores
from worker.offline.rules_diff import Side, changed_parts, changed_questions, in_force, version_of

DECIDED = frozenset({
    "certified", "below_threshold", "inside_flip_band", "uncertified_category", "certificate_too_weak",
    "low_label_mass", "label_not_returned", "none_of_the_above", "uncalibrated", "fingerprint_changed",
    "labels_untrusted", "answer_escalation", "question_unanswered",
})  # fmt: skip
"""Reasons that scores, answers and calibrations give; every other one of a scored ticket comes from a second look."""
OVERRIDES = frozenset({"override", "override_escalation"})
NOT_IN_FORCE = "run `ticket-router calibrate`"

Record = Mapping[str, Any]
"""One line of the log."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The new rules, and the calibrations that would be in force beside them, as far as files tell."""

    rule_set: RuleSet
    calibration: Calibration | NoCalibration
    further: Mapping[str, Calibration | NoCalibration]

    @classmethod
    def of(cls, new: Side, old: Side | None) -> Terms:
        """`old` tells whether an artefact that both have was fitted on another prompt than the new one."""
        moved = changed_questions(old.rule_set, new.rule_set) if old is not None else ()
        further: dict[str, Calibration | NoCalibration] = {}
        for question in new.rule_set.questions.questions:
            artefact = new.further.get(question.id)
            before = old.further.get(question.id) if old is not None else None
            means = new.rule_set.for_question(question).categories.fingerprint
            void = []
            if artefact is not None and artefact.fingerprints.categories != means:
                void = ["categories"]
            elif artefact is not None and before is not None and question.id in moved:
                void = ["prompt"] if artefact.fingerprints.prompt == before.fingerprints.prompt else []
            further[question.id] = _state(artefact, void)
        return cls(new.rule_set, _state(new.artefact, in_force(new, old)), further)


def _state(artefact: Artefact | None, void: tuple[str, ...] | list[str]) -> Calibration | NoCalibration:
    if artefact is None:
        return NoCalibration(reason("uncalibrated", detail=NOT_IN_FORCE))
    if void:
        return NoCalibration(reason("fingerprint_changed", detail=", ".join(void)))
    return Calibration(artefact)


class Fit:
    """Says whether recorded scores are those that the new rules would be given: same question, same model."""

    def __init__(self, new: Side, old: Side | None) -> None:
        sides = [side for side in (old, new) if side is not None]
        self._new = new
        self._artefacts = {side.artefact.digest: side.artefact for side in sides if side.artefact is not None}
        self._rule_sets = {version_of(side.rule_set): side.rule_set for side in sides}
        self._known: dict[tuple[object, ...], str | None] = {}
        self._without: dict[tuple[str, ...], RuleSet] = {}

    def problem(self, record: Record) -> str | None:
        """Why the decision cannot be made again, in a few words; None where it can. Raises KeyError, TypeError."""
        key = (
            record["rule_set"],
            record["calibration"],
            record["engine"],
            record["model"],
            tuple(record["labels"]),
        )
        try:
            return self._known[key]
        except KeyError:
            found = self._known[key] = self._look(record)
            return found

    def _look(self, record: Record) -> str | None:
        new, version = self._new, str(record["rule_set"])
        if version.split("/", 1)[0] != new.rule_set.id:
            return "another rule set's"
        if tuple(record["labels"]) != new.rule_set.categories.ids:
            return "other categories, or in another order"
        artefact = new.artefact
        if artefact is not None and artefact.fingerprints.model != fingerprint(record["engine"], record["model"]):
            return "scored by another model than the new calibration's"
        made_under, rule_set = self._artefacts.get(record["calibration"]), self._rule_sets.get(version)
        changed: list[str] = []
        if made_under is not None and artefact is not None:
            changed += artefact.fingerprints.differences(made_under.fingerprints)
        if rule_set is not None:
            changed += changed_parts(rule_set, new.rule_set)
        if changed:
            return f"asked otherwise than the new rules do: {', '.join(dict.fromkeys(changed))} changed"
        if made_under is None and rule_set is None:
            return "made under a calibration and rules that are not at hand (name their folder by --old)"
        return None

    def same_answers(self, question: FurtherQuestion) -> bool:
        """Whether recorded answers to a question of this id were asked for as the new rules do, as far as files say."""
        return all(known.questions.by_id(question.id) in (None, question) for known in self._rule_sets.values())

    def rules_without(self, questions: tuple[str, ...]) -> RuleSet:
        """The new rules, but for those over answers to these questions."""
        if questions not in self._without:
            rule_set = self._new.rule_set
            kept = tuple(rule for rule in rule_set.rules.answers if rule.question not in questions)
            rules = rule_set.rules.model_copy(update={"answers": kept})
            self._without[questions] = rule_set.model_copy(update={"rules": rules})
        return self._without[questions]


def as_auto(record: Record) -> Record:
    """The record of what auto would have done: itself, but where the mode held a route back."""
    would = record.get("would")
    if would is None:
        return record
    names = ("category", "topic", "probability", "reasons")
    return {**record, "action": "route", **{name: would[name] for name in names}}


def scores_of(record: Record) -> LabelScores:
    """The recorded label scores. Raises ValueError, TypeError, KeyError where there are none that could be."""
    values, bound = record["label_scores"], record["label_scores_bound"]
    unknown = tuple(place for place, value in enumerate(values) if value is None)
    if unknown and bound is None:
        raise ValueError("labels were not returned, and no bound is stated")
    logprobs = tuple(bound if value is None else float(value) for value in values)
    return LabelScores(logprobs, float(record["label_mass"]), unknown).checked()


def second_look(record: Record) -> str | None:
    """The reason code for which the ticket went to people after it was scored, other than by scores or answers."""
    if record["action"] == "route":
        return None
    return next((why["code"] for why in record["reasons"] if why["code"] not in DECIDED), None)


def was_cut(record: Record) -> bool:
    """Whether only a part of the ticket was read."""
    return any(why["code"] == "truncated" for why in record["reasons"])


def after_second_look(decision: Decision, record: Record, rule_set: RuleSet) -> Decision:
    """A decision to route stays an escalation where a second look, which needs the text, made the recorded one."""
    code = second_look(record)
    if code == "truncated" and rule_set.rules.length.when_cut == "decide":
        code = None
    if was_cut(record) and rule_set.rules.length.when_cut == "escalate":
        code = "truncated"
    if decision.action != "route" or code is None:
        return decision
    sentence = next(why["sentence"] for why in record["reasons"] if why["code"] == code)
    return replace(decision, action="escalate", topic=rule_set.human_topic, reasons=(Reason(code, sentence),))


def after_answers(decision: Decision, record: Record, terms: Terms, fit: Fit) -> tuple[Decision, tuple[str, ...]]:
    """Escalated where the new rules over answers say so; and the questions whose rules were left out, because the
    record holds no scores of theirs that would be the same.
    """
    asked = {one["question"]: one for one in record["answers"]}
    answers: list[Answer] = []
    unknown: list[str] = []
    for question in terms.rule_set.questions.questions:
        found = asked.get(question.id)
        ids = [option.id for option in question.options]
        if found is None or found["labels"] != ids or not fit.same_answers(question):
            unknown.append(question.id)
        elif found["label_scores"] is None:
            problem = found["problem"] or {"code": "uncalibrated", "sentence": "it was not scored"}
            answers.append(unanswered(question, Reason(problem["code"], problem["sentence"])))
        else:
            floor = terms.rule_set.rules.gates.min_label_mass
            answers.append(read_answer(question, _answer_scores(found), terms.further[question.id], floor))
    rules = terms.rule_set
    missing = tuple(name for name in unknown if any(rule.question == name for rule in rules.rules.answers))
    if missing:
        rules = fit.rules_without(missing)
    return raise_by_answers(decision, answers, rules), missing


def _answer_scores(found: Record) -> LabelScores:
    values = found["label_scores"]
    unknown = tuple(place for place, value in enumerate(values) if value is None)
    # An answer states no bound, and is not relied on where a label is missing, whatever the bound.
    known = tuple(0.0 if value is None else float(value) for value in values)
    return LabelScores(known, float(found["label_mass"]), unknown)
