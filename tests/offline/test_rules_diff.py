"""Rules diff: every change that decides is named, and what expires by it; tests of rules run without anything else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from shutil import copytree

import pytest
from typer.testing import CliRunner

from tests.core.sets import artefact, certificate, rule_set
from tests.offline.test_backtest import asking, log, side
from worker import cli
from worker.core.categories import Category, CategorySet
from worker.core.prompt import build_prompt
from worker.core.rules import Rules, RuleSet
from worker.errors import ConfigError
from worker.offline.rule_tests import run_rule_tests
from worker.offline.rules_diff import Change, RulesDiff, Side, changed_parts, diff_rules, in_force

ROOT = Path(__file__).parents[2] / "routing_rules"
RULES = {"version": 1, "alpha": 0.1, "delta": 0.1}


def with_categories(old: RuleSet, *categories: Category, **style: object) -> RuleSet:
    prompt = old.categories.prompt.model_copy(update=style)
    changed = old.categories.model_copy(
        update={"categories": categories or old.categories.categories, "prompt": prompt}
    )
    return old.model_copy(
        update={"categories": CategorySet.model_validate(changed.model_dump(exclude_unset=True), strict=False)}
    )


def category(name: str, **changes: object) -> Category:
    values = {"id": name, "name": name.title(), "description": f"about {name}", "label": name, **changes}
    return Category.model_validate(values, strict=False)


def differing(old: RuleSet, new: RuleSet) -> RulesDiff:
    return diff_rules(Side(old, None, {}), Side(new, None, {}))


def kinds(diff: RulesDiff, area: str) -> set[tuple[str, str]]:
    return {(change.kind, change.what) for change in diff.changes if change.area == area}


def test_a_rule_set_does_not_differ_from_itself_and_nothing_expires() -> None:
    one = side()
    diff = diff_rules(one, one)
    assert diff.changes == () and diff.changed_parts == () and diff.changed_questions == ()
    assert diff.expires[0] == "cache: scores of the set's own question stay"
    assert "in force" in diff.expires[1]


def test_two_sets_are_said_to_be_no_versions_of_one() -> None:
    old = rule_set()
    other = old.model_copy(update={"categories": old.categories.model_copy(update={"id": "city"})})
    said = differing(old, other).two_sets
    assert said is not None and "two rule sets, 'desk' and 'city'" in said
    said = differing(old, rule_set("travel", "visa")).two_sets
    assert said is not None and "not one category" in said
    assert differing(old, old).two_sets is None
    renamed = [category(f"new_{c.id}", description=c.description) for c in old.categories.categories]
    assert differing(old, with_categories(old, *renamed)).two_sets is None


def test_the_exit_code_is_that_of_diff(tmp_path: Path) -> None:
    one, other = ROOT / "helpdesk", ROOT / "civil_complaints"
    same = CliRunner().invoke(cli.app, ["rules", "diff", str(one), str(one)])
    assert same.exit_code == 0, same.output
    differ = CliRunner().invoke(cli.app, ["rules", "diff", str(one), str(other)])
    assert differ.exit_code == 1
    assert "two rule sets, 'helpdesk' and 'civil_complaints'" in differ.output.splitlines()[1]


def test_modes_are_named_as_they_are_in_force_and_expire_nothing() -> None:
    old = rule_set(mode="shadow", categories={"bug": {"mode": "assist", "alpha": 0.05}})
    new = rule_set(mode="assist", categories={"billing": {"mode": "auto"}, "bug": {"alpha": 0.05}})
    diff = differing(old, new)
    assert {(c.what, c.detail) for c in diff.changes} == {
        ("by default", "shadow → assist"), ("billing", "shadow → auto"), ("login", "shadow → assist"),
    }  # fmt: skip
    assert diff.changed_parts == () and {c.area for c in diff.changes} == {"modes"}
    assert diff.expires[0] == "cache: scores of the set's own question stay"


def test_categories_that_come_and_go_are_named() -> None:
    old = rule_set()
    first, second, third = old.categories.categories
    diff = differing(old, with_categories(old, first, second, category("travel")))
    assert kinds(diff, "categories") == {("removed", "bug"), ("added", "travel")}
    assert {"prompt", "labels", "categories"} == set(diff.changed_parts)
    assert third.id == "bug"


@pytest.mark.parametrize("shared", [{"description": "about bug"}, {"topic": "same"}, {"examples": ("bug example 0",)}])
def test_a_category_under_another_id_is_a_renamed_one(shared: dict[str, object]) -> None:
    old = rule_set()
    first, second, third = old.categories.categories
    old = with_categories(old, first, second, third.model_copy(update={"topic": "same"}))
    (change,) = [
        c
        for c in differing(old, with_categories(old, first, second, category("defect", **shared))).changes
        if c.kind == "renamed"
    ]
    assert change.what == "bug" and change.detail.startswith("→ defect (")


def test_a_category_whose_examples_stand_in_two_new_ones_was_split() -> None:
    old = rule_set()
    first, second, third = old.categories.categories
    old = with_categories(old, first, second, third.model_copy(update={"examples": ("it crashed", "it is slow")}))
    parts = category("crash", examples=("it crashed",)), category("slow", examples=("it is slow",))
    diff = differing(old, with_categories(old, first, second, *parts))
    assert Change("categories", "split", "bug", "→ crash, slow (they show its examples)") in diff.changes
    assert kinds(diff, "categories") == {("split", "bug")}


def test_a_category_that_keeps_its_id_and_gives_a_part_away_was_split() -> None:
    old = rule_set()
    first, second, third = old.categories.categories
    old = with_categories(old, first, second, third.model_copy(update={"examples": ("it crashed", "it is slow")}))
    left = old.categories.categories[2].model_copy(update={"examples": ("it crashed",)})
    new = with_categories(old, first, second, left, category("slow", examples=("it is slow",)))
    assert ("split", "bug") in kinds(differing(old, new), "categories")


def test_thresholds_promises_gates_overrides_and_topics_are_named_with_both_values() -> None:
    override = {"kind": "keyword", "name": "fire", "any": ["fire"]}
    old = rule_set(overrides=[override], categories={"bug": {"alpha": 0.05}})
    new = rule_set(
        alpha=0.05,
        gates={"min_label_mass": 0.2},
        overrides=[{**override, "any": ["fire", "smoke"]}, {**override, "name": "flood"}],
        topics={"human": "people"},
    )
    diff = diff_rules(
        Side(old, artefact(old, certificate("bug", threshold=0.7)), {}),
        Side(new, artefact(new, certificate("bug", threshold=0.9), certificate("login", threshold=0.5)), {}),
    )
    said = {f"{c.area} {c.kind} {c.what}: {c.detail}" for c in diff.changes}
    assert {
        "rules changed alpha: 0.1 → 0.05",
        "rules changed gates.min_label_mass: 0.1 → 0.2",
        "overrides changed fire: any: 0 removed, 1 added",
        "overrides added flood: ",
        "topics changed human: desk.human → people",
        "certificates changed bug: score > 0.7 (alpha 0.1, delta 0.1) → score > 0.9 (alpha 0.1, delta 0.1)",
        "certificates changed login: no certificate → score > 0.5 (alpha 0.1, delta 0.1)",
    } <= said
    assert any(line.startswith("rules removed categories.bug") for line in said)
    assert diff.changed_parts == () and "cache: scores of the set's own question stay" in diff.expires


def test_tests_of_rules_decide_nothing_and_are_no_difference() -> None:
    rule = {"kind": "keyword", "name": "fire", "any": ["fire"]}
    test = {"name": "t", "text": "fire", "expect": {"action": "escalate"}}
    old = rule_set(overrides=[rule])
    new = rule_set(overrides=[{**rule, "tests": [test]}], tests=[test])
    assert differing(old, new).changes == ()


def test_another_order_of_categories_or_overrides_is_a_difference() -> None:
    rules = [{"kind": "keyword", "name": name, "any": [name]} for name in ("fire", "flood")]
    old, new = rule_set(overrides=rules), rule_set(overrides=rules[::-1])
    assert kinds(differing(old, new), "overrides") == {("moved", "order")}
    turned = with_categories(old, *old.categories.categories[::-1])
    assert ("moved", "order") in kinds(differing(old, turned), "categories")


def test_a_changed_wording_voids_a_copied_calibration_and_every_score() -> None:
    old = side()
    new = dataclasses.replace(old, rule_set=with_categories(old.rule_set, instruction="Sort these."))
    diff = diff_rules(old, new)
    assert diff.changed_parts == ("prompt",) and in_force(new, old) == ("prompt",)
    assert diff.expires[0] == "cache: every score of the set's own question is made anew (prompt)"
    assert "certificates: all void (prompt)" in diff.expires[1]


def test_changed_categories_void_a_calibration_without_another_version_to_compare() -> None:
    old = side()
    assert in_force(old) == ()
    first, *others = old.rule_set.categories.categories
    renamed = first.model_copy(update={"description": "something else"})
    assert in_force(dataclasses.replace(old, rule_set=with_categories(old.rule_set, renamed, *others))) == (
        "categories",
    )


def test_topics_and_gates_change_no_fingerprint() -> None:
    old = rule_set()
    first, *others = old.categories.categories
    new = with_categories(old, first.model_copy(update={"topic": "elsewhere"}), *others)
    assert changed_parts(old, new) == ()
    assert kinds(differing(old, new), "topics") == {("changed", "billing")}


def test_a_part_has_changed_exactly_where_its_fingerprint_has() -> None:
    """`changed_parts` guesses at no prompt: it is built."""
    old = rule_set()
    for changes in ({"instruction": "Sort these."}, {"ticket_tokens": 512}, {"answer_cue": "Team:"}):
        new = with_categories(old, **changes)
        prints = [build_prompt(r.categories, ["a", "b", "c"], legend=False).fingerprint for r in (old, new)]
        assert ("prompt" in changed_parts(old, new)) is (prints[0] != prints[1]), changes


def test_a_stricter_promise_names_the_certificates_that_are_too_weak() -> None:
    old, new = side(), side(alpha=0.05)
    diff = diff_rules(old, dataclasses.replace(new, artefact=old.artefact))
    assert "certificates: too weak for the new rules (certificate_too_weak): billing, login, bug" in diff.expires


def test_questions_that_are_asked_otherwise_expire_alone() -> None:
    old = asking(0.3)
    (question,) = old.rule_set.questions.questions
    changed = old.rule_set.questions.model_copy(update={"questions": (question.model_copy(update={"ask": "Now?"}),)})
    diff = diff_rules(old, dataclasses.replace(old, rule_set=old.rule_set.model_copy(update={"questions": changed})))
    assert diff.changed_questions == ("urgent",) and diff.changed_parts == ()
    assert kinds(diff, "questions") == {("changed", "urgent.ask")}
    assert any(line.startswith("question urgent: its calibration is void") for line in diff.expires)


def test_rule_tests_name_the_rule_what_came_out_and_rules_without_a_test() -> None:
    wrong = {"name": "t", "text": "water", "expect": {"action": "escalate"}}
    rules = rule_set(
        overrides=[
            {"kind": "keyword", "name": "fire", "any": ["fire"], "tests": [wrong]},
            {"kind": "keyword", "name": "flood", "any": ["flood"]},
        ],
        tests=[{**wrong, "expect": {"action": "score"}}],
    )
    found = run_rule_tests(rules)
    assert [(r.rule, r.failure is None) for r in found.results] == [("fire", False), (None, True)]
    assert found.failed[0].failure == "test 't': expected escalate, got score"
    assert found.untested == ("flood",)


# -- as commands ---------------------------------------------------------------------------------------------------

runner = CliRunner()


def told(*arguments: object) -> tuple[int, str]:
    done = runner.invoke(cli.app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_the_shipped_rule_sets_keep_their_own_tests() -> None:
    for folder in ("helpdesk", "civil_complaints", "city_services"):
        code, said = told("rules", "test", "--rules", ROOT / folder)
        assert code == 0 and "tests hold" in said


def test_a_failing_test_is_exit_code_one(tmp_path: Path) -> None:
    folder = Path(copytree(ROOT / "helpdesk", tmp_path / "helpdesk"))
    rules = (folder / "rules.yaml").read_text(encoding="utf-8")
    assert "action: escalate}" in rules
    (folder / "rules.yaml").write_text(rules.replace("action: escalate}", "action: score}", 1), encoding="utf-8")
    code, said = told("rules", "test", "--rules", folder)
    assert code == 1 and "expected score, got escalate" in said


def test_diff_and_backtest_as_commands(tmp_path: Path) -> None:
    """A log of the desk of these tests, against folders of it on disk."""
    old, new = written(side(0.8), tmp_path / "old"), written(side(0.6), tmp_path / "new")
    file = tmp_path / "decisions.jsonl"
    file.write_bytes(b"".join(log(side(0.8), 200)))
    code, said = told("rules", "diff", old, new, "--log", file)
    assert code == 1 and "certificates: changed billing" in said and "people → billing" in said
    code, said = told("backtest", "--log", file, "--rules", new, "--old", old, "--report", tmp_path / "report")
    assert code == 0 and "people → billing" in said
    assert "would go elsewhere" in (tmp_path / "report/report.html").read_text(encoding="utf-8")
    assert (tmp_path / "report/backtest.json").exists()
    with pytest.raises(ConfigError, match="can be made again"):
        told("backtest", "--log", file, "--rules", ROOT / "helpdesk")


def written(one: Side, folder: Path) -> Path:
    assert one.artefact is not None
    folder.mkdir()
    (folder / "categories.yaml").write_text(one.rule_set.categories.model_dump_json(exclude_unset=True), "utf-8")
    (folder / "rules.yaml").write_text(Rules.model_validate(RULES, strict=False).model_dump_json(exclude_none=True))
    (folder / "calibration.json").write_bytes(one.artefact.to_bytes())
    return folder
