"""Reliability: how good the probabilities are, and what confidence buys.

Conventions. Probabilities are (n, K) rows that sum to 1; labels (n,) are indices, -1 for a ticket of no category. Such
a ticket is an error wherever answers are counted (accuracy, ECE, bands, F1, risk) and left out where a gold probability
is needed (NLL, Brier). Bins are (lo, hi] with confidence 0 in the first. Thresholds lie only at the end of a tie block,
and what depends on the order of ties is averaged over their orders.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from worker.core.binomial import clopper_pearson

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

BAND_EDGES = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
Monotonicity = Literal["monotone", "not monotone, within noise", "inverted", "unmeasured"]


@dataclass(frozen=True, slots=True)
class CalibrationError:
    """Expected calibration error with what it depends on, and a bootstrap percentile interval."""

    value: float
    n: int
    bins: int
    lower: float
    upper: float
    confidence: float


@dataclass(frozen=True, slots=True)
class Band:
    """Answers with confidence in (lo, hi]; accuracy with its two-sided Clopper-Pearson interval, NaN where n = 0."""

    lo: float
    hi: float
    n: int
    errors: int
    mean_confidence: float
    accuracy: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class RiskPoint:
    """Routing everything with score >= `score`: the share routed and the error rate among it."""

    coverage: float
    risk: float
    score: float


def top_label(probabilities: ArrayLike, labels: ArrayLike) -> tuple[Floats, NDArray[np.bool_]]:
    """Confidence (n,) of the first most probable label, and whether it is right."""
    p, y = _rows(probabilities, labels)
    return p.max(axis=1), p.argmax(axis=1) == y


def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Share of tickets whose most probable label is right."""
    return float(top_label(probabilities, labels)[1].mean())


def nll(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Mean negative log-probability of the gold label in nats, clipped at the float64 epsilon; NaN without a labelled
    row.
    """
    p, y = _in_scope(probabilities, labels)
    eps = np.finfo(np.float64).eps
    return float(np.mean(-np.log(np.clip(p[np.arange(y.size), y], eps, 1.0 - eps)))) if y.size else math.nan


def brier(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Mean squared distance to the gold label, summed over classes (0 to 2); NaN without a labelled row."""
    p, y = _in_scope(probabilities, labels)
    if y.size == 0:
        return math.nan
    gold = p[np.arange(y.size), y]
    return float(np.mean(np.einsum("ij,ij->i", p, p) - 2.0 * gold + 1.0))


def calibration_error(confidence: ArrayLike, correct: ArrayLike, bins: int = 15) -> float:
    """ECE over equal-width bins: sum of n_b / n * |mean confidence - accuracy|. Report it with `bootstrap_ece`."""
    gap, member = _gaps(confidence, correct, bins)
    return float(np.abs(np.bincount(member, weights=gap, minlength=bins)).sum() / gap.size)


def maximum_calibration_error(confidence: ArrayLike, correct: ArrayLike, bins: int = 15) -> float:
    """Largest |mean confidence - accuracy| over the bins that hold anything."""
    gap, member = _gaps(confidence, correct, bins)
    count = np.bincount(member, minlength=bins)
    total = np.abs(np.bincount(member, weights=gap, minlength=bins))
    return float((total[count > 0] / count[count > 0]).max())


def adaptive_calibration_error(confidence: ArrayLike, correct: ArrayLike, bins: int = 15) -> float:
    """ECE over groups of equal size in order of confidence."""
    gap, _ = _gaps(confidence, correct, bins)
    order = np.argsort(np.asarray(confidence, dtype=np.float64), kind="stable")
    return float(sum(abs(group.sum()) for group in np.array_split(gap[order], bins)) / gap.size)


def classwise_calibration_error(probabilities: ArrayLike, labels: ArrayLike, bins: int = 15) -> float:
    """Mean over the K labels of the binary ECE of p_k against 1[label = k]."""
    p, y = _rows(probabilities, labels)
    return float(np.mean([calibration_error(p[:, k], y == k, bins) for k in range(p.shape[1])]))


def bootstrap_ece(
    confidence: ArrayLike,
    correct: ArrayLike,
    generator: np.random.Generator,
    *,
    bins: int = 15,
    draws: int = 1000,
    interval: float = 0.95,
) -> CalibrationError:
    """ECE with its percentile interval over resampled tickets. Binned ECE is biased upwards, small samples most."""
    gap, member = _gaps(confidence, correct, bins)
    resampled = np.empty(draws)
    for draw in range(draws):
        rows = generator.integers(0, gap.size, gap.size)
        resampled[draw] = np.abs(np.bincount(member[rows], weights=gap[rows], minlength=bins)).sum() / gap.size
    lower, upper = np.quantile(resampled, [(1.0 - interval) / 2.0, (1.0 + interval) / 2.0])
    value = calibration_error(confidence, correct, bins)
    return CalibrationError(value, gap.size, bins, float(lower), float(upper), interval)


def bands(
    confidence: ArrayLike, correct: ArrayLike, edges: tuple[float, ...] = BAND_EDGES, interval: float = 0.95
) -> tuple[Band, ...]:
    """Accuracy by confidence band (lo, hi], from low to high, confidence 0 in the first."""
    conf, hit = _binary(confidence, correct)
    member = np.clip(np.searchsorted(np.asarray(edges), conf, side="left") - 1, 0, len(edges) - 2)
    found = []
    for band, (lo, hi) in enumerate(pairwise(edges)):
        inside = member == band
        n, right = int(inside.sum()), int(hit[inside].sum())
        if n == 0:
            found.append(Band(lo, hi, 0, 0, math.nan, math.nan, 0.0, 1.0))
            continue
        lower, upper = clopper_pearson(right, n, interval)
        found.append(Band(lo, hi, n, n - right, float(conf[inside].mean()), right / n, lower, upper))
    return tuple(found)


def monotonicity(found: tuple[Band, ...]) -> Monotonicity:
    """Whether surer bands are righter: `inverted` where a surer band's whole interval lies below that of a less sure
    one.
    """
    filled = [band for band in found if band.n > 0]
    if len(filled) < 2:
        return "unmeasured"
    if any(above.upper < below.lower for i, below in enumerate(filled) for above in filled[i + 1 :]):
        return "inverted"
    falls = any(above.accuracy < below.accuracy for below, above in pairwise(filled))
    return "not monotone, within noise" if falls else "monotone"


def confusion(predicted: ArrayLike, labels: ArrayLike, categories: int) -> Integers:
    """(K + 1, K) counts: row is the true label, the last row tickets of no category; column is the predicted label."""
    guess, y = np.asarray(predicted, dtype=np.int64), np.asarray(labels, dtype=np.int64)
    if guess.shape != y.shape or guess.ndim != 1:
        raise ValueError(f"predicted {guess.shape} and labels {y.shape}: expected (n,) and (n,)")
    if y.size and not (0 <= guess.min() <= guess.max() < categories and -1 <= y.min() <= y.max() < categories):
        raise ValueError(f"a label is no index of {categories} categories")
    cell = np.where(y < 0, categories, y) * categories + guess
    return (
        np.bincount(cell, minlength=(categories + 1) * categories).reshape(categories + 1, categories).astype(np.int64)
    )


def macro_f1(matrix: Integers) -> float:
    """Mean F1 over all K labels of a `confusion` matrix; 0 for a label that is neither present nor predicted."""
    right = np.diagonal(matrix).astype(np.float64)
    size = matrix.shape[1]
    denominator = matrix[:size].sum(axis=1) + matrix.sum(axis=0)
    return float(np.mean(np.divide(2.0 * right, denominator, out=np.zeros(size), where=denominator > 0)))


def risk_coverage(scores: ArrayLike, errors: ArrayLike) -> tuple[RiskPoint, ...]:
    """The thresholds there are, strict to loose: one point at the end of each tie block."""
    s, wrong, ends = _ranked(scores, errors)
    return tuple(RiskPoint(m / s.size, float(wrong[m]) / m, float(s[m - 1])) for m in ends.tolist())


def expected_risks(scores: ArrayLike, errors: ArrayLike) -> Floats:
    """(n,) error rate of the k highest for k = 1 ... n, averaged over the orders of ties."""
    s, wrong, ends = _ranked(scores, errors)
    at = np.concatenate(([0], ends))
    rank = np.arange(1, s.size + 1)
    return np.asarray(np.interp(rank, at, wrong[at]) / rank)


def aurc(scores: ArrayLike, errors: ArrayLike) -> float:
    """Area under the risk-coverage curve (Geifman et al. 2019): the mean of `expected_risks`."""
    return float(expected_risks(scores, errors).mean())


def excess_aurc(scores: ArrayLike, errors: ArrayLike) -> float:
    """AURC less that of a perfect ranking with the same number of errors."""
    wrong = np.asarray(errors)
    rank = np.arange(1, wrong.size + 1)
    perfect = np.maximum(rank - (wrong.size - int(wrong.sum())), 0) / rank
    return aurc(scores, errors) - float(perfect.mean())


def coverage_at_risk(scores: ArrayLike, errors: ArrayLike, target: float) -> float:
    """Largest share that an existing threshold routes at an empirical error rate <= target. Never a guarantee."""
    return max((point.coverage for point in risk_coverage(scores, errors) if point.risk <= target), default=0.0)


def risk_at_coverage(scores: ArrayLike, errors: ArrayLike, coverage: float) -> float:
    """Error rate of the loosest existing threshold that routes at most `coverage`; NaN where even one block is more."""
    risks = [point.risk for point in risk_coverage(scores, errors) if point.coverage <= coverage + 1e-12]
    return risks[-1] if risks else math.nan


def _rows(probabilities: ArrayLike, labels: ArrayLike) -> tuple[Floats, Integers]:
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(labels, dtype=np.int64)
    if p.ndim != 2 or p.size == 0 or y.shape != p.shape[:1]:
        raise ValueError(f"probabilities {p.shape} and labels {y.shape}: expected (n, K) and (n,), n at least 1")
    if not -1 <= y.min() <= y.max() < p.shape[1]:
        raise ValueError(f"a label is no index of {p.shape[1]} categories")
    return p, y


def _in_scope(probabilities: ArrayLike, labels: ArrayLike) -> tuple[Floats, Integers]:
    p, y = _rows(probabilities, labels)
    return p[y >= 0], y[y >= 0]


def _binary(confidence: ArrayLike, correct: ArrayLike) -> tuple[Floats, Floats]:
    conf, hit = np.asarray(confidence, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    if conf.ndim != 1 or conf.size == 0 or conf.shape != hit.shape:
        raise ValueError(f"confidence {conf.shape} and answers {hit.shape}: expected (n,) and (n,), n at least 1")
    if not (conf.min() >= 0.0 and conf.max() <= 1.0 + 1e-9):
        raise ValueError("a confidence lies outside [0, 1]")
    return conf, hit


def _gaps(confidence: ArrayLike, correct: ArrayLike, bins: int) -> tuple[Floats, Integers]:
    """Confidence - answer of each ticket, and its equal-width bin."""
    conf, hit = _binary(confidence, correct)
    edges = np.arange(1, bins) / bins  # j / B as written, so that a confidence on an edge compares equal
    return conf - hit, np.searchsorted(edges, conf, side="left").astype(np.int64)


def _ranked(scores: ArrayLike, errors: ArrayLike) -> tuple[Floats, Integers, Integers]:
    """Scores from high to low, errors among the m highest for m = 0 ... n, and where the tie blocks end."""
    s, e = np.asarray(scores, dtype=np.float64), np.asarray(errors, dtype=np.int64)
    if s.ndim != 1 or s.size == 0 or s.shape != e.shape or np.isnan(s).any():
        raise ValueError(f"scores {s.shape} and errors {e.shape}: expected (n,) numbers each, n at least 1")
    order = np.argsort(-s, kind="stable")
    s = s[order]
    wrong = np.concatenate(([0], np.cumsum(e[order])))
    ends = np.flatnonzero(np.append(s[1:] < s[:-1], True)) + 1
    return s, wrong, ends
