"""Labels that an engine did not return: nothing routes on them, whatever they are."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.sets import artefact, certificate, rule_set, scores
from worker.core.artefact import Artefact
from worker.core.calibration import Calibrator, Kind
from worker.core.certificates import MarginGate, ScoreForm
from worker.core.partial_scores import settle
from worker.core.policy import Calibration, Decision, calibration_in_force, decide
from worker.core.scores import LabelScores

RULES = rule_set("billing", "login", "bug", "refund", none=True)
SIZE = len(RULES.categories.ids)
KINDS: tuple[Kind, ...] = ("identity", "temperature", "bias_temperature", "prior_match", "vector", "dirichlet")


def calibrator(kind: Kind, dice: random.Random) -> Calibrator:
    beta = dice.uniform(0.2, 3.0)
    scale = tuple(dice.uniform(0.2, 2.0) if kind == "vector" else beta for _ in range(SIZE))
    bias = tuple(0.0 if kind in ("identity", "temperature") else dice.gauss(0.0, 1.0) for _ in range(SIZE))
    matrix: tuple[tuple[float, ...], ...] = ()
    if kind == "dirichlet":
        near = dice.choice((0.0, 0.002, 0.05))
        matrix = tuple(
            tuple(dice.uniform(0.5, 1.5) if i == j else dice.gauss(0.0, near) for j in range(SIZE)) for i in range(SIZE)
        )
    return Calibrator(kind, (1.0,) * SIZE if kind == "identity" else scale, bias, matrix)


def top_k(dice: random.Random) -> LabelScores:
    """What a server that returns only its likeliest tokens says about a ticket."""
    logits = [dice.gauss(0.0, 3.0) for _ in range(SIZE + 4)]
    total = math.log(sum(map(math.exp, logits)))
    logprobs = [logit - total for logit in logits]
    bound = sorted(logprobs, reverse=True)[dice.randrange(1, SIZE)]
    labels = logprobs[:SIZE]
    unknown = tuple(place for place, value in enumerate(labels) if value < bound)
    return LabelScores.from_logprobs(tuple(max(value, bound) for value in labels), unknown)


def completed(partial: LabelScores, dice: random.Random) -> LabelScores:
    """One of the complete answers that the partial one allows."""
    room = max(0.0, 1.0 - partial.mass)
    filled = list(partial.logprobs)
    for place in partial.unknown:
        bound = min(partial.logprobs[place], math.log(room / len(partial.unknown)) if room > 0 else -300.0)
        filled[place] = dice.choice((bound, bound - dice.expovariate(1.0), bound - 150.0))
    return LabelScores.from_logprobs(tuple(filled))


def desk(kind: Kind, form: ScoreForm, dice: random.Random) -> Artefact:
    gate = MarginGate(True, dice.uniform(0.0, 0.3), 100, 50, 0, 0.01, 0.1) if dice.random() < 0.5 else None
    low, high = (0.0, 3.0) if form == "raw_margin" else (0.2, 0.95)
    threshold = dice.uniform(low, high)
    categories = [c.id for c in RULES.categories.routable]
    return artefact(
        RULES,
        certificate(*categories, threshold=threshold, score=form),
        form=form,
        calibrator=calibrator(kind, dice),
        margin_gate=gate,
        min_label_mass=dice.choice((0.1, 0.6)),
    )


@pytest.mark.parametrize("form", ["raw_margin", "max_probability"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_a_partial_answer_decides_only_what_every_complete_one_would(kind: Kind, form: ScoreForm, seed: int) -> None:
    dice = random.Random(seed)
    partial, calibration = top_k(dice), Calibration(desk(kind, form, dice))
    decision = decide(partial, RULES, calibration)
    (why,) = decision.reasons
    if why.code == "label_not_returned" or not partial.unknown:
        assert decision.action == "escalate" or not partial.unknown
        return
    for _ in range(8):
        complete = decide(completed(partial, dice), RULES, calibration)
        assert (complete.action, complete.topic, complete.reasons[0].code) == (
            decision.action,
            decision.topic,
            why.code,
        )
        if decision.action == "route":
            assert complete.category == decision.category
            assert complete.probability is not None and decision.probability is not None
            assert complete.probability >= decision.probability - 1e-9
        if decision.top:
            found = {ranked.category: ranked.probability for ranked in complete.top}
            assert all(found.get(r.category, 1.0) >= r.probability - 1e-9 for r in decision.top)


@pytest.mark.parametrize("kind", KINDS)
def test_partial_answers_are_not_all_given_up(kind: Kind) -> None:
    """Escalating everything would be sound too."""
    dice = random.Random(7)
    codes = []
    for _ in range(400):
        partial = top_k(dice)
        if partial.unknown:
            codes.append(decide(partial, RULES, Calibration(desk(kind, "max_probability", dice))).reasons[0].code)
    assert codes.count("certified") > len(codes) / 20
    assert codes.count("label_not_returned") > len(codes) / 20


def hidden(*probabilities: float | None, bound: float) -> LabelScores:
    unknown = tuple(place for place, p in enumerate(probabilities) if p is None)
    return LabelScores.from_logprobs(tuple(math.log(bound if p is None else p) for p in probabilities), unknown)


THREE = rule_set()


def decided(partial: LabelScores, **changes: object) -> Decision:
    return decide(partial, THREE, Calibration(artefact(THREE, **changes)))  # type: ignore[arg-type]


def test_the_score_of_a_routed_partial_answer_is_the_least_possible_one() -> None:
    decision = decided(hidden(0.8, None, None, bound=0.05))
    assert (decision.action, decision.category) == ("route", "billing")
    assert decision.probability == pytest.approx(0.8 / 0.9, abs=1e-8)
    assert [ranked.category for ranked in decision.top] == ["billing"]
    assert decision.margin == pytest.approx(0.75 / 0.9, abs=1e-8)


def test_a_threshold_inside_the_range_goes_to_people_for_the_unknown_labels_sake() -> None:
    partial = hidden(0.8, None, None, bound=0.05)
    for threshold, code in ((0.8, "certified"), (0.95, "label_not_returned"), (1.0, "below_threshold")):
        made = artefact(THREE, certificate("billing", threshold=threshold))
        assert decide(partial, THREE, Calibration(made)).reasons[0].code == code


def test_an_unknown_label_may_be_the_first_where_the_calibrator_raises_it() -> None:
    raised = Calibrator("bias_temperature", (1.0,) * 3, (0.0, 4.0, 0.0))
    decision = decided(hidden(0.8, None, None, bound=0.05), calibrator=raised)
    assert (decision.action, decision.reasons[0].code) == ("escalate", "label_not_returned")
    assert "which label is the first" in decision.reasons[0].sentence
    assert decision.category == "billing"  # the best guess for whoever reads the ticket


def test_a_returned_label_that_only_equals_the_bound_is_not_surely_the_first() -> None:
    assert decided(hidden(0.2, None, None, bound=0.2)).reasons[0].code == "label_not_returned"


def test_no_returned_label_is_too_little_mass_only_where_that_is_sure() -> None:
    assert decided(hidden(None, None, None, bound=0.01)).reasons[0].code == "low_label_mass"
    assert decided(hidden(None, None, None, bound=0.2)).reasons[0].code == "label_not_returned"


def test_a_mass_that_the_unknown_labels_could_lift_over_the_floor_is_not_low() -> None:
    partial = hidden(0.09, 0.005, None, bound=0.02)
    decision = decided(partial)
    assert decision.reasons[0].code == "label_not_returned"
    assert "enough probability" in decision.reasons[0].sentence


def test_without_a_calibration_the_guess_is_a_returned_label() -> None:
    decision = decide(
        hidden(None, 0.05, 0.04, bound=0.2), THREE, calibration_in_force(None, artefact(THREE).fingerprints)
    )
    assert (decision.category, decision.reasons[0].code) == ("login", "uncalibrated")


def test_a_complete_answer_is_settled_too_and_by_its_exact_score() -> None:
    complete = scores(0.8, 0.1, 0.05)
    for kind in ("identity", "vector"):
        made = Calibrator(kind, (1.0,) * 3, (0.0,) * 3)  # type: ignore[arg-type]
        settled = settle("max_probability", made, complete)
        assert settled is not None
        assert settled.score.low < made.apply_one(complete.logprobs)[0] < settled.score.high
        assert settled.score.high - settled.score.low < 1e-8


@pytest.mark.parametrize("unknown", [(1, 0), (0, 0), (3,), (-1,)])
def test_places_of_unknown_labels_must_be_places(unknown: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="places"):
        LabelScores.from_logprobs((-1.0, -2.0, -3.0), unknown)
