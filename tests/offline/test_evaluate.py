"""A held-out check: the same decisions as the worker's, on tickets that the artefact has not seen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.offline.populations import IDS, question, scored
from worker.core.binomial import clopper_pearson
from worker.core.policy import Calibration, decide
from worker.errors import ArtefactError, ConfigError
from worker.offline.calibrate import CalibrationResult, calibrate
from worker.offline.evaluate import Evaluation, evaluate
from worker.offline.measures import measure
from worker.offline.scoring import ScoredTicket
from worker.runtime.question import Question

ASKED = question()


@pytest.fixture(scope="module")
def calibrated() -> CalibrationResult:
    return calibrate(ASKED, scored(800, 1), seed=1, created_at="2026-01-01T00:00:00Z")


@pytest.fixture(scope="module")
def evaluated(calibrated: CalibrationResult) -> Evaluation:
    return evaluate(ASKED, calibrated.artefact, scored(600, 2, prefix="e"), seed=1)


def recount(asked: Question, result: CalibrationResult, tickets: Sequence[ScoredTicket]) -> tuple[int, int]:
    state, ids = Calibration(result.artefact), asked.rule_set.categories.ids
    decided = [(t, decide(t.scores, asked.rule_set, state)) for t in tickets]
    routed = [(t, d) for t, d in decided if d.action == "route"]
    return len(routed), sum(t.label < 0 or ids[t.label] != d.category for t, d in routed)


def test_routed_and_wrong_are_what_the_evaluator_says(calibrated: CalibrationResult, evaluated: Evaluation) -> None:
    overall = evaluated.overall
    assert (overall.m, overall.k) == recount(ASKED, calibrated, scored(600, 2, prefix="e"))
    assert overall.n == 600 == evaluated.measures.n
    low, high = clopper_pearson(overall.k, overall.m)
    assert (overall.risk.value, overall.risk.lower, overall.risk.upper) == (overall.k / overall.m, low, high)
    assert overall.coverage.value == overall.m / 600
    assert overall.alpha == 0.1
    assert sum(part.m for part in evaluated.certificates) == overall.m
    assert sum(count for _, count in evaluated.escalated) == 600 - overall.m


def test_slices_add_up_to_the_whole(evaluated: Evaluation) -> None:
    for rows in (evaluated.categories, evaluated.languages):
        assert sum(row.n for row in rows) == 600
        assert sum(row.routed for row in rows) == evaluated.overall.m
        assert sum(row.wrong for row in rows) == evaluated.overall.k
    assert [row.name for row in evaluated.categories] == [*IDS, "(none)"]
    assert [row.name for row in evaluated.languages] == ["en", "ko"]
    assert evaluated.measures.confusion[-1] != (0,) * len(IDS)
    assert sum(map(sum, evaluated.measures.confusion)) == 600


def test_tickets_behind_the_calibration_are_left_out(calibrated: CalibrationResult) -> None:
    old = [dataclasses.replace(t, id=f"again{t.id}", text=t.text.upper() + " 12") for t in scored(800, 1)]
    mixed = evaluate(ASKED, calibrated.artefact, [*old[:300], *scored(200, 2, prefix="e")], seed=1)
    assert mixed.seen == 300 and mixed.measures.n == 200
    with pytest.raises(ConfigError, match="300 were used to calibrate"):
        evaluate(ASKED, calibrated.artefact, old[:300], seed=1)


def test_near_duplicates_rules_and_unscored_tickets_are_counted_apart(calibrated: CalibrationResult) -> None:
    tickets = scored(200, 2, prefix="e")
    echo = [dataclasses.replace(t, id=f"z{t.id}") for t in tickets[:7]]
    lost = [ScoredTicket("lost", "a very long one", 0, problem="too_long")]
    found = evaluate(ASKED, calibrated.artefact, [*tickets, *echo, *lost], seed=1)
    assert (found.tickets, found.near_duplicates, found.unscored, found.measures.n) == (208, 7, 1, 200)
    strict = question(overrides=[{"kind": "keyword", "name": "all", "any": ["about"]}])
    with pytest.raises(ConfigError, match="200 are decided by a rule"):
        evaluate(strict, calibrated.artefact, tickets, seed=1)


def test_an_artefact_of_another_model_is_refused(calibrated: CalibrationResult) -> None:
    other = dataclasses.replace(ASKED, identity=dataclasses.replace(ASKED.identity, model="another"))
    with pytest.raises(ArtefactError, match="model changed"):
        evaluate(other, calibrated.artefact, scored(50, 2, prefix="e"), seed=1)


def test_tickets_with_labels_that_were_not_returned_are_refused(calibrated: CalibrationResult) -> None:
    tickets = scored(50, 2, prefix="e")
    tickets[7] = dataclasses.replace(tickets[7], unknown=(1,))
    with pytest.raises(ConfigError, match="on 1 of 50 tickets"):
        evaluate(ASKED, calibrated.artefact, tickets, seed=1)


def spoilt(share: float, seed: int) -> list[ScoredTicket]:
    generator = np.random.default_rng(seed)
    return [
        dataclasses.replace(t, label=(t.label + 1) % len(IDS)) if generator.random() < share else t
        for t in scored(600, seed, prefix="e")
    ]


def test_alpha_is_called_broken_beyond_chance_when_it_is_and_hardly_ever_when_it_is_not(
    calibrated: CalibrationResult,
) -> None:
    broken = [evaluate(ASKED, calibrated.artefact, spoilt(0.3, s), seed=1) for s in range(20, 23)]
    assert all(e.exceeded_beyond_chance and e.overall.exceeded for e in broken)
    kept = [evaluate(ASKED, calibrated.artefact, scored(600, s, prefix="e"), seed=1) for s in range(40, 52)]
    assert sum(e.exceeded_beyond_chance for e in kept) <= 2


def test_a_single_bad_certificate_is_seen_among_good_ones(calibrated: CalibrationResult) -> None:
    victim = [c for c in calibrated.certificates if c.basis == "own" and c.certified][-1]
    index = IDS.index(victim.group)
    tickets = scored(900, 2, prefix="e")
    tickets = [dataclasses.replace(t, label=(index + 1) % 8) if t.label == index and i % 2 == 0 else t
               for i, t in enumerate(tickets)]  # fmt: skip
    found = evaluate(ASKED, calibrated.artefact, tickets, seed=1)
    assert [part.name for part in found.certificates if part.exceeded_beyond_chance] == [victim.group]
    assert found.exceeded_beyond_chance and not found.overall.exceeded


def test_misroutes_are_counted_per_ticket_of_all_traffic() -> None:
    asked = question(target="misroutes_per_ticket")
    result = calibrate(asked, scored(300, 1), seed=1, created_at="2026-01-01T00:00:00Z", target="misroutes_per_ticket")
    found = evaluate(asked, result.artefact, scored(600, 2, prefix="e"), seed=1)
    assert found.overall.risk.value == found.overall.k / 600
    assert found.certificates[0].risk.value == found.overall.k / 600


def test_intervals_hold_the_values_and_nothing_routed_is_no_error(calibrated: CalibrationResult) -> None:
    empty = calibrate(ASKED, scored(15, 3, low_mass=0.0), seed=1, created_at="2026-01-01T00:00:00Z")
    found = evaluate(ASKED, empty.artefact, scored(100, 2, prefix="e"), seed=1)
    assert found.overall.m == 0 and math.isnan(found.overall.risk.value)
    assert not found.overall.exceeded and not found.exceeded_beyond_chance
    measures: Any = found.measures
    for name in ("accuracy", "nll", "brier", "ece", "macro_f1", "aurc"):
        measured = getattr(measures, name)
        assert measured.lower <= measured.upper
        if name != "ece":  # binned ECE is biased upwards, and resampling once more so
            assert measured.lower <= measured.value <= measured.upper


def test_measures_survive_a_set_without_any_ticket_in_scope() -> None:
    found = measure([[0.7, 0.3], [0.6, 0.4]], [0, 0], [0.7, 0.6], [-1, -1], seed=1)
    assert found.out_of_scope == 2 and math.isnan(found.nll.value)
    assert found.to_dict()["nll"] == {"value": None, "lower": None, "upper": None}
