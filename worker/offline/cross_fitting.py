"""Cross-fitting: what a calibrator says of tickets whose labels it has not seen, where all labels are in one set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from worker.core.correctness import fit_platt, fit_venn_abers
from worker.core.fitting import fit
from worker.core.selection import Candidate

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Rows = NDArray[np.intp]

FOLDS = 5


def cross_fitted_probabilities(z: Floats, y: Integers, kind: Candidate, seed: int) -> Floats:
    """(n, K) probabilities, each from a calibrator of this kind that was fitted on the other folds."""
    probabilities = np.empty_like(z)
    for train, held_out in _folds(y.size, seed):
        probabilities[held_out] = fit(z[train], y[train], kind.kind, ridge=kind.ridge).apply(z[held_out])
    return probabilities


def cross_fitted_correctness(
    max_probabilities: Sequence[float], correct: Sequence[int], kind: Literal["platt", "venn_abers"], seed: int
) -> list[float]:
    """P(the routed label is right) for each ticket, by a calibrator of this kind that was fitted on the other folds."""
    refit = fit_platt if kind == "platt" else fit_venn_abers
    p, right = np.array(max_probabilities), np.array(correct)
    found = np.empty(p.size)
    for train, held_out in _folds(p.size, seed):
        calibrator = refit(p[train], right[train])
        found[held_out] = [calibrator.apply_one(value) for value in p[held_out].tolist()]
    return [float(value) for value in found]


def _folds(n: int, seed: int) -> Iterator[tuple[Rows, Rows]]:
    """Training and held-out rows, every row held out once."""
    order = np.random.default_rng(seed).permutation(n)
    for held_out in np.array_split(order, min(FOLDS, n)):
        yield np.setdiff1d(order, held_out), held_out
