"""Measures: every figure about a set of answered tickets, each with its interval. Conventions as core.reliability."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from worker.core.binomial import clopper_pearson
from worker.core.reliability import (
    Band,
    Monotonicity,
    aurc,
    bands,
    bootstrap_ece,
    brier,
    confusion,
    macro_f1,
    maximum_calibration_error,
    monotonicity,
    nll,
)

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

CONFIDENCE = 0.95
DRAWS = 1000
FEW_DRAWS = 200
"""For statistics that cost a sort or a count of all tickets, above MANY tickets."""
MANY = 2000
DIAGRAM_EDGES = tuple(step / 10 for step in range(11))


@dataclass(frozen=True, slots=True)
class Measured:
    """A value with its 95 % interval; NaN where there was nothing to measure."""

    value: float
    lower: float
    upper: float

    def to_dict(self) -> dict[str, float | None]:
        """Strict JSON values; NaN is null."""
        values = {"value": self.value, "lower": self.lower, "upper": self.upper}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class Measures:
    """`n` answered tickets of which `out_of_scope` belong to no category: wrong wherever answers are counted, left out
    of NLL (nats) and Brier (0 to 2). ECE has 15 equal-width bins. AURC is the area under the risk-coverage curve.
    """

    n: int
    out_of_scope: int
    accuracy: Measured
    nll: Measured
    brier: Measured
    ece: Measured
    macro_f1: Measured
    aurc: Measured
    largest_gap: float
    """Largest difference between confidence and accuracy over the bins."""
    bands: tuple[Band, ...]
    monotonicity: Monotonicity
    diagram: tuple[Band, ...]
    """Ten equal bands, for the reliability diagram."""
    confusion: tuple[tuple[int, ...], ...]
    """(K + 1, K): row is the true label, the last row tickets of no category."""

    def to_dict(self) -> dict[str, Any]:
        """What goes into an artefact."""
        names = ("accuracy", "nll", "brier", "ece", "macro_f1", "aurc")
        return {
            "n": self.n,
            "out_of_scope": self.out_of_scope,
            **{name: getattr(self, name).to_dict() for name in names},
            "ece_bins": 15,
            "monotonicity": self.monotonicity,
        }


def share(k: int, n: int) -> Measured:
    """k of n with its Clopper-Pearson interval; NaN in [0, 1] for n = 0."""
    if n == 0:
        return Measured(math.nan, 0.0, 1.0)
    return Measured(k / n, *clopper_pearson(k, n, CONFIDENCE))


def measure(
    probabilities: ArrayLike, predicted: Sequence[int], confidence: Sequence[float], labels: Sequence[int], *, seed: int
) -> Measures:
    """(n, K) label probabilities, and per ticket the label that was answered, the probability stated for it and the
    true label (-1: no category). Shares have Clopper-Pearson intervals, the rest percentile intervals over
    resampled tickets. Raises ValueError where there is no ticket.
    """
    p = np.asarray(probabilities, dtype=np.float64)
    guess, y = np.asarray(predicted, dtype=np.int64), np.asarray(labels, dtype=np.int64)
    conf = np.asarray(confidence, dtype=np.float64)
    if y.size == 0:
        raise ValueError("no answered ticket to measure")
    right = (guess == y).astype(np.float64)
    generator = np.random.default_rng(seed)
    ece = bootstrap_ece(conf, right, generator, draws=DRAWS, interval=CONFIDENCE)
    found = bands(conf, right)
    size = p.shape[1]
    inside = y >= 0
    gold = p[inside][np.arange(int(inside.sum())), y[inside]]
    losses = -np.log(np.clip(gold, np.finfo(np.float64).eps, 1.0))
    squares = np.einsum("ij,ij->i", p[inside], p[inside]) - 2.0 * gold + 1.0
    return Measures(
        n=int(y.size),
        out_of_scope=int((~inside).sum()),
        accuracy=share(int(right.sum()), int(y.size)),
        nll=_mean(nll(p, y), losses, generator),
        brier=_mean(brier(p, y), squares, generator),
        ece=Measured(ece.value, ece.lower, ece.upper),
        macro_f1=_resampled(
            y.size, generator, lambda rows: macro_f1(confusion(guess[rows], y[rows], size)), costly=True
        ),
        aurc=_resampled(y.size, generator, lambda rows: aurc(conf[rows], 1.0 - right[rows]), costly=True),
        largest_gap=maximum_calibration_error(conf, right),
        bands=found,
        monotonicity=monotonicity(found),
        diagram=bands(conf, right, DIAGRAM_EDGES),
        confusion=tuple(map(tuple, confusion(guess, y, size).tolist())),
    )


def _mean(value: float, each: Floats, generator: np.random.Generator) -> Measured:
    if each.size == 0:
        return Measured(math.nan, math.nan, math.nan)
    interval = _resampled(each.size, generator, lambda rows: float(each[rows].mean()))
    return Measured(value, interval.lower, interval.upper)


def _resampled(
    n: int, generator: np.random.Generator, statistic: Callable[[Integers], float], *, costly: bool = False
) -> Measured:
    tail = (1.0 - CONFIDENCE) / 2.0
    draws = FEW_DRAWS if costly and n > MANY else DRAWS
    drawn = [statistic(generator.integers(0, n, n)) for _ in range(draws)]
    lower, upper = np.quantile(drawn, [tail, 1.0 - tail])
    return Measured(statistic(np.arange(n)), float(lower), float(upper))
