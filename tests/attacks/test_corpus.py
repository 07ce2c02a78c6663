"""The attack corpus: what it holds, and that what looks at tickets before the model does finds it."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.core.test_normalise import _all_markers
from worker.adapters.files import SAMPLES_FILE, Labelled, load_labelled, load_rule_set
from worker.core.budget import Budget, fit_ticket
from worker.core.normalise import canonical
from worker.core.rules import RuleSet
from worker.core.steering import flagger_for
from worker.core.suspicion import without
from worker.offline.attack_corpus import DISGUISES, KINDS, LANGUAGES, Target, Template, load_corpus

ROOT = Path(__file__).parents[2] / "routing_rules"
CORPUS = load_corpus()
SETS = ["helpdesk", "civil_complaints"]
PLAIN_WORDS = {"length"}
"""Kinds whose templates may repeat a category's name and nothing else: a ticket about something is no attack."""
LEAST_FOUND = {"label_echo": 0.97, "fake_list": 0.85, "turn_forging": 1.0, "authority": 0.95}


@cache
def desk(name: str) -> tuple[RuleSet, tuple[Labelled, ...]]:
    rules = load_rule_set(ROOT / name)
    samples = load_labelled(ROOT / name / SAMPLES_FILE, rules.categories.ids)
    return rules, tuple(t for t in samples if t.label != "none")


def attacks(name: str, kind: str) -> list[tuple[Template, Labelled, str]]:
    """Every template of a kind around a ticket of its own: template, ticket, what its author sends."""
    rules, honest = desk(name)
    dice = random.Random(7)
    found = []
    for template in CORPUS:
        if template.kind == kind:
            ticket = dice.choice(honest)
            target = dice.choice([c for c in rules.categories.routable if c.id != ticket.label])
            found.append((template, ticket, template.attack(ticket.text, Target.of(rules, target))))
    return found


def test_there_are_a_few_dozen_of_each_kind_in_both_languages() -> None:
    counts = Counter((t.kind, t.language) for t in CORPUS)
    assert set(counts) == {(kind, language) for kind in KINDS for language in LANGUAGES}
    assert min(counts.values()) >= 24
    assert len(set(CORPUS)) == len(CORPUS)
    assert all("{ticket}" in t.text or t.how.startswith("x") for t in CORPUS)
    assert {t.how for t in CORPUS if t.kind == "unicode"} == set(DISGUISES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETS)
def test_no_attack_spells_a_control_token_once_it_is_canonical(name: str, kind: str) -> None:
    markers = _all_markers()
    for template, _, text in attacks(name, kind):
        clean = canonical(text)
        assert canonical(clean) == clean
        assert not [marker for marker in markers if marker in clean], template


@pytest.mark.parametrize("kind", LEAST_FOUND)
@pytest.mark.parametrize("name", SETS)
def test_what_addresses_the_router_is_found_in_nearly_every_attack(name: str, kind: str) -> None:
    flagger = flagger_for(desk(name)[0])
    tried = attacks(name, kind)
    missed = [template.text for template, _, text in tried if not flagger.find(canonical(text))]
    assert len(missed) <= (1 - LEAST_FOUND[kind]) * len(tried), missed


@pytest.mark.parametrize("name", SETS)
def test_without_what_was_found_mostly_the_honest_ticket_is_left(name: str) -> None:
    flagger = flagger_for(desk(name)[0])
    whole = 0
    tried = attacks(name, "label_echo")
    for _, ticket, text in tried:
        clean = canonical(text)
        left = without(clean, flagger.find(clean))
        whole += left.rstrip(" .") == canonical(ticket.text).rstrip(" .")
    assert whole >= 0.5 * len(tried)  # of the rest too much is left out, which costs the ticket its automation


@pytest.mark.parametrize("name", SETS)
def test_no_attack_is_read_beyond_the_budget(name: str) -> None:
    budget = Budget(500, 100_000)
    for template, _, text in attacks(name, "length"):
        plan = fit_ticket(canonical(text), budget)
        try:
            asked = next(plan)
            while True:
                assert len(asked) <= 16 * budget.tokens, template
                asked = plan.send(len(asked.encode()))
        except StopIteration as end:
            assert len(end.value.text.encode()) <= budget.tokens, template
