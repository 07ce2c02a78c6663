"""What docs/rule-sets.md shows is a rule set that loads and keeps its own tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from worker.adapters.files import CATEGORIES_FILE, QUESTIONS_FILE, RULES_FILE, load_rule_set
from worker.core.answers import failed_test
from worker.core.categories import TwoLevels
from worker.core.policy import decide_override
from worker.core.questions import ChooseOneQuestion, ScoreQuestion, YesNoQuestion
from worker.core.rule_kinds import AnswerRule
from worker.core.rules import Demand, Gates, RuleSet, Topics

DOCUMENT = (Path(__file__).parents[2] / "docs/rule-sets.md").read_text(encoding="utf-8")


@pytest.fixture
def shown(tmp_path: Path) -> RuleSet:
    guide = DOCUMENT.partition("\n## Every key\n")[0]  # tests/documents/test_rule_set_guide.py reads what follows
    categories, rules, overrides = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    (tmp_path / CATEGORIES_FILE).write_text(categories, encoding="utf-8")
    without = rules.replace("overrides: []\n", "").replace("tests: []\n", "")
    (tmp_path / RULES_FILE).write_text(without + overrides, encoding="utf-8")
    return load_rule_set(tmp_path)


def test_the_example_is_a_rule_set_whose_tests_hold(shown: RuleSet) -> None:
    tests = [test for rule in shown.rules.overrides for test in rule.tests]
    assert len(tests) == 3
    for test in tests:
        decision = decide_override(test.ticket(), shown)
        found = ("score", None) if decision is None else (decision.action, decision.category)
        assert found == (test.expect.action, test.expect.category), test.name


def test_the_example_names_every_key_that_decides(shown: RuleSet) -> None:
    for model in (Topics, Gates):
        assert all(f"{name}:" in DOCUMENT for name in model.model_fields)
    assert all(f"{name}:" in DOCUMENT for name in ("whole_word", "pointer", "equals", "then", "intake"))
    assert shown.demand("billing") == (0.05, 0.10)
    assert all(f"{name}:" in DOCUMENT for name in Demand.model_fields)


def test_the_topics_shown_as_defaults_are_the_defaults(shown: RuleSet) -> None:
    stated = shown.rules.topics
    bare = shown.model_copy(update={"rules": shown.rules.model_copy(update={"topics": Topics()})})
    assert (stated.input, stated.human) == (bare.input_topic, bare.human_topic)
    assert (stated.dead_letter, stated.decisions) == (bare.dead_letter_topic, bare.decisions_topic)


QUESTIONS = (Path(__file__).parents[2] / "docs/questions.md").read_text(encoding="utf-8")


@pytest.fixture
def asking(tmp_path: Path) -> RuleSet:
    questions, answers, categories = re.findall(r"```yaml\n(.*?)```", QUESTIONS, re.DOTALL)
    (tmp_path / CATEGORIES_FILE).write_text(categories, encoding="utf-8")
    (tmp_path / QUESTIONS_FILE).write_text(questions, encoding="utf-8")
    (tmp_path / RULES_FILE).write_text(f"version: 1\nalpha: 0.1\ndelta: 0.1\n{answers}", encoding="utf-8")
    return load_rule_set(tmp_path)


def test_the_example_with_questions_and_two_levels_loads_and_its_tests_hold(asking: RuleSet) -> None:
    tests = [test for rule in asking.rules.answers for test in rule.tests]
    assert len(tests) == 3
    assert [failed_test(test, asking) for test in tests] == [None] * 3
    assert {question.kind for question in asking.questions.questions} == {"yes_no", "score", "choose_one"}


def test_every_key_of_a_question_of_a_rule_over_answers_and_of_two_levels_is_explained() -> None:
    models = (YesNoQuestion, ScoreQuestion, ChooseOneQuestion, AnswerRule, TwoLevels)
    names = {field.alias or name for model in models for name, field in model.model_fields.items()}
    assert not {name for name in names if f"{name}:" not in QUESTIONS and f"`{name}`" not in QUESTIONS}
