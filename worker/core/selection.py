"""Selection: which calibrator the labels can carry, by repeated 5x2 cross-validation and a paired one-standard-error
rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from worker.core.calibration import Calibrator
from worker.core.fitting import FittedKind, fit, usable_rows

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

REPEATS = 5
CV_TOLERANCE = 1e-6
IDENTITY_SLACK = 1.01
"""Identity is taken only within 1 % of the best NLL: a small set's standard error alone would hide a real loss."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kind with its ridge."""

    kind: FittedKind
    ridge: float = 0.0


CANDIDATES = (
    Candidate("identity"),
    Candidate("temperature"),
    Candidate("bias_temperature", 5.0),
    Candidate("bias_temperature", 1.0),
    Candidate("vector", 5.0),
    Candidate("dirichlet", 30.0),
)
"""Simplest first."""


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """Held-out mean NLL (nats) and accuracy over the in-scope rows; `excess` over the best NLL with its paired standard
    error.
    """

    candidate: Candidate
    nll: float
    accuracy: float
    excess: float
    excess_se: float


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen calibrator, fitted on all rows, and how every offered candidate did.

    `accuracy_gain`, `accuracy_gain_se`: bias_temperature (ridge 5) against the raw argmax, paired; what `choose_form`
    asks.
    """

    calibrator: Calibrator
    candidate: Candidate
    results: tuple[CandidateResult, ...]
    n: int
    accuracy_gain: float
    accuracy_gain_se: float


def offered(n: int, categories: int) -> tuple[Candidate, ...]:
    """Candidates that `n` in-scope labels of K categories can carry, simplest first."""
    vector = n >= max(500, 10 * categories)
    dirichlet = n >= 1000 and categories <= 20
    return tuple(c for c in CANDIDATES if {"vector": vector, "dirichlet": dirichlet}.get(c.kind, True))


def select(logprobs: ArrayLike, labels: ArrayLike, *, seed: int, weights: ArrayLike | None = None) -> Selection:
    """Choose and fit: the simplest candidate whose held-out NLL exceeds the best by at most one paired standard error.

    (n, K) label log-probabilities, (n,) label indices with -1 left out. The same seed and rows give the same result in
    any row order. Differences are paired by ticket (averaged over its held-out turns), standard errors are over
    tickets. Fewer than two usable rows give identity.
    """
    z, y, w = usable_rows(logprobs, labels, weights)
    n, size = z.shape
    if n < 2:
        return Selection(Calibrator.identity(size), CANDIDATES[0], (), n, 0.0, 0.0)
    candidates = offered(n, size)
    folds = list(five_by_two(n, seed))
    losses, hits = np.zeros((len(candidates), n)), np.zeros((len(candidates), n))
    for row, candidate in enumerate(candidates):
        for train, held_out in folds:
            calibrator = fit(
                z[train], y[train], candidate.kind, ridge=candidate.ridge, weights=w[train], tolerance=CV_TOLERANCE
            )
            probabilities = calibrator.apply(z[held_out])
            gold = probabilities[np.arange(held_out.size), y[held_out]]
            losses[row, held_out] -= np.log(np.maximum(gold, np.finfo(np.float64).eps)) / REPEATS
            hits[row, held_out] += (probabilities.argmax(axis=1) == y[held_out]) / REPEATS
    means = losses @ w / w.sum()
    best = int(np.argmin(means))
    excess = [_mean_and_se(loss - losses[best], w) for loss in losses]
    results = tuple(
        CandidateResult(candidate, float(means[row]), float(hits[row] @ w / w.sum()), *excess[row])
        for row, candidate in enumerate(candidates)
    )
    chosen = next(
        result.candidate
        for result in results
        if result.excess <= result.excess_se
        and (result.candidate.kind != "identity" or result.nll <= IDENTITY_SLACK * results[best].nll)
    )
    calibrator = fit(z, y, chosen.kind, ridge=chosen.ridge, weights=w)
    gain = _mean_and_se(hits[candidates.index(Candidate("bias_temperature", 5.0))] - hits[0], w)
    return Selection(calibrator, chosen, results, n, *gain)


def five_by_two(n: int, seed: int) -> Iterator[tuple[Integers, Integers]]:
    """Five random halvings of n >= 2 rows, each half once the training and once the held-out part (Dietterich 1998)."""
    generator = np.random.default_rng(seed)
    for _ in range(REPEATS):
        order = generator.permutation(n).astype(np.int64)
        first, second = order[: n // 2], order[n // 2 :]
        yield first, second
        yield second, first


def _mean_and_se(values: Floats, w: Floats) -> tuple[float, float]:
    share = w / w.sum()
    mean = float(share @ values)
    return mean, float(np.sqrt(np.sum((share * (values - mean)) ** 2)))
