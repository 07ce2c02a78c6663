"""What docs/rule-sets.md shows is a rule set that loads and keeps its own tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from worker.adapters.files import CATEGORIES_FILE, RULES_FILE, load_rule_set
from worker.core.policy import decide_override
from worker.core.rules import Demand, Gates, RuleSet, Topics

DOCUMENT = (Path(__file__).parents[2] / "docs/rule-sets.md").read_text(encoding="utf-8")


@pytest.fixture
def shown(tmp_path: Path) -> RuleSet:
    categories, rules, overrides = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
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
    assert set(Demand.model_fields) == {"alpha", "delta"}


def test_the_topics_shown_as_defaults_are_the_defaults(shown: RuleSet) -> None:
    stated = shown.rules.topics
    bare = shown.model_copy(update={"rules": shown.rules.model_copy(update={"topics": Topics()})})
    assert (stated.input, stated.human) == (bare.input_topic, bare.human_topic)
    assert (stated.dead_letter, stated.decisions) == (bare.dead_letter_topic, bare.decisions_topic)
