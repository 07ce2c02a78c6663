"""The guide to rule sets shows every key that can be written, in files that load."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import BaseModel

from worker.adapters.files import CATEGORIES_FILE, QUESTIONS_FILE, RULES_FILE, load_rule_set
from worker.core.answers import failed_test
from worker.core.categories import CategorySet, PromptStyle
from worker.core.questions import Questions
from worker.core.rules import Rules, RuleSet

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/rule-sets.md").read_text(encoding="utf-8")
QUESTIONS = (ROOT / "docs/questions.md").read_text(encoding="utf-8")
MINIMAL = "version: 1\nalpha: 0.1\ndelta: 0.1\n"


def blocks(text: str) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)


def every_key() -> tuple[str, list[str], str, str]:
    """categories.yaml, the ways to name a chat template, rules.yaml and questions.yaml."""
    categories, *styles, rules, questions = blocks(GUIDE.partition("\n## Every key\n")[2])
    return categories, styles, rules, questions


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[BaseModel]:
    """Everything that both documents show, as the worker reads it."""
    categories, styles, rules, questions = every_key()
    first = tmp_path_factory.mktemp("every-key")
    (first / CATEGORIES_FILE).write_text(categories, encoding="utf-8")
    (first / RULES_FILE).write_text(rules, encoding="utf-8")
    (first / QUESTIONS_FILE).write_text(questions, encoding="utf-8")
    second = tmp_path_factory.mktemp("two-levels")
    (second / CATEGORIES_FILE).write_text(blocks(QUESTIONS)[-1], encoding="utf-8")
    (second / RULES_FILE).write_text(MINIMAL, encoding="utf-8")
    prompts = [PromptStyle.model_validate(yaml.safe_load(style), strict=False) for style in styles]
    return [load_rule_set(first), load_rule_set(second), *prompts]


def inside(value: object) -> Iterator[BaseModel]:
    if isinstance(value, BaseModel):
        yield value
        for name in type(value).model_fields:
            yield from inside(getattr(value, name))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from inside(each)
    elif isinstance(value, dict):
        yield from inside(list(value.values()))


def reachable(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from reachable(field.annotation)
    for each in get_args(annotation):
        yield from reachable(each)


def missing(shown: list[BaseModel], root: type[BaseModel]) -> set[str]:
    """Keys below `root` that no example writes, as Model.key."""
    written: dict[type[BaseModel], set[str]] = defaultdict(set)
    for model in (model for example in shown for model in inside(example)):
        written[type(model)] |= model.model_fields_set
    return {
        f"{model.__name__}.{field.alias or name}"
        for model in set(reachable(root))
        for name, field in model.model_fields.items()
        if name not in written[model]
    }


@pytest.mark.parametrize("root", [CategorySet, Rules, Questions])
def test_every_key_stands_in_an_example_that_loads(shown: list[BaseModel], root: type[BaseModel]) -> None:
    assert missing(shown, root) == set()


def test_a_key_without_an_example_would_be_found() -> None:
    bare = Rules.model_validate(yaml.safe_load(MINIMAL))
    assert {"Rules.certify", "Gates.min_label_mass", "AnswerRule.is"} <= missing([bare], Rules)


def test_the_tests_in_the_example_hold(shown: list[BaseModel]) -> None:
    rule_set = shown[0]
    assert isinstance(rule_set, RuleSet)
    rules = rule_set.rules
    tests = [test for rule in (*rules.overrides, *rules.answers) for test in rule.tests] + list(rules.tests)
    assert len(tests) >= 5
    assert [failed_test(test, rule_set) for test in tests] == [None] * len(tests)


def test_what_is_marked_as_needed_is_needed(shown: list[BaseModel]) -> None:
    """And nothing else: at the top level of each file, where a key is on a line of its own."""
    categories, _, rules, questions = every_key()
    for text, model in ((categories, CategorySet), (rules, Rules), (questions, Questions)):
        marked = set(re.findall(r"^(\w+):.*# \*", text, re.MULTILINE))
        assert marked == {name for name, field in model.model_fields.items() if field.is_required()}


def test_defaults_shown_are_the_defaults(shown: list[BaseModel]) -> None:
    rule_set = shown[0]
    assert isinstance(rule_set, RuleSet)
    rules = rule_set.rules
    for part, said_otherwise in (
        (rules.gates, {"other_order_margin"}),
        (rules.length, {"tenant_characters_per_minute"}),
        (rules.steering, set()),
        (rules.intake, set()),
        (rule_set.categories.prompt, {"answer_cue", "canonicalise", "instruction"}),
    ):
        for name in part.model_fields_set - said_otherwise:
            assert getattr(part, name) == type(part).model_fields[name].default, name
    bare = rule_set.model_copy(update={"rules": rules.model_copy(update={"topics": type(rules.topics)()})})
    assert (rules.topics.input, rules.topics.human) == (bare.input_topic, bare.human_topic)
    assert (rules.topics.dead_letter, rules.topics.decisions) == (bare.dead_letter_topic, bare.decisions_topic)
