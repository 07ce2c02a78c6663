"""Further questions: behind the same prompt and ticket, with labels of their own; no other calibration is touched."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.core.sets import category_set, rule_set
from tests.core.test_prompt import Words
from worker.core.digest import fingerprint
from worker.core.normalise import canonical
from worker.core.prompt import Prompt, build_prompt
from worker.core.questions import (
    Behind,
    FurtherQuestion,
    Questions,
    as_category_set,
    choose_question_labels,
    put_behind,
)
from worker.core.rules import Rules, RuleSet
from worker.errors import LabelError

PARSER: TypeAdapter[FurtherQuestion] = TypeAdapter(FurtherQuestion)
EMERGENCY = {"id": "emergency", "kind": "yes_no", "ask": "Is it?", "cue": "Emergency:"}
URGENCY = {
    "id": "urgency",
    "kind": "score",
    "ask": "How soon?",
    "cue": "Urgency:",
    "levels": [{"name": "some day"}, {"name": "today"}, {"name": "now"}],
}
TEAM = {
    "id": "team",
    "kind": "choose_one",
    "ask": "Who?",
    "cue": "Team:",
    "options": [{"id": "north", "name": "North"}, {"id": "none", "name": "Nobody", "label": "nobody"}],
}


def question(body: dict[str, object], **changes: object) -> FurtherQuestion:
    return PARSER.validate_python({**body, **changes}, strict=False)


async def asked(
    body: FurtherQuestion, tokenize: Words | None = None, style: str = "base"
) -> tuple[Prompt, Prompt, tuple[str, ...]]:
    """The set's own prompt, the question's, and the question's words."""
    words = tokenize or Words()
    base = category_set("a", "b")
    categories = base.model_copy(update={"prompt": base.prompt.model_copy(update={"style": style})})
    own = build_prompt(categories, ["a", "b"], legend=False)
    behind = Behind(body, own, categories.first_cue)
    prompt, labels = await choose_question_labels(behind, as_category_set(body, categories), words)
    return own, prompt, labels.words


async def test_a_question_shares_prefix_and_ticket_with_the_sets_own() -> None:
    own, prompt, words = await asked(question(EMERGENCY))
    assert prompt.prefix == own.prefix
    assert own.item("It burns") == " It burns\nCategory:"
    assert prompt.item("It burns") == " It burns\nIs it?\nEmergency:"
    assert words == ("yes", "no")


async def test_in_a_chat_the_question_stands_in_the_users_turn_and_names_its_words() -> None:
    own, prompt, _ = await asked(question(EMERGENCY), style="chat")
    assert prompt.prefix == own.prefix
    turn = "<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.suffix == f"\nIs it?\nAnswer with one of these words only: yes, no.{turn}Emergency:"


async def test_a_scale_without_labels_takes_numbers_where_they_are_single_tokens_and_letters_elsewhere() -> None:
    _, prompt, words = await asked(question(URGENCY))
    assert words == ("1", "2", "3")
    assert "\n1: some day\n2: today\n3: now\nUrgency:" in prompt.suffix
    _, prompt, words = await asked(question(URGENCY), Words("1", "22", "3", same=("1", "2")))
    assert words == ("A", "B", "C")
    assert "\nA: some day\nB: today\nC: now\nUrgency:" in prompt.suffix


async def test_stated_words_that_are_no_single_tokens_are_refused_by_the_questions_name() -> None:
    with pytest.raises(LabelError, match=r"question 'emergency'.*yes \(2 tokens\)"):
        await asked(question(EMERGENCY), Words("yes"))


async def test_examples_stand_behind_the_ticket_as_text_that_cannot_write_a_turn() -> None:
    shown = question(EMERGENCY, examples=[{"text": "Fire!<|im_end|>", "answer": "yes"}])
    _, prompt, _ = await asked(shown, style="chat")
    assert f"“{canonical('Fire!<|im_end|>')}” Emergency: yes" in prompt.suffix
    assert prompt.suffix.count("<|im_end|>") == 1


def test_a_cue_that_does_not_end_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="does not end in its cue"):
        put_behind(Prompt("p", "\nOther:"), "Category:", ["x"], "y")


@pytest.mark.parametrize(
    ("body", "changes", "message"),
    [
        (EMERGENCY, {"examples": [{"text": "x", "answer": "maybe"}]}, "'maybe' is none of yes, no"),
        (EMERGENCY, {"no": "yes"}, "label used twice: yes"),
        (TEAM, {"options": [{"id": "a", "name": "A"}] * 2}, "answer used twice: a"),
        (URGENCY, {"levels": [{"name": "only"}]}, "at least 2"),
        (EMERGENCY, {"levels": []}, "Extra inputs"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused(
    body: dict[str, object], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        question(body, **changes)


def test_two_questions_of_one_name_are_refused() -> None:
    with pytest.raises(ValidationError, match="question used twice: emergency"):
        Questions.model_validate({"questions": [EMERGENCY, EMERGENCY]}, strict=False)


def test_as_a_category_set_a_question_has_its_answers_for_categories_and_none_among_them() -> None:
    categories = as_category_set(question(TEAM), category_set("a", "b"))
    assert (categories.id, categories.ids) == ("desk_team", ("north", "none"))
    assert [c.id for c in categories.routable] == ["north"]


def test_a_questions_fingerprint_is_its_own() -> None:
    base = category_set("a", "b")
    assert (
        as_category_set(question(URGENCY), base).fingerprint != as_category_set(question(EMERGENCY), base).fingerprint
    )


def with_questions(*bodies: dict[str, object], **rules: object) -> RuleSet:
    body = {"version": 1, "alpha": 0.1, "delta": 0.1, **rules}
    questions = Questions.model_validate({"questions": list(bodies)}, strict=False)
    return RuleSet(categories=category_set(), rules=Rules.model_validate(body, strict=False), questions=questions)


def test_a_set_without_questions_keeps_the_digest_it_had_before_there_were_any() -> None:
    plain = rule_set()
    later = {
        "length": True, "steering": True, "mode": True, "gates": {"other_order_margin"}, "topics": {"answers"},
    }  # fmt: skip
    rules = plain.rules.model_dump_json(exclude={"tests": True, "overrides": True, "answers": True, **later})
    assert '"overrides"' not in rules
    before = rules[:-1] + ',"overrides":[]}'
    assert plain.fingerprint == fingerprint(
        "rule-set/1",
        plain.categories.model_dump_json(exclude={"two_levels": True, "prompt": {"orders", "canonicalise"}}),
        before,
    )
    assert with_questions(EMERGENCY).fingerprint != plain.fingerprint


def test_a_question_is_calibrated_under_the_promise_of_the_set_and_without_what_overrides_take() -> None:
    override = {"kind": "field", "name": "vip", "pointer": "/vip", "equals": True, "then": "route", "category": "bug"}
    own = with_questions(EMERGENCY, overrides=[override], categories={"bug": {"alpha": 0.01}})
    seen = own.for_question(own.questions.questions[0])
    assert (seen.rules.alpha, seen.rules.delta, seen.rules.gates) == (own.rules.alpha, 0.1, own.rules.gates)
    assert [(rule.name, rule.kind) for rule in seen.rules.overrides] == [("vip", "field")]
    assert seen.categories.ids == ("yes", "no")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"question": "weather", "is": "yes", "probability": 0.5}, "no question 'weather'"),
        ({"question": "emergency", "is": "maybe", "probability": 0.5}, "'maybe' is no answer"),
        ({"question": "emergency", "at_least": 2, "probability": 0.5}, "levels are those of a score question"),
        ({"question": "urgency", "at_least": 4, "probability": 0.5}, "at most 3"),
        ({"question": "urgency", "expected_at_least": 3.5}, "at most 3"),
        ({"question": "emergency", "is": "yes"}, "`probability` goes with"),
        ({"question": "urgency", "expected_at_least": 2, "probability": 0.5}, "`probability` goes with"),
        ({"question": "urgency", "is": "1", "at_least": 2, "probability": 0.5}, "state one of"),
        ({"question": "emergency", "is": "yes", "probability": 0.5, "topic": "desk.billing"}, "must not open a queue"),
        ({"question": "emergency", "is": "yes", "probability": 0.5, "topic": "tickets.desk"}, "must not open a queue"),
        (
            {"question": "emergency", "is": "yes", "probability": 0.5, "topic": "desk.decisions"},
            "must not open a queue",
        ),
        ({"question": "emergency", "is": "yes", "probability": 0.5, "then": "route"}, "escalate"),
        ({"question": "emergency", "is": "yes", "probability": 0.5, "category": "bug"}, "Extra inputs"),
    ],
)
def test_a_rule_over_answers_that_means_nothing_or_would_open_a_queue_is_refused(
    rule: dict[str, object], message: str
) -> None:
    body = {"kind": "answer", "name": "r", "then": "escalate", **rule}
    with pytest.raises(ValidationError, match=message):
        with_questions(EMERGENCY, URGENCY, answers=[body])


def test_topics_of_people_are_output_topics_once_each() -> None:
    rule = {"kind": "answer", "question": "emergency", "is": "yes", "probability": 0.5, "then": "escalate"}
    rules = with_questions(
        EMERGENCY, answers=[{**rule, "name": "a", "topic": "desk.duty"}, {**rule, "name": "b", "topic": "desk.duty"}]
    )
    assert rules.people_topics == ("desk.human", "desk.duty")
    assert rules.output_topics.count("desk.duty") == 1


def test_answers_may_be_written_as_numbers() -> None:
    rules = Rules.model_validate_json(
        '{"version": 1, "alpha": 0.1, "delta": 0.1, "tests": [{"name": "n", "text": "t", '
        '"answers": {"urgency": 3, "other": null, "third": {"1": 0.5}}, "expect": {"action": "score"}}]}'
    )
    assert rules.tests[0].answers == {"urgency": "3", "other": None, "third": {"1": 0.5}}
