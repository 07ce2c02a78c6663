"""Reliability metrics against golden values, scikit-learn and hand-worked cases."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.core.reliability import (
    Band,
    accuracy,
    adaptive_calibration_error,
    aurc,
    bands,
    bootstrap_ece,
    brier,
    calibration_error,
    classwise_calibration_error,
    confusion,
    coverage_at_risk,
    excess_aurc,
    expected_risks,
    macro_f1,
    maximum_calibration_error,
    monotonicity,
    nll,
    risk_at_coverage,
    risk_coverage,
    top_label,
)

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())["arrays"]


def measured(array: dict[str, Any]) -> dict[str, float]:
    p, y = np.array(array["probs"]), np.array(array["labels"])
    confidence, correct = top_label(p, y)
    wrong = ~correct
    risks = expected_risks(confidence, wrong)
    n = len(y)
    return {
        "accuracy": accuracy(p, y),
        "macro_f1": macro_f1(confusion(p.argmax(axis=1), y, p.shape[1])),
        "nll": nll(p, y),
        "brier_sum": brier(p, y),
        **{f"ece_{bins}": calibration_error(confidence, correct, bins) for bins in (4, 5, 10, 15)},
        "mce_15": maximum_calibration_error(confidence, correct, 15),
        f"adaptive_ece_{array['adaptive_bins']}": adaptive_calibration_error(
            confidence, correct, array["adaptive_bins"]
        ),
        "classwise_ece_15": classwise_calibration_error(p, y, 15),
        **{f"coverage_at_risk_{t}": coverage_at_risk(confidence, wrong, t) for t in (0.05, 0.1, 0.2)},
        **{f"selective_accuracy_at_{c}": 1 - risk_at_coverage(confidence, wrong, c) for c in (0.25, 0.5, 0.75)},
        "aurc_mean": aurc(confidence, wrong),
        "eaurc_mean": excess_aurc(confidence, wrong),
        "aurc_optimal": aurc(confidence, wrong) - excess_aurc(confidence, wrong),
        "aurc_trapezoid_normalised": float(np.trapezoid(risks, dx=1 / n) / (1 - 1 / n)),
    }


TIE_DEPENDENT = ("coverage_at_risk", "selective_accuracy", "aurc_mean", "eaurc", "aurc_trapezoid")


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_metrics_equal_the_values_that_independent_implementations_agree_on(name: str) -> None:
    array = GOLDEN[name]
    tied = len(risk_coverage(*top_label_errors(array))) < len(array["labels"])
    found, compared = measured(array), 0
    for metric, golden in array["golden"].items():
        if not golden["agreed"] or metric == "temperature_T" or (tied and metric.startswith(TIE_DEPENDENT)):
            continue
        assert found[metric] == pytest.approx(golden["value"], abs=1e-6), metric
        compared += 1
    assert compared >= (6 if tied else 15)


def top_label_errors(array: dict[str, Any]) -> tuple[Any, Any]:
    confidence, correct = top_label(array["probs"], array["labels"])
    return confidence, ~correct


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_ties_are_treated_as_blocks(name: str) -> None:
    array, ties = GOLDEN[name], GOLDEN[name]["tie_block"]
    scores, wrong = top_label_errors(array)
    assert aurc(scores, wrong) == pytest.approx(ties["aurc_tie_expected"], abs=1e-9)
    assert excess_aurc(scores, wrong) == pytest.approx(
        ties["aurc_tie_expected"] - array["golden"]["aurc_optimal"]["value"], abs=1e-9
    )
    for target, coverage in ties["coverage_at_risk_tieblock"].items():
        assert coverage_at_risk(scores, wrong, float(target)) == pytest.approx(coverage, abs=1e-9)
    points = [(point.coverage, point.risk) for point in risk_coverage(scores, wrong)]
    np.testing.assert_allclose(points, ties["threshold_points"], atol=1e-9)


@pytest.mark.parametrize("bins", [5, 10, 15])
def test_a_confidence_on_an_edge_belongs_to_the_lower_bin(bins: int) -> None:
    """Array C has confidences on bin edges, where libraries disagree; ours are (lo, hi]."""
    array = GOLDEN["C"]
    found = calibration_error(*top_label(array["probs"], array["labels"]), bins)
    assert found == pytest.approx(array["golden"][f"ece_{bins}"]["value"], abs=1e-9)
    classwise = classwise_calibration_error(array["probs"], array["labels"], 15)
    assert classwise == pytest.approx(array["golden"]["classwise_ece_15"]["value"], abs=1e-9)


def test_metrics_equal_scikit_learns() -> None:
    from sklearn.metrics import accuracy_score, brier_score_loss, confusion_matrix, f1_score, log_loss

    generator = np.random.default_rng(3)
    p = generator.dirichlet(np.full(6, 0.3), 400)
    y = generator.integers(0, 5, 400)  # label 5 is never true
    guess = p.argmax(axis=1)
    assert accuracy(p, y) == pytest.approx(accuracy_score(y, guess))
    assert nll(p, y) == pytest.approx(log_loss(y, p, labels=range(6)))
    try:
        oracle = brier_score_loss(y, p, labels=range(6), scale_by_half=False)
    except TypeError:  # scikit-learn < 1.8
        oracle = ((p - np.eye(6)[y]) ** 2).sum(axis=1).mean()
    assert brier(p, y) == pytest.approx(oracle)
    matrix = confusion(guess, y, 6)
    np.testing.assert_array_equal(matrix[:6], confusion_matrix(y, guess, labels=range(6)))
    assert macro_f1(matrix) == pytest.approx(f1_score(y, guess, labels=range(6), average="macro", zero_division=0))
    y[:40] = -1  # tickets of no category are false positives of what they were taken for
    assert macro_f1(confusion(guess, y, 6)) == pytest.approx(
        f1_score(y, guess, labels=range(6), average="macro", zero_division=0)
    )


def test_tickets_of_no_category_are_errors_and_have_no_gold_probability() -> None:
    p, y = [[0.9, 0.1], [0.8, 0.2]], [0, -1]
    assert accuracy(p, y) == 0.5
    assert nll(p, y) == pytest.approx(-math.log(0.9))
    assert brier(p, y) == pytest.approx(0.02)
    assert confusion([0, 0], y, 2).tolist() == [[1, 0], [0, 0], [1, 0]]
    assert math.isnan(nll([[1.0, 0.0]], [-1]))
    assert math.isnan(brier([[1.0, 0.0]], [-1]))


def test_ece_carries_its_size_bins_and_an_interval() -> None:
    generator = np.random.default_rng(0)
    confidence = generator.uniform(0.5, 1, 500)
    correct = generator.random(500) < confidence - 0.1
    found = bootstrap_ece(confidence, correct, np.random.default_rng(1), bins=10, draws=300)
    assert (found.n, found.bins, found.confidence) == (500, 10, 0.95)
    assert found.value == calibration_error(confidence, correct, 10)
    assert found.lower < 0.1 < found.upper < 0.2
    assert found == bootstrap_ece(confidence, correct, np.random.default_rng(1), bins=10, draws=300)


def test_bands_carry_exact_intervals() -> None:
    confidence = [0.0, 0.5, 0.55, 0.99, 0.995, 0.995]
    found = {(band.lo, band.hi): band for band in bands(confidence, [0, 1, 1, 1, 1, 0])}
    assert [band.n for band in found.values()] == [2, 1, 0, 0, 0, 1, 2]
    first = found[0.0, 0.5]
    assert (first.errors, first.accuracy, first.mean_confidence) == (1, 0.5, 0.25)
    assert (first.lower, first.upper) == pytest.approx((0.01257911709342505, 0.987420882906575))
    assert math.isnan(found[0.7, 0.8].accuracy)
    assert found[0.5, 0.7].upper == 1.0


@pytest.mark.parametrize(
    ("rates", "n", "word"),
    [
        ((0.6, 0.8, 0.9), 100, "monotone"),
        ((0.8, 0.75, 0.9), 20, "not monotone, within noise"),
        ((0.9, 0.95, 0.5), 200, "inverted"),
        ((0.9,), 200, "unmeasured"),
    ],
)
def test_bands_say_whether_surer_is_righter(rates: tuple[float, ...], n: int, word: str) -> None:
    confidence, correct = [], []
    for edge, rate in zip((0.6, 0.75, 0.85), rates, strict=False):
        confidence += [edge] * n
        correct += [i < rate * n for i in range(n)]
    assert monotonicity(bands(confidence, correct)) == word


def test_no_band_is_unmeasured() -> None:
    assert monotonicity((Band(0, 1, 0, 0, math.nan, math.nan, 0, 1),)) == "unmeasured"


tied_answers = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=6)


@settings(deadline=None)
@given(tied_answers)
def test_aurc_is_the_average_over_the_orders_of_ties(rows: list[tuple[int, bool]]) -> None:
    falling = sorted((score for score, _ in rows), reverse=True)
    orders = [order for order in itertools.permutations(rows) if [score for score, _ in order] == falling]
    average = np.mean([[sum(e for _, e in order[:k]) / k for k in range(1, len(rows) + 1)] for order in orders], axis=0)
    scores, errors = zip(*rows, strict=True)
    np.testing.assert_allclose(expected_risks(scores, errors), average, atol=1e-12)
    assert aurc(scores, errors) == pytest.approx(average.mean())
    assert excess_aurc(scores, errors) >= -1e-12


@settings(deadline=None)
@given(tied_answers, st.randoms(use_true_random=False))
def test_risk_does_not_depend_on_the_order_of_arrival(rows: list[tuple[int, bool]], random: object) -> None:
    shuffled = rows[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    a, b = (risk_coverage(*zip(*order, strict=True)) for order in (rows, shuffled))
    assert a == b
    assert [point.score for point in a] == sorted({float(s) for s, _ in rows}, reverse=True)
    assert a[-1].coverage == 1.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: accuracy([], []),
        lambda: nll([[0.5, 0.5]], [2]),
        lambda: brier([[0.5, 0.5]], [0, 1]),
        lambda: calibration_error([], []),
        lambda: calibration_error([1.5], [1]),
        lambda: confusion([3], [0], 3),
        lambda: confusion([0], [-2], 3),
        lambda: aurc([math.nan], [0]),
        lambda: risk_coverage([], []),
    ],
)
def test_impossible_input_is_refused(call: Any) -> None:
    with pytest.raises(ValueError, match=r"expected|label|confidence|index"):
        call()
