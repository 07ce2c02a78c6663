"""Correctness: fits P(the routed label is right) on logit(max p), tickets of no category counted as wrong."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from worker.core.calibration import CorrectnessCalibrator, logit
from worker.core.fitting import Vector, minimise
from worker.core.selection import five_by_two

Floats = NDArray[np.float64]

VENN_ABERS_MIN_LABELS = 200
VENN_ABERS_MIN_ERRORS = 30
MAX_SLOPE = 20.0


def fit_correctness(max_probabilities: ArrayLike, correct: ArrayLike, *, seed: int) -> CorrectnessCalibrator:
    """(n,) max p of the calibrated label probabilities, (n,) 1 where the routed label is right -> calibrator.

    Platt below 200 labels or 30 errors, otherwise whichever of Platt and Venn-Abers has the lower 5x2 cross-validated
    NLL. Raises ValueError.
    """
    p, hit = _checked(max_probabilities, correct)
    if p.size < VENN_ABERS_MIN_LABELS or p.size - hit.sum() < VENN_ABERS_MIN_ERRORS:
        return fit_platt(p, hit)
    platt = venn_abers = 0.0
    for train, held_out in five_by_two(p.size, seed):
        platt += _nll(fit_platt(p[train], hit[train]), p[held_out], hit[held_out])
        venn_abers += _nll(fit_venn_abers(p[train], hit[train]), p[held_out], hit[held_out])
    return fit_platt(p, hit) if platt <= venn_abers else fit_venn_abers(p, hit)


def fit_platt(max_probabilities: ArrayLike, correct: ArrayLike) -> CorrectnessCalibrator:
    """Platt 1999 with his smoothed targets, so that labels without an error do not drive it to certainty; slope >= 0.

    Without any label it is the identity.
    """
    p, hit = _checked(max_probabilities, correct)
    if p.size == 0:
        return CorrectnessCalibrator("platt")
    x = np.array([logit(value) for value in p.tolist()])
    rights, wrongs = hit.sum(), p.size - hit.sum()
    target = np.where(hit == 1, (rights + 1) / (rights + 2), 1 / (wrongs + 2))

    def objective(theta: Vector) -> tuple[float, Floats]:
        score = theta[0] * x + theta[1]
        gradient = (special.expit(score) - target) / p.size
        loss = float(np.mean(np.logaddexp(0.0, score) - target * score))
        return loss, np.array([gradient @ x, gradient.sum()])

    slope, intercept = minimise(objective, np.array([1.0, 0.0]), [(0.0, MAX_SLOPE), (None, None)], 1e-9)
    return CorrectnessCalibrator("platt", float(slope), float(intercept))


def fit_venn_abers(max_probabilities: ArrayLike, correct: ArrayLike) -> CorrectnessCalibrator:
    """Inductive Venn-Abers (Vovk & Petej 2014): isotonic fits with the new ticket counted as wrong (p0) and as right
    (p1), merged to p1 / (1 - p0 + p1).

    Exact: every place a new score can take relative to the fitted ones is computed once, from the pooled blocks to its
    left and to its right (pool-adjacent-violators gives the same blocks in any order of pooling).
    """
    p, hit = _checked(max_probabilities, correct)
    places, inverse = np.unique(p, return_inverse=True)
    count = np.bincount(inverse, minlength=places.size).astype(float).tolist()
    right = np.bincount(inverse, weights=hit, minlength=places.size).tolist()
    left_blocks = _blocks(right, count)
    right_blocks = _blocks([c - r for r, c in zip(right[::-1], count[::-1], strict=True)], count[::-1])
    merged: list[float] = []
    for place in range(places.size + 1):
        # a new score below places[place], then one equal to it
        for at in (False, True) if place < places.size else (False,):
            own = (right[place], count[place]) if at else (0.0, 0.0)
            p0, p1 = (
                _pooled(left_blocks, right_blocks, (place - 1, place + at), own[0] + answer, own[1] + 1.0)
                for answer in (0.0, 1.0)
            )
            merged.append(p1 / (1.0 - p0 + p1))
    merged = np.maximum.accumulate(merged).tolist()  # rounding only: p0 and p1 never fall
    keep = [i for i in range(places.size) if not merged[2 * i] == merged[2 * i + 1] == merged[2 * i + 2]]
    values = [merged[0], *(value for i in keep for value in merged[2 * i + 1 : 2 * i + 3])]
    return CorrectnessCalibrator("venn_abers", breaks=tuple(places[keep].tolist()), values=tuple(values))


Block = tuple[float, float, int]
"""Sum, count and first index of the last isotonic block of a prefix; the block before it ends just below that index."""


def _blocks(sums: list[float], counts: list[float]) -> list[Block]:
    blocks: list[Block] = []
    for i in range(len(sums)):
        s, c, first = sums[i], counts[i], i
        while first > 0 and blocks[first - 1][0] * c >= s * blocks[first - 1][1]:
            previous = blocks[first - 1]
            s, c, first = s + previous[0], c + previous[1], previous[2]
        blocks.append((s, c, first))
    return blocks


def _pooled(left: list[Block], right: list[Block], gap: tuple[int, int], s: float, c: float) -> float:
    """Isotonic value of a block (s, c) set between the prefix that ends at `before` and the suffix that begins at
    `after`.

    The suffix's blocks are kept as prefixes of the mirrored problem, in which right and wrong change places.
    """
    size = len(left)
    before, after = gap
    while True:
        if after < size:
            wrong, count, first = right[size - 1 - after]
            if (count - wrong) * c <= s * count:
                s, c, after = s + count - wrong, c + count, size - first
                continue
        if before >= 0:
            total, count, first = left[before]
            if total * c >= s * count:
                s, c, before = s + total, c + count, first - 1
                continue
        return s / c


def _nll(calibrator: CorrectnessCalibrator, p: Floats, hit: Floats) -> float:
    predicted = np.clip([calibrator.apply_one(value) for value in p.tolist()], 1e-15, 1.0 - 1e-15)
    return float(-np.sum(np.log(np.where(hit == 1, predicted, 1.0 - predicted))))


def _checked(max_probabilities: ArrayLike, correct: ArrayLike) -> tuple[Floats, Floats]:
    """In rising order of max p, so that the order of arrival decides nothing."""
    p, hit = np.asarray(max_probabilities, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    if p.ndim != 1 or p.shape != hit.shape:
        raise ValueError(f"max p of shape {p.shape} and answers of shape {hit.shape}: expected (n,) and (n,)")
    if p.size and not (p.min() >= 0.0 and p.max() <= 1.0):
        raise ValueError("max p is a probability, and a value lies outside [0, 1]")
    if not np.all((hit == 0) | (hit == 1)):
        raise ValueError("answers are 1 (right) or 0 (wrong)")
    order = np.lexsort((hit, p))
    return p[order], hit[order]
