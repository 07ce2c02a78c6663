"""Rules diff: what differs between two versions of a rule set, and what scores and certificates do not survive it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

from worker.core.artefact import Artefact
from worker.core.canonicalisers import normaliser
from worker.core.categories import Category, CategorySet
from worker.core.certificates import Certificate
from worker.core.prompt import build_prompt
from worker.core.rules import RuleSet

ALIKE = 0.8
"""From this ratio on (difflib) two descriptions say the same thing."""
PARTS_OF_A_SPLIT = 2
ListedApart = frozenset({"overrides", "answers", "tests", "topics", "version", "mode"})
"""Parts of rules.yaml that have their own lines, or decide nothing."""
SHOWN_VALUE = 120

Area = Literal[
    "set", "modes", "categories", "prompt", "rules", "overrides", "answers", "questions", "topics", "certificates"
]
Kind = Literal["added", "removed", "renamed", "split", "changed", "moved"]


@dataclass(frozen=True, slots=True)
class Change:
    """One difference, for people: `what` in `area` is now otherwise, and `detail` says how."""

    area: Area
    kind: Kind
    what: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RulesDiff:
    """NEW against OLD. `changed_parts` are names of fingerprints; questions, ids of further questions."""

    old: str
    new: str
    changes: tuple[Change, ...]
    changed_parts: tuple[str, ...]
    """Of the set's own question: a calibration fitted before is none for what is asked now."""
    changed_questions: tuple[str, ...]
    """Further questions that are asked otherwise now: their own calibrations and scores expire."""
    expires: tuple[str, ...]
    """Sentences: what expires, and what does not."""
    two_sets: str | None = None
    """A sentence, where the two are no versions of one rule set."""


@dataclass(frozen=True, slots=True)
class Side:
    """One version as loaded: the rules, and the calibrations beside them."""

    rule_set: RuleSet
    artefact: Artefact | None
    further: Mapping[str, Artefact | None]


def diff_rules(old: Side, new: Side) -> RulesDiff:
    """Everything that differs; what cannot be seen from files (the model) is not looked at."""
    before, after = old.rule_set, new.rule_set
    parts, questions = changed_parts(before, after), changed_questions(before, after)
    changes = [
        *_set(before, after),
        *_modes(before, after),
        *_categories(before.categories, after.categories),
        *_flat(
            "prompt",
            _dump(before.categories.prompt),
            _dump(after.categories.prompt),
        ),
        *_flat("prompt", {"two_levels": _levels(before)}, {"two_levels": _levels(after)}),
        *_flat("rules", _rules(before), _rules(after)),
        *_named("overrides", before.rules.overrides, after.rules.overrides),
        *_named("answers", before.rules.answers, after.rules.answers),
        *_questions(before, after),
        *_flat("topics", _topics(before), _topics(after)),
        *_certificates(old.artefact, new.artefact),
    ]
    return RulesDiff(
        old=version_of(before),
        new=version_of(after),
        changes=tuple(changes),
        changed_parts=parts,
        changed_questions=questions,
        expires=tuple(_expires(old, new, parts, questions)),
        two_sets=_two_sets(before, after, changes),
    )


def version_of(rule_set: RuleSet) -> str:
    """As decisions state it."""
    return f"{rule_set.id}/{rule_set.rules.version}/{rule_set.fingerprint}"


def changed_parts(old: RuleSet, new: RuleSet) -> tuple[str, ...]:
    """Names of the fingerprints that differ between the two as far as files say: not those of model and tokenizer.

    A prompt whose labels the tokenizer chose has the same fingerprint where what goes into it is the same.
    """
    parts = {
        "prompt": _asked(old) != _asked(new),
        "labels": _words(old.categories) != _words(new.categories),
        "categories": old.categories.fingerprint != new.categories.fingerprint,
        "normaliser": _normaliser(old) != _normaliser(new),
    }
    return tuple(name for name, changed in parts.items() if changed)


def changed_questions(old: RuleSet, new: RuleSet) -> tuple[str, ...]:
    """Further questions of both whose calibration the change voids: asked otherwise, or behind another prompt."""
    behind = _asked(old) != _asked(new) or _normaliser(old) != _normaliser(new)
    return tuple(
        question.id
        for question in new.questions.questions
        if (before := old.questions.by_id(question.id)) is not None and (behind or before != question)
    )


def _asked(rule_set: RuleSet) -> tuple[object, ...]:
    """What the prompt fingerprint depends on. The legend is used where labels are letters, which no file tells."""
    categories, length = rule_set.categories, rule_set.rules.length
    words = _words(categories)
    may_be_lettered = not any(c.label for c in categories.categories)
    prompts = [build_prompt(categories, words, legend=False).fingerprint]
    if may_be_lettered:
        prompts.append(build_prompt(categories, words, legend=True).fingerprint)
    read = (length.most_tokens, length.when_cut) if length.read_otherwise else ()
    levels: tuple[object, ...] = ()
    if categories.two_levels is not None:
        levels = (categories.two_levels, tuple((c.parent, c.name, c.description) for c in categories.categories))
    return (tuple(prompts), categories.prompt.orders, read, levels)


def _words(categories: CategorySet) -> list[str]:
    return [category.label or category.id for category in categories.categories]


def _normaliser(rule_set: RuleSet) -> str:
    return normaliser(rule_set.categories.prompt.canonicalise)


def _two_sets(old: RuleSet, new: RuleSet, changes: Sequence[Change]) -> str | None:
    """Two ids are two sets, with topics, cache and consumer group apart; so are two that have no category in common."""
    if old.id != new.id:
        return (
            f"these are two rule sets, '{old.id}' and '{new.id}', and not two versions of one: topics, cache entries, "
            "consumer group and calibrations of the one are none of the other's"
        )
    followed = any(change.area == "categories" and change.kind in ("renamed", "split") for change in changes)
    if followed or {c.id for c in old.categories.routable} & {c.id for c in new.categories.routable}:
        return None
    return f"these have the id '{old.id}' in common and not one category: two rule sets under one id?"


# -- what differs --------------------------------------------------------------------------------------------------


def _set(old: RuleSet, new: RuleSet) -> list[Change]:
    pairs = (
        ("id", old.id, new.id),
        ("rules version", old.rules.version, new.rules.version),
        ("categories version", old.categories.version, new.categories.version),
        ("language", old.categories.language, new.categories.language),
    )
    return [Change("set", "changed", name, f"{a} → {b}") for name, a, b in pairs if a != b]


def _modes(old: RuleSet, new: RuleSet) -> list[Change]:
    """As they are in force: of every category that both have, and of those to come."""
    kept = [c.id for c in new.categories.routable if c.id in old.categories.ids]
    pairs = [("by default", old.rules.mode, new.rules.mode), *((c, old.mode_of(c), new.mode_of(c)) for c in kept)]
    return [Change("modes", "changed", name, f"{a} → {b}") for name, a, b in pairs if a != b]


def _categories(old: CategorySet, new: CategorySet) -> list[Change]:
    before, after = {c.id: c for c in old.categories}, {c.id: c for c in new.categories}
    gone = [c for c in old.categories if c.id not in after]
    come = [c for c in new.categories if c.id not in before]
    changes: list[Change] = []
    for category in old.categories:
        parts = _parts_of(category, come, after.get(category.id))
        if len(parts) >= PARTS_OF_A_SPLIT:
            named = ", ".join(part.id for part, _ in parts)
            changes.append(Change("categories", "split", category.id, f"→ {named} ({parts[-1][1]})"))
            come = [c for c in come if all(c is not part for part, _ in parts)]
            gone = [c for c in gone if c is not category]
    for category in list(gone):
        found = next(((c, why) for c in come if (why := _same(category, c))), None)
        if found is not None:
            changes.append(Change("categories", "renamed", category.id, f"→ {found[0].id} ({found[1]})"))
            gone.remove(category)
            come.remove(found[0])
    changes += [Change("categories", "removed", c.id, c.description) for c in gone]
    changes += [Change("categories", "added", c.id, c.description) for c in come]
    for name in before.keys() & after.keys():
        changes += _flat("categories", _dump(before[name]), _dump(after[name]), f"{name}.")
    kept = [c.id for c in old.categories if c.id in after]
    if kept != [c.id for c in new.categories if c.id in before]:
        changes.append(Change("categories", "moved", "order", "label order decides between equals, and is asked in"))
    return changes


def _parts_of(category: Category, come: Sequence[Category], left: Category | None) -> list[tuple[Category, str]]:
    """New categories that were made of this one, each with what shows it; `left` is what is still called so."""
    found = []
    for c in come:
        shared = set(category.examples) & set(c.examples)
        if shared and (left is None or not shared & set(left.examples)):
            found.append((c, "they show its examples"))
        elif c.parent == category.id:
            found.append((c, "it is their parent"))
        elif c.id.startswith(f"{category.id}_"):
            found.append((c, "they begin with its id"))
    if left is not None and found and len(found) < PARTS_OF_A_SPLIT:
        # What is left of it is one part: it must have lost something.
        return [(left, ""), *found] if set(category.examples) - set(left.examples) else []
    return found


def _same(old: Category, new: Category) -> str:
    """What shows that the two are one category under another id; empty where nothing does."""
    if old.topic is not None and old.topic == new.topic:
        return "same topic"
    if old.description == new.description:
        return "same description"
    if old.examples and set(old.examples) == set(new.examples):
        return "same examples"
    if old.name == new.name:
        return "same name"
    return "description alike" if SequenceMatcher(None, old.description, new.description).ratio() >= ALIKE else ""


def _rules(rule_set: RuleSet) -> dict[str, Any]:
    found = {name: value for name, value in _dump(rule_set.rules).items() if name not in ListedApart}
    demands = {name: {k: v for k, v in own.items() if k != "mode"} for name, own in found["categories"].items()}
    return found | {"categories": {name: own for name, own in demands.items() if any(own.values())}}


def _levels(rule_set: RuleSet) -> Any:
    levels = rule_set.categories.two_levels
    return None if levels is None else _dump(levels)


def _dump(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = model.model_dump(mode="json", by_alias=True)
    return found


def _topics(rule_set: RuleSet) -> dict[str, Any]:
    """As they are in force, defaults filled in."""
    named = {"input": rule_set.input_topic, "human": rule_set.human_topic, "dead_letter": rule_set.dead_letter_topic}
    named["decisions"] = rule_set.decisions_topic
    if rule_set.rules.topics.answers is not None:
        named["people's answers"] = rule_set.rules.topics.answers
    return named | {c.id: rule_set.categories.topic(c.id) for c in rule_set.categories.routable}


def _flat(area: Area, old: Mapping[str, Any], new: Mapping[str, Any], above: str = "") -> list[Change]:
    """Values that differ, by their path."""
    changes: list[Change] = []
    for name in dict.fromkeys((*old, *new)):
        a, b, path = old.get(name), new.get(name), f"{above}{name}"
        if a == b:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            changes += _flat(area, a, b, f"{path}.")
        elif isinstance(a, list) and isinstance(b, list) and not (area == "prompt" and name == "canonicalise"):
            lost, won = [x for x in a if x not in b], [x for x in b if x not in a]
            said = f"{len(lost)} removed, {len(won)} added" if lost or won else "order"
            changes.append(Change(area, "changed", path, said))
        elif name not in old:
            changes.append(Change(area, "added", path, _value(b)))
        elif name not in new:
            changes.append(Change(area, "removed", path, _value(a)))
        else:
            changes.append(Change(area, "changed", path, f"{_value(a)} → {_value(b)}"))
    return changes


def _value(value: Any) -> str:
    said = "nothing" if value is None else str(value)
    return said if len(said) <= SHOWN_VALUE else said[: SHOWN_VALUE - 1] + "…"


def _named(area: Area, old: Sequence[Any], new: Sequence[Any]) -> list[Change]:
    """Rules in order, known by their names; tests decide nothing and are left out."""
    before = {rule.name: rule.model_dump(mode="json", exclude={"tests"}) for rule in old}
    after = {rule.name: rule.model_dump(mode="json", exclude={"tests"}) for rule in new}
    changes = [Change(area, "removed", name) for name in before if name not in after]
    changes += [Change(area, "added", name) for name in after if name not in before]
    for name, rule in before.items():
        if name in after:
            changes += _flat(area, rule, after[name], f"{name}: ")
    if [name for name in before if name in after] != [name for name in after if name in before]:
        changes.append(Change(area, "moved", "order", "the first that matches decides"))
    return changes


def _questions(old: RuleSet, new: RuleSet) -> list[Change]:
    before, after = ({q.id: _dump(q) for q in side.questions.questions} for side in (old, new))
    changes = [Change("questions", "removed", name) for name in before if name not in after]
    changes += [Change("questions", "added", name) for name in after if name not in before]
    for name in before:
        if name in after:
            changes += _flat("questions", before[name], after[name], f"{name}.")
    return changes


def _certificates(old: Artefact | None, new: Artefact | None) -> list[Change]:
    """What each category may do, before and after."""
    if (old.digest if old else None) == (new.digest if new else None):
        return []
    said = [
        "none" if side is None else f"{side.created_at} ({side.form}, {side.calibrator.kind})" for side in (old, new)
    ]
    changes = [Change("certificates", "changed", "calibration", " → ".join(said))]
    before, after = old.by_category if old else {}, new.by_category if new else {}
    for name in dict.fromkeys((*before, *after)):
        a, b = (_threshold(side.get(name)) for side in (before, after))
        if a != b:
            changes.append(Change("certificates", "changed", name, f"{a} → {b}"))
    return changes


def _threshold(certificate: Certificate | None) -> str:
    if certificate is None or not certificate.certified:
        return "no certificate"
    return f"{certificate.passes_in_words()} (alpha {certificate.alpha:.3g}, delta {certificate.delta:.3g})"


# -- what expires --------------------------------------------------------------------------------------------------


def in_force(side: Side, old: Side | None = None) -> tuple[str, ...]:
    """Fingerprints by which the artefact beside the rules cannot be in force; empty where files show none.

    Categories and normaliser are told from the artefact itself, prompt and labels only against another version that
    has the same artefact's: both were fitted on the same prompt, and one of them asks otherwise.
    """
    artefact, rules = side.artefact, side.rule_set
    if artefact is None:
        return ()
    prints = artefact.fingerprints
    parts = dict.fromkeys(changed_parts(old.rule_set, rules) if old is not None else (), False)
    if old is not None and old.artefact is not None:
        before = old.artefact.fingerprints
        parts = {name: getattr(before, name) == getattr(prints, name) for name in parts}
    parts["categories"] = prints.categories != rules.categories.fingerprint or artefact.labels != rules.categories.ids
    parts["normaliser"] = prints.normaliser != _normaliser(rules)
    return tuple(name for name in type(prints).model_fields if parts.get(name))


def _expires(old: Side, new: Side, parts: Sequence[str], questions: Sequence[str]) -> list[str]:
    said = []
    renamed_set = old.rule_set.id != new.rule_set.id
    if parts or renamed_set:
        why = ", ".join([*parts, *(["id of the set"] if renamed_set else [])])
        said.append(f"cache: every score of the set's own question is made anew ({why})")
    else:
        said.append("cache: scores of the set's own question stay")
    void = in_force(new, old)
    if new.artefact is None:
        said.append("certificates: none beside the new rules, so every ticket goes to people (uncalibrated)")
    elif void:
        said.append(
            f"certificates: all void ({', '.join(void)}), every ticket goes to people (fingerprint_changed) until "
            "`ticket-router calibrate`"
        )
    else:
        said.append("certificates: in force, as far as files tell; the model is asked at start")
        weak = [c for c, one in new.artefact.by_category.items() if one.certified and _too_weak(one, c, new.rule_set)]
        if weak:
            said.append(f"certificates: too weak for the new rules (certificate_too_weak): {', '.join(weak)}")
    for name in questions:
        before, after = old.further.get(name), new.further.get(name)
        if after is not None and before is not None and before.digest == after.digest:
            said.append(f"question {name}: its calibration is void; rules take it as unknown until it is calibrated")
        said.append(f"question {name}: its scores are made anew")
    return said


def _too_weak(certificate: Certificate, category: str, rule_set: RuleSet) -> bool:
    alpha, delta = rule_set.demand(category)
    looser = certificate.procedure == "misroutes_per_ticket" and rule_set.rules.target != "misroutes_per_ticket"
    return looser or certificate.alpha > alpha or certificate.delta > delta
