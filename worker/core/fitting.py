"""Fitting calibrators: labelled label scores -> frozen Calibrator, and the label-free match to historical shares.

Minimises mean NLL + (ridge / 2n) |penalised|^2 by L-BFGS from scale 1 and bias 0: every problem here is convex. Label
-1 is a ticket that belongs to none of the K categories; it has no probability to fit, and is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize

from worker.core.calibration import NORMALISED, Calibrator, relative_scores

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
Bound = tuple[float | None, float | None]
FittedKind = Literal["identity", "temperature", "bias_temperature", "vector", "dirichlet"]

SCALE_RANGE = (0.01, 20.0)
"""Bounds of every scale. Where the labels are separable the likelihood would sharpen without end, which only saturates
max p at 1 and loses the order of the tickets.
"""

PRIOR_MIN_TICKETS = 500


def fit(
    logprobs: ArrayLike,
    labels: ArrayLike,
    kind: FittedKind,
    *,
    ridge: float = 0.0,
    weights: ArrayLike | None = None,
    tolerance: float = 1e-9,
) -> Calibrator:
    """Fit one kind on (n, K) label log-probabilities (nats) and (n,) label indices, -1 for none of the K.

    `weights` (n,) >= 0 are inverse labelling probabilities; n in the penalty is then (sum w)^2 / sum w^2. The penalty
    falls on the bias; for vector also on the scales' distance from their mean; for dirichlet on the off-diagonal and
    the bias. The result does not depend on the order of the rows. Without any usable row it is the starting point.
    Raises ValueError.
    """
    z, y, w = usable_rows(logprobs, labels, weights)
    size = z.shape[1]
    if y.size == 0:
        matrix = _as_matrix(np.eye(size)) if kind == "dirichlet" else ()
        return Calibrator(kind, (1.0,) * size, (0.0,) * size, matrix, ridge)
    z = relative_scores(z, size, normalised=kind in NORMALISED)
    penalty = ridge * float(np.sum(w**2)) / float(np.sum(w)) ** 2  # ridge / n_eff
    residual = _residual(y, w / w.sum())
    one, zero = np.ones(size), np.zeros(size)
    match kind:
        case "identity":
            return Calibrator.identity(size)
        case "temperature":

            def temperature(x: Vector) -> tuple[float, Floats]:
                loss, gradient = residual(x[0] * z)
                return loss, np.array([np.vdot(gradient, z)])

            beta = minimise(temperature, np.ones(1), [SCALE_RANGE], tolerance)
            return Calibrator(kind, tuple((one * beta).tolist()), tuple(zero.tolist()))
        case "bias_temperature":

            def bias_temperature(x: Vector) -> tuple[float, Floats]:
                loss, gradient = residual(x[0] * z + x[1:])
                bias_gradient = gradient.sum(axis=0) + penalty * x[1:]
                loss += penalty / 2 * float(x[1:] @ x[1:])
                return loss, np.concatenate(([np.vdot(gradient, z)], bias_gradient))

            x = minimise(bias_temperature, np.concatenate(([1.0], zero)), [SCALE_RANGE, *_free(size)], tolerance)
            return Calibrator(kind, tuple((one * x[0]).tolist()), tuple(x[1:].tolist()), ridge=ridge)
        case "vector":

            def vector(x: Vector) -> tuple[float, Floats]:
                scale, bias = x[:size], x[size:]
                spread = scale - scale.mean()
                loss, gradient = residual(scale * z + bias)
                loss += penalty / 2 * float(bias @ bias + spread @ spread)
                by_scale = np.einsum("ij,ij->j", gradient, z) + penalty * spread
                return loss, np.concatenate((by_scale, gradient.sum(axis=0) + penalty * bias))

            x = minimise(vector, np.concatenate((one, zero)), [SCALE_RANGE] * size + _free(size), tolerance)
            return Calibrator(kind, tuple(x[:size].tolist()), tuple(x[size:].tolist()), ridge=ridge)
        case "dirichlet":
            off_diagonal = 1.0 - np.eye(size)

            def dirichlet(x: Vector) -> tuple[float, Floats]:
                matrix, bias = x[:-size].reshape(size, size), x[-size:]
                off = matrix * off_diagonal
                loss, gradient = residual(z @ matrix.T + bias)
                loss += penalty / 2 * float(np.vdot(off, off) + bias @ bias)
                by_matrix = gradient.T @ z + penalty * off
                return loss, np.concatenate((by_matrix.ravel(), gradient.sum(axis=0) + penalty * bias))

            bounds = [SCALE_RANGE if i == j else (None, None) for i in range(size) for j in range(size)]
            start = np.concatenate((np.eye(size).ravel(), zero))
            x = minimise(dirichlet, start, bounds + _free(size), tolerance)
            matrix = _as_matrix(x[:-size].reshape(size, size))
            return Calibrator(kind, (1.0,) * size, tuple(x[-size:].tolist()), matrix, ridge)


def match_prior(logprobs: ArrayLike, shares: ArrayLike, *, beta: float = 1.0) -> Calibrator:
    """Before labels exist: the bias under which the mean prediction over unlabelled tickets equals the desk's shares.

    `logprobs` (n, K) of at least 500 tickets of current traffic; `shares` (K,) historical shares or counts, a share of
    0 read as half a ticket in n. Probabilities from it are plausible, never certified (Zhao et al. 2021, Zhou et al.
    2023 for the label-free correction; uniform shares instead of the desk's own make a skewed stream worse). Raises
    ValueError.
    """
    target = np.array(shares, dtype=np.float64)
    z = relative_scores(logprobs, target.size, normalised=False)
    count = z.shape[0]
    if count < PRIOR_MIN_TICKETS:
        raise ValueError(f"{count} unlabelled tickets: matching shares needs at least {PRIOR_MIN_TICKETS}")
    if not (np.all(np.isfinite(target)) and np.all(target >= 0.0) and target.sum() > 0.0):
        raise ValueError("shares are non-negative numbers of which one is above 0")
    target = np.maximum(target / target.sum(), 0.5 / count)
    target /= target.sum()

    def dual(bias: Vector) -> tuple[float, Floats]:
        scores = beta * z + bias
        scores -= (top := scores.max(axis=1, keepdims=True))
        exponentials = np.exp(scores)
        total = exponentials.sum(axis=1, keepdims=True)
        loss = float(np.mean(np.log(total) + top)) - target @ bias
        return float(loss), (exponentials / total).mean(axis=0) - target

    bias = minimise(dual, np.log(target), _free(target.size), 1e-9)
    return Calibrator("prior_match", (beta,) * target.size, tuple((bias - bias.mean()).tolist()))


def usable_rows(logprobs: ArrayLike, labels: ArrayLike, weights: ArrayLike | None) -> tuple[Floats, Integers, Floats]:
    """Rows with a label in [0, K) and weight above 0, in an order that depends on their content only.

    Raises ValueError where shapes, labels or weights are impossible.
    """
    z = np.asarray(logprobs, dtype=np.float64)
    y = np.asarray(labels, dtype=np.int64)
    if z.ndim != 2 or z.shape[1] == 0 or y.shape != z.shape[:1]:
        raise ValueError(f"scores of shape {z.shape} and labels of shape {y.shape}: expected (n, K) and (n,)")
    if y.size and not -1 <= y.min() <= y.max() < z.shape[1]:
        raise ValueError(f"labels lie in [{y.min()}, {y.max()}], expected -1 (none) to {z.shape[1] - 1}")
    w = np.ones(y.size) if weights is None else np.asarray(weights, dtype=np.float64)
    if w.shape != y.shape or not (np.all(np.isfinite(w)) and np.all(w >= 0.0)):
        raise ValueError("weights are one non-negative number a row")
    keep = (y >= 0) & (w > 0.0)
    z, y, w = z[keep], y[keep], w[keep]
    order = np.lexsort((w, y, *z.T[::-1]))
    return z[order], y[order], w[order]


def _residual(y: Integers, w: Floats) -> Callable[[Floats], tuple[float, Floats]]:
    """Weighted NLL of (n, K) scores and its gradient in them; the scores are overwritten."""
    rows = np.arange(y.size)

    def nll(scores: Floats) -> tuple[float, Floats]:
        scores -= scores.max(axis=1, keepdims=True)
        gold = scores[rows, y]
        np.exp(scores, out=scores)
        total = scores.sum(axis=1)
        loss = float(w @ (np.log(total) - gold))
        scores *= (w / total)[:, None]
        scores[rows, y] -= w
        return loss, scores

    return nll


def minimise(
    objective: Callable[[Vector], tuple[float, Floats]], start: Floats, bounds: list[Bound], tolerance: float
) -> Floats:
    """L-BFGS-B on a convex `objective` that returns its value and gradient; `tolerance` is on the gradient."""
    found = optimize.minimize(
        objective,
        start.ravel(),
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": 2000, "maxfun": 10_000, "gtol": tolerance, "ftol": tolerance * 1e-6, "maxcor": 20},
    )
    return np.asarray(found.x, dtype=np.float64)


def _free(size: int) -> list[Bound]:
    return [(None, None)] * size


def _as_matrix(matrix: Floats) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in matrix.tolist())
