"""Every shipped rule set keeps its own tests, and what the rest of the project takes for granted about it."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from worker.adapters.files import (
    CALIBRATION_FILE,
    CATEGORIES_FILE,
    RULES_FILE,
    SAMPLES_FILE,
    Labelled,
    load_artefact,
    load_labelled,
    load_rule_set,
)
from worker.adapters.yaml_strict import load_model
from worker.core.answers import failed_test, outcome_of
from worker.core.categories import NONE_ID
from worker.core.normalise import canonical
from worker.core.policy import decide_override, reason
from worker.core.prompt import build_prompt
from worker.core.rule_kinds import AnswerRule, Override, RuleTest
from worker.core.rules import Rules
from worker.core.ticket import Ticket

ROOT = Path(__file__).parents[2] / "routing_rules"
FOLDERS = sorted(path.parent for path in ROOT.glob(f"*/{RULES_FILE}"))

CALIBRATED = [folder for folder in FOLDERS if (folder / CALIBRATION_FILE).exists()]
"""Sets that certify something; the others show what can be written, and ship with few samples."""

every_calibrated_set = pytest.mark.parametrize("folder", CALIBRATED, ids=lambda folder: folder.name)
every_set = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)

rule_set = cache(load_rule_set)


@cache
def samples(folder: Path) -> tuple[Labelled, ...]:
    return load_labelled(folder / SAMPLES_FILE, rule_set(folder).categories.ids)


def cases() -> Iterator[object]:
    for folder in FOLDERS:
        rules = load_model(folder / RULES_FILE, Rules)
        for rule in (*rules.overrides, *rules.answers):
            for test in rule.tests:
                yield pytest.param(folder, test, id=f"{folder.name}: {rule.name}: {test.name}")
        for test in rules.tests:
            yield pytest.param(folder, test, id=f"{folder.name}: {test.name}")


def overrides() -> Iterator[object]:
    for folder in FOLDERS:
        for rule in load_model(folder / RULES_FILE, Rules).overrides:
            yield pytest.param(folder, rule, id=f"{folder.name}: {rule.name}")


def answer_rules() -> Iterator[object]:
    for folder in FOLDERS:
        for rule in load_model(folder / RULES_FILE, Rules).answers:
            yield pytest.param(folder, rule, id=f"{folder.name}: {rule.name}")


def test_the_demo_sets_are_here() -> None:
    assert {"helpdesk", "civil_complaints"} == {folder.name for folder in CALIBRATED}
    assert "city_services" in {folder.name for folder in FOLDERS}


@pytest.mark.parametrize(("folder", "test"), list(cases()))
def test_a_rule_sets_own_tests_hold(folder: Path, test: RuleTest) -> None:
    assert failed_test(test, rule_set(folder)) is None


@pytest.mark.parametrize(("folder", "rule"), list(overrides()))
def test_every_override_decides_one_of_its_own_tests(folder: Path, rule: Override) -> None:
    """A test that the rule matches but an earlier rule takes does not count: the rule might be dead."""
    reasons = [
        decision.reasons
        for test in rule.tests
        if (decision := decide_override(test.ticket(), rule_set(folder))) is not None
    ]
    routes = rule.kind != "keyword" and rule.then == "route"
    assert (reason("override" if routes else "override_escalation", name=rule.name),) in reasons


@pytest.mark.parametrize(("folder", "rule"), list(overrides()))
def test_every_override_leaves_one_of_its_own_tests_alone(folder: Path, rule: Override) -> None:
    assert any(not rule.matches(test.ticket()) for test in rule.tests)


@pytest.mark.parametrize(("folder", "rule"), list(answer_rules()))
def test_every_rule_over_answers_has_a_test_that_it_decides_and_one_that_it_leaves_alone(
    folder: Path, rule: AnswerRule
) -> None:
    rules = rule_set(folder)
    without = tuple(other for other in rules.rules.answers if other.name != rule.name)
    bare = rules.model_copy(update={"rules": rules.rules.model_copy(update={"answers": without})})
    told_apart = [outcome_of(test, rules) != outcome_of(test, bare) for test in rule.tests]
    assert any(told_apart), f"'{rule.name}' changes none of its tests: it might be dead"
    assert not all(told_apart), f"'{rule.name}' has no test that it must leave alone"


@every_calibrated_set
def test_the_shipped_calibration_was_fitted_on_the_prompt_and_the_categories_that_are_asked_now(folder: Path) -> None:
    """Whatever is added to the software: a set that did not change keeps its prompt to the last character."""
    made, categories = load_artefact(folder / CALIBRATION_FILE), rule_set(folder).categories
    assert made is not None
    words = [category.label or category.id for category in categories.categories]
    assert build_prompt(categories, words, legend=False).fingerprint == made.fingerprints.prompt
    assert categories.fingerprint == made.fingerprints.categories


@every_set
def test_the_folder_is_named_like_the_set(folder: Path) -> None:
    assert rule_set(folder).id == folder.name


@every_set
def test_overrides_leave_the_samples_to_the_score(folder: Path) -> None:
    """What an override takes is missing from the certificate's data; more than a few would skew it."""
    taken = [
        sample.id
        for sample in samples(folder)
        if decide_override(Ticket(None, canonical(sample.text), language=sample.language), rule_set(folder))
    ]
    assert len(taken) <= 0.02 * len(samples(folder)), taken


@every_calibrated_set
def test_there_are_enough_samples_to_certify_from(folder: Path) -> None:
    """Loading them refuses ids that stand twice and labels that are no category."""
    assert len(samples(folder)) >= 240


@every_set
def test_no_sample_stands_twice(folder: Path) -> None:
    """Twice would put one ticket into the calibration and into the demo."""
    twice = [text for text, times in Counter(same(s.text) for s in samples(folder)).items() if times > 1]
    assert not twice


@every_calibrated_set
def test_every_category_has_samples_and_so_have_tickets_of_no_category(folder: Path) -> None:
    """Also where the model is not offered `none`: only samples of no category show what becomes of such tickets."""
    counts = Counter(sample.label for sample in samples(folder))
    assert set(counts) == {*rule_set(folder).categories.ids, NONE_ID}
    assert min(counts.values()) >= 20, counts


@every_calibrated_set
def test_a_sixth_of_the_samples_is_hard(folder: Path) -> None:
    """Ambiguous or in no category: a set of easy tickets would certify what real tickets then break."""
    with (folder / SAMPLES_FILE).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    hard = [row for row in rows if row["kind"] == "ambiguous" or row["label"] == NONE_ID]
    assert 0.15 <= len(hard) / len(rows) <= 0.25


@every_set
def test_the_prompt_shows_no_sample(folder: Path) -> None:
    """A ticket that the model is shown with its answer proves nothing when it is asked about."""
    shown = {same(text) for category in rule_set(folder).categories.categories for text in category.examples}
    shown |= {same(example.text) for q in rule_set(folder).questions.questions for example in q.examples}
    assert shown, f"{folder / CATEGORIES_FILE} shows the model no examples"
    assert not shown & {same(sample.text) for sample in samples(folder)}


@every_set
def test_every_further_question_has_labelled_samples_of_every_answer(folder: Path) -> None:
    for question in rule_set(folder).questions.questions:
        answers = [option.id for option in question.options]
        found = load_labelled(folder / SAMPLES_FILE, answers, question.id)
        assert {sample.label for sample in found} == set(answers), question.id
        assert len(found) == len(samples(folder))


def same(text: str) -> str:
    """Texts that differ only in case, space or punctuation count as one."""
    clean = canonical(text).casefold()
    return "".join(character for character in clean if character.isalnum()) or clean
