"""Calibrators: the artefact, what fitting promises, and selection."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.core.calibration import Calibrator, CorrectnessCalibrator, Kind
from worker.core.correctness import fit_correctness, fit_platt, fit_venn_abers
from worker.core.fitting import FittedKind, fit, match_prior
from worker.core.selection import CANDIDATES, Candidate, five_by_two, offered, select
from worker.errors import ArtefactError
from worker.offline.guarantee_simulation import LANGUAGE_MODEL

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())["arrays"]
KINDS: tuple[tuple[FittedKind, float], ...] = (
    ("identity", 0.0),
    ("temperature", 0.0),
    ("bias_temperature", 5.0),
    ("bias_temperature", 1.0),
    ("vector", 5.0),
    ("dirichlet", 30.0),
)
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def draw(n: int, seed: int = 0) -> tuple[Floats, Integers]:
    return LANGUAGE_MODEL.draw_logprobs(np.random.default_rng(seed), n)


def mean_nll(probabilities: Floats, labels: Integers) -> float:
    inside = labels >= 0
    return float(-np.log(probabilities[inside, labels[inside]]).mean())


def objective(calibrator: Calibrator, logprobs: Floats, labels: Integers) -> float:
    """What `fit` says it minimises, written again from the definition."""
    inside = labels >= 0
    bias, scale = np.array(calibrator.bias), np.array(calibrator.scale)
    penalised = float(bias @ bias)
    if calibrator.kind == "vector":
        penalised += float(((scale - scale.mean()) ** 2).sum())
    if calibrator.kind == "dirichlet":
        matrix = np.array(calibrator.matrix)
        penalised += float((matrix**2).sum() - (np.diagonal(matrix) ** 2).sum())
    return mean_nll(calibrator.apply(logprobs), labels) + calibrator.ridge / (2 * int(inside.sum())) * penalised


# --- the artefact ---


@pytest.mark.parametrize("array", ["A", "B", "C"])
def test_temperature_equals_the_golden_one(array: str) -> None:
    golden = GOLDEN[array]
    scores = golden["logits"] or np.log(np.clip(golden["probs"], 1e-4, 1))
    found = fit(scores, golden["labels"], "temperature")
    assert 1 / found.scale[0] == pytest.approx(golden["golden"]["temperature_T"]["value"], abs=1e-6)


def test_temperature_equals_scikit_learns() -> None:
    import sklearn
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.frozen import FrozenEstimator

    class Scores(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        def fit(self, features: Floats, labels: Integers) -> Scores:
            self.classes_ = np.unique(labels)
            return self

        def decision_function(self, features: Floats) -> Floats:
            return features

        def predict(self, features: Floats) -> Integers:
            return np.asarray(features.argmax(axis=1))

    z, y = draw(800)
    z, y = z[y >= 0], y[y >= 0]
    oracle = CalibratedClassifierCV(FrozenEstimator(Scores().fit(z, y)), method="temperature")
    if tuple(map(int, sklearn.__version__.split(".")[:2])) < (1, 8):
        pytest.skip("scikit-learn has temperature scaling from 1.8 on")
    oracle.fit(z, y)
    beta = oracle.calibrated_classifiers_[0].calibrators[0].beta_
    assert fit(z, y, "temperature").scale[0] == pytest.approx(float(beta), rel=1e-6)
    np.testing.assert_allclose(fit(z, y, "temperature").apply(z), oracle.predict_proba(z), atol=1e-6)


@pytest.mark.parametrize(("kind", "ridge"), KINDS)
def test_one_ticket_and_many_agree_to_rounding(kind: FittedKind, ridge: float) -> None:
    z, y = draw(300)
    z[:20, 0] = -np.inf
    calibrator = fit(z, y, kind, ridge=ridge)
    one_by_one = np.array([calibrator.apply_one(row) for row in z.tolist()])
    np.testing.assert_allclose(calibrator.apply(z), one_by_one, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(one_by_one.sum(axis=1), 1.0, atol=1e-12)


@pytest.mark.parametrize(("kind", "ridge"), KINDS)
def test_label_mass_changes_no_probability(kind: FittedKind, ridge: float) -> None:
    z, y = draw(300)
    calibrator = fit(z, y, kind, ridge=ridge)
    shifted = z - np.linspace(0, 30, len(z))[:, None]
    np.testing.assert_allclose(calibrator.apply(shifted), calibrator.apply(z), atol=1e-12)
    np.testing.assert_allclose(calibrator.apply_one(shifted[-1].tolist()), calibrator.apply_one(z[-1].tolist()))


finite = st.floats(-1e6, 1e6)


@st.composite
def calibrators(draw_from: st.DrawFn) -> Calibrator:
    kind: Kind = draw_from(st.sampled_from(["identity", "temperature", "vector", "dirichlet", "prior_match"]))
    size = draw_from(st.integers(1, 5))
    numbers = st.lists(finite, min_size=size, max_size=size).map(tuple)
    matrix = draw_from(st.lists(numbers, min_size=size, max_size=size)) if kind == "dirichlet" else []
    return Calibrator(kind, draw_from(numbers), draw_from(numbers), tuple(matrix), draw_from(st.floats(0, 100)))


@settings(deadline=None)
@given(calibrators())
def test_calibrator_survives_json_to_the_last_bit(calibrator: Calibrator) -> None:
    assert Calibrator.from_dict(json.loads(json.dumps(calibrator.to_dict()))) == calibrator


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "isotonic"},
        {"bias": [0.0]},
        {"scale": [1.0, math.nan]},
        {"scale": []},
        {"matrix": [[1.0, 0.0], [0.0, 1.0]]},
        {"scale": None},
        {"surprise": 1},
    ],
)
def test_a_damaged_calibrator_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ArtefactError):
        Calibrator.from_dict({**Calibrator.identity(2).to_dict(), **change})


@pytest.mark.parametrize("row", [[0.0, math.nan], [math.nan, 0.0], [math.inf, 0.0], [-math.inf] * 2, [0.0]])
@pytest.mark.parametrize("kind", ["identity", "dirichlet"])
def test_scores_that_mean_nothing_give_no_probability(row: list[float], kind: Kind) -> None:
    matrix = ((1.0, 0.0), (0.0, 1.0)) if kind == "dirichlet" else ()
    calibrator = Calibrator(kind, (1.0, 1.0), (0.0, 0.0), matrix)
    with pytest.raises(ValueError, match=r"score|zip|categories"):
        calibrator.apply_one(row)
    with pytest.raises(ValueError, match="score"):
        calibrator.apply([row])


def test_the_worker_applies_without_numpy() -> None:
    script = (
        "import sys; sys.modules['numpy'] = sys.modules['scipy'] = None\n"
        "from worker.core.calibration import Calibrator, CorrectnessCalibrator\n"
        "from worker.core.certificates import Certificate\n"
        "from worker.core.score_form import routed_label\n"
        "print(routed_label('max_probability', Calibrator.identity(3), [-1.0, -2.0, -0.5]).index)\n"
        "print(CorrectnessCalibrator('platt').apply_one(0.5))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["2", "0.5"], "")


# --- fitting ---


@pytest.mark.parametrize(("kind", "ridge"), KINDS[1:])
def test_fit_is_a_minimum_of_the_stated_objective(kind: FittedKind, ridge: float) -> None:
    z, y = draw(400, seed=3)
    found = fit(z, y, kind, ridge=ridge)
    lowest = objective(found, z, y)
    generator = np.random.default_rng(0)
    for _ in range(20):
        step = 1e-3 * generator.standard_normal(2 + 2 * len(found.scale) + len(found.scale) ** 2)
        size = len(found.scale)
        scale = np.array(found.scale) + (step[0] if kind in ("temperature", "bias_temperature") else step[2 : 2 + size])
        bias = np.array(found.bias) + (0 if kind == "temperature" else step[2 + size : 2 + 2 * size])
        matrix: tuple[tuple[float, ...], ...] = ()
        if kind == "dirichlet":
            matrix = tuple(map(tuple, (np.array(found.matrix) + step[2 + 2 * size :].reshape(size, size)).tolist()))
        near = Calibrator(kind, tuple(scale.tolist()), tuple(bias.tolist()), matrix, found.ridge)
        assert objective(near, z, y) >= lowest - 1e-12


def test_bias_undoes_a_constant_label_bias() -> None:
    generator = np.random.default_rng(1)
    y = generator.integers(0, 4, 20_000)
    fair = generator.standard_normal((y.size, 4))
    fair[np.arange(y.size), y] += 2.0
    bias = np.array([1.0, -0.5, 0.2, -0.7])
    found = fit(2.0 * fair + bias, y, "bias_temperature", ridge=1.0)
    # the fair log-likelihood ratio of two labels is 2 * (fair_i - fair_j), so beta is 1 and b is -bias
    assert found.scale[0] == pytest.approx(1.0, abs=0.05)
    np.testing.assert_allclose(found.bias, -bias, atol=0.1)


def test_ridge_keeps_a_bias_without_labels_in_bounds() -> None:
    generator = np.random.default_rng(0)
    size = 77
    y = generator.integers(0, size, 100)
    z = generator.standard_normal((100, size))
    z[np.arange(100), y] += 4.0
    held_out_y = generator.integers(0, size, 2000)
    held_out = generator.standard_normal((2000, size))
    held_out[np.arange(2000), held_out_y] += 4.0
    ridged, free = (fit(z, y, "bias_temperature", ridge=ridge) for ridge in (5.0, 0.0))
    temperature = fit(z, y, "temperature")
    at = [mean_nll(c.apply(held_out), held_out_y) for c in (temperature, ridged, free)]
    assert at[1] < 1.3 * at[0]
    assert at[2] > 3 * at[0]


@pytest.mark.parametrize(("kind", "ridge"), KINDS)
@pytest.mark.parametrize("labels", [[0] * 6, [0, 0, 0, 1, 0, 0], [-1] * 6, [-1, 2, -1, -1, -1, -1], []])
def test_categories_with_no_or_one_label_never_raise(kind: FittedKind, ridge: float, labels: list[int]) -> None:
    z = np.random.default_rng(0).standard_normal((len(labels), 4))
    calibrator = fit(z, labels, kind, ridge=ridge)
    assert all(math.isfinite(p) for p in calibrator.apply_one([0.0, -1.0, -2.0, -3.0]))
    selection = select(z, labels, seed=1)
    assert sum(selection.calibrator.apply_one([0.0, -1.0, -2.0, -3.0])) == pytest.approx(1.0)


@pytest.mark.parametrize(("kind", "ridge"), KINDS)
def test_tickets_of_no_category_are_left_out_of_the_fit(kind: FittedKind, ridge: float) -> None:
    z, y = draw(300)
    assert (y == -1).any()
    assert fit(z, y, kind, ridge=ridge) == fit(z[y >= 0], y[y >= 0], kind, ridge=ridge)


@pytest.mark.parametrize(("kind", "ridge"), KINDS)
def test_fit_does_not_depend_on_the_order_of_arrival(kind: FittedKind, ridge: float) -> None:
    z, y = draw(200)
    order = np.random.default_rng(5).permutation(200)
    assert fit(z[order], y[order], kind, ridge=ridge) == fit(z, y, kind, ridge=ridge)


def test_a_weight_of_two_is_a_ticket_seen_twice() -> None:
    z, y = draw(300)
    weights = np.where(np.arange(300) < 100, 2.0, 1.0)
    twice = np.concatenate((np.arange(300), np.arange(100)))
    weighted = fit(z, y, "temperature", weights=weights)
    np.testing.assert_allclose(weighted.scale, fit(z[twice], y[twice], "temperature").scale, rtol=1e-6)
    assert fit(z, y, "bias_temperature", ridge=5.0, weights=np.full(300, 3.0)).bias == pytest.approx(
        fit(z, y, "bias_temperature", ridge=5.0).bias, abs=1e-6
    )


@pytest.mark.parametrize(
    ("labels", "weights"), [([0, 5], None), ([0, -2], None), ([0], None), ([0, 1], [1.0, -1.0]), ([0, 1], [1.0])]
)
def test_impossible_labels_and_weights_are_refused(labels: list[int], weights: list[float] | None) -> None:
    with pytest.raises(ValueError, match=r"label|weight"):
        fit(np.zeros((2, 3)), labels, "temperature", weights=weights)


def test_scores_that_separate_the_labels_keep_their_order() -> None:
    z = np.array([[2.0 + i, 0.0] for i in range(10)])
    confident = fit(z, [0] * 10, "temperature").apply(z / 10)[:, 0]
    assert np.all(np.diff(confident) > 0)


def test_prior_match_predicts_the_historical_shares_on_average() -> None:
    z, _ = draw(700)
    shares = np.array([30, 5, 5, 20, 10, 10, 15, 5])
    matched = match_prior(z, shares)
    np.testing.assert_allclose(matched.apply(z).mean(axis=0), shares / shares.sum(), atol=1e-6)
    assert matched.kind == "prior_match"


def test_prior_match_needs_traffic_and_takes_a_share_of_zero() -> None:
    z, _ = draw(600)
    assert match_prior(z, [1, 1, 1, 1, 1, 1, 1, 0]).apply(z)[:, 7].mean() == pytest.approx(0.5 / 600, rel=0.01)
    with pytest.raises(ValueError, match="at least 500"):
        match_prior(z[:499], [1] * 8)
    with pytest.raises(ValueError, match="shares"):
        match_prior(z, [-1] + [1] * 7)


# --- selection ---


def test_selection_finds_a_label_bias_and_its_gain_in_accuracy() -> None:
    selection = select(*draw(800), seed=1)
    assert selection.candidate == Candidate("bias_temperature", 5.0)
    best = min(selection.results, key=lambda result: result.nll)
    assert best.candidate == Candidate("bias_temperature", 1.0)  # better by less than a standard error
    raw, _, ridged, *_ = selection.results
    assert selection.accuracy_gain == pytest.approx(ridged.accuracy - raw.accuracy)
    assert selection.accuracy_gain > selection.accuracy_gain_se > 0
    assert {result.candidate.kind for result in selection.results} == {
        "identity", "temperature", "bias_temperature", "vector",
    }  # fmt: skip


def test_selection_takes_the_simplest_that_the_labels_cannot_tell_from_the_best() -> None:
    generator = np.random.default_rng(2)
    y = generator.integers(0, 3, 600)
    z = generator.standard_normal((600, 3))
    z[np.arange(600), y] += 1.0  # exactly calibrated: softmax(z) is the posterior
    selection = select(z, y, seed=1)
    assert selection.candidate == Candidate("identity")
    assert select(3.0 * z, y, seed=1).candidate == Candidate("temperature")


def test_identity_is_not_taken_for_want_of_labels() -> None:
    """A standard error over few tickets is large; identity must also be within 1 % of the best."""
    z, y = draw(40, seed=2)
    selection = select(1.5 * z, y, seed=1)
    identity = selection.results[0]
    assert identity.excess < identity.excess_se
    assert identity.nll > 1.01 * min(result.nll for result in selection.results)
    assert selection.candidate.kind == "temperature"


def test_selection_is_the_same_in_any_order_and_for_the_same_seed() -> None:
    z, y = draw(200)
    order = np.random.default_rng(5).permutation(200)
    assert select(z[order], y[order], seed=4) == select(z, y, seed=4)
    assert select(z, y, seed=4) != select(z, y, seed=5)


def test_rich_calibrators_are_offered_only_with_many_labels() -> None:
    assert offered(499, 8) == CANDIDATES[:4]
    assert offered(500, 8) == CANDIDATES[:5]
    assert offered(769, 77) == CANDIDATES[:4]
    assert offered(1000, 20) == CANDIDATES
    assert offered(1000, 21) == CANDIDATES[:5]


def test_every_ticket_is_held_out_once_a_repeat() -> None:
    folds = list(five_by_two(11, seed=0))
    assert len(folds) == 10
    for train, held_out in folds:
        assert sorted([*train, *held_out]) == list(range(11))
    for first, second in zip(folds[::2], folds[1::2], strict=True):
        assert set(first[1]) | set(second[1]) == set(range(11))


# --- P(the routed label is right) ---


def answers(n: int, seed: int = 0) -> tuple[Floats, NDArray[np.bool_]]:
    generator = np.random.default_rng(seed)
    p = np.round(generator.beta(4, 1.5, n), 2)
    return p, generator.random(n) < p**1.5


@pytest.mark.parametrize("fitting", [fit_platt, fit_venn_abers])
def test_correctness_never_falls_as_max_p_rises(fitting: type) -> None:
    calibrator = fitting(*answers(400))
    values = [calibrator.apply_one(p) for p in np.linspace(0, 1, 1001)]
    assert values == sorted(values)
    assert 0 < values[0] < values[-1] < 1


def test_venn_abers_equals_isotonic_regression_with_the_new_ticket_added() -> None:
    from sklearn.isotonic import IsotonicRegression

    p, right = answers(60, seed=2)
    found = fit_venn_abers(p, right)
    for new in [*np.unique(p)[::3], 0.0, 1.0, *(np.unique(p)[:-1:4] + 0.004)]:
        p0, p1 = (IsotonicRegression().fit([*p, new], [*right, answer]).predict([new])[0] for answer in (0.0, 1.0))
        assert found.apply_one(new) == pytest.approx(p1 / (1 - p0 + p1), abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=40), st.randoms(use_true_random=False))
def test_correctness_does_not_depend_on_order(pairs: list[tuple[int, bool]], random: object) -> None:
    shuffled = pairs[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for fitting in (fit_platt, fit_venn_abers):
        a, b = (fitting([p / 12 for p, _ in rows], [hit for _, hit in rows]) for rows in (pairs, shuffled))
        assert a == b
        values = [a.apply_one(p / 24) for p in range(25)]
        assert values == pytest.approx(sorted(values), abs=1e-15)  # exp is not monotone to the last bit
        assert all(0 <= value <= 1 for value in values)


def test_few_labels_or_few_errors_get_platt() -> None:
    """One step, which Venn-Abers fits far better: it may from 200 labels and 30 errors on."""
    p = np.concatenate((np.linspace(0.3, 0.6, 60), np.linspace(0.62, 1, 1000)))
    for errors, n, kind in ((30, 1060, "venn_abers"), (29, 1060, "platt"), (30, 199, "platt")):
        right = np.ones(p.size, dtype=np.bool_)
        right[: 2 * errors : 2] = False
        assert fit_correctness(p[:n], right[:n], seed=0).kind == kind


def test_a_bend_that_no_sigmoid_has_gets_venn_abers() -> None:
    generator = np.random.default_rng(0)
    p = generator.uniform(0.3, 1.0, 3000)
    right = generator.random(3000) < np.where(p > 0.65, 0.93, 0.35)
    assert fit_correctness(p, right, seed=0).kind == "venn_abers"
    smooth = generator.random(3000) < p
    assert fit_correctness(p, smooth, seed=0).kind == "platt"


@pytest.mark.parametrize("right", [[1] * 5, [0] * 5, []])
def test_correctness_without_contrast_stays_short_of_certainty(right: list[int]) -> None:
    calibrator = fit_correctness([0.9] * len(right), right, seed=0)
    smoothed = {5: 6 / 7, 0: 1 / 7}[sum(right)] if right else 0.9
    assert calibrator.apply_one(0.9) == pytest.approx(smoothed, abs=1e-6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30))
def test_correctness_survives_json_to_the_last_bit(pairs: list[tuple[float, bool]]) -> None:
    for fitting in (fit_platt, fit_venn_abers):
        calibrator = fitting([p for p, _ in pairs], [hit for _, hit in pairs])
        assert CorrectnessCalibrator.from_dict(json.loads(json.dumps(calibrator.to_dict()))) == calibrator


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "beta"},
        {"slope": -1.0},
        {"slope": math.inf},
        {"kind": "venn_abers", "values": [0.5, 0.4, 0.3], "breaks": [0.1]},
    ],
)
def test_a_damaged_correctness_calibrator_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ArtefactError):
        CorrectnessCalibrator.from_dict({**CorrectnessCalibrator("platt").to_dict(), **change})
