"""Modes: what is carried out of a decision, of which category; never how it is decided."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.sets import artefact, rule_set, scores
from worker.core.modes import MODES, Mode, stricter
from worker.core.policy import Calibration, Decision, carried_out, decide, decide_override, escalate_unscored, reason
from worker.core.rules import RuleSet
from worker.core.ticket import Ticket

SURE = scores(0.8, 0.1, 0.05)
BY_RULE = {"kind": "field", "name": "monitoring", "pointer": "/channel", "equals": "alerts", "then": "route"}


def routed(rules: RuleSet) -> Decision:
    decision = decide(SURE, rules, Calibration(artefact(rules)))
    assert decision.action == "route"
    return decision


def test_the_stricter_of_two_modes_carries_out_less() -> None:
    assert MODES == ("shadow", "assist", "auto")
    for one, other in itertools.product(MODES, repeat=2):
        assert MODES.index(stricter(one, other)) == min(MODES.index(one), MODES.index(other))


def test_a_category_goes_live_while_those_that_state_no_mode_keep_the_sets() -> None:
    rules = rule_set(mode="assist", categories={"billing": {"mode": "auto"}, "login": {"alpha": 0.05}})
    assert [rules.mode_of(c) for c in ("billing", "login", "bug", None, "none")] == ["auto", *["assist"] * 4]
    assert carried_out(routed(rules), rules).topic == "desk.billing"
    assert rule_set().mode_of("billing") == "auto"


@pytest.mark.parametrize("brake", MODES)
@pytest.mark.parametrize("own", MODES)
@pytest.mark.parametrize("of_set", MODES)
def test_a_brake_only_ever_holds_back(of_set: Mode, own: Mode, brake: Mode) -> None:
    rules = rule_set(mode=of_set, categories={"billing": {"mode": own}})
    held = rules.at_most(brake)
    assert held.mode_of("billing") == stricter(own, brake)
    assert held.mode_of("bug") == stricter(of_set, brake)
    assert (held.fingerprint == rules.fingerprint) is (
        stricter(own, brake) == own and stricter(of_set, brake) == of_set
    )


def test_no_mode_asks_for_another_calibration() -> None:
    plain, careful = rule_set(), rule_set(mode="shadow", categories={"bug": {"mode": "assist"}})
    assert plain.categories == careful.categories
    assert decide(SURE, plain, Calibration(artefact(plain))) == decide(SURE, careful, Calibration(artefact(plain)))
    assert plain.fingerprint != careful.fingerprint  # the rules decide otherwise: their decisions have other ids
    assert rule_set(categories={"bug": {}}).fingerprint == rule_set(categories={"bug": {"mode": None}}).fingerprint


def test_where_people_answer_decides_nothing() -> None:
    assert rule_set(topics={"answers": "desk.answers"}).fingerprint == rule_set().fingerprint


@pytest.mark.parametrize("taken", ["desk.human", "desk.decisions", "desk.billing", "tickets.desk"])
def test_answers_have_a_topic_of_their_own(taken: str) -> None:
    with pytest.raises(ValueError, match=taken):
        rule_set(topics={"answers": taken})


@pytest.mark.parametrize("mode", ["shadow", "assist"])
def test_a_rule_that_routes_without_a_score_obeys_the_mode_too(mode: Mode) -> None:
    rules = rule_set(overrides=[{**BY_RULE, "category": "bug"}], categories={"bug": {"mode": mode}})
    decision = decide_override(Ticket(id="1", text="x", channel="alerts"), rules)
    assert decision is not None and decision.action == "route"
    held = carried_out(decision, rules)
    assert (held.action, held.topic, held.reasons[0].code) == ("escalate", "desk.human", f"{mode}_mode")


@given(st.sampled_from(MODES), st.sampled_from([None, *MODES]), st.lists(st.floats(0.01, 1), min_size=3, max_size=3))
def test_only_auto_routes_and_an_escalation_stays_as_it_is(
    of_set: Mode, own: Mode | None, weights: list[float]
) -> None:
    rules = rule_set(mode=of_set, categories={"billing": {"mode": own}})
    decision = decide(scores(*(w / sum(weights) for w in weights)), rules, Calibration(artefact(rules)))
    done = carried_out(decision, rules)
    if decision.action == "escalate" or rules.mode_of(decision.category) == "auto":
        assert done is decision
    else:
        assert (done.action, done.topic) == ("escalate", "desk.human")
        assert done.category == decision.category
    unscored = escalate_unscored(rules, reason("too_long", detail="x"))
    assert carried_out(unscored, rules) is unscored
