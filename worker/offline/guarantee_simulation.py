"""Guarantee simulation: on populations of known risk, how often each way to a threshold breaks its promise.

A draw of the labelled set gives a threshold; the population then says the true error rate among the routed. A violation
is a true rate above alpha. A procedure keeps its promise where violations are at most delta; `Outcome.allowed` adds
three standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from worker.core.binomial import binomial_cdf
from worker.core.calibration import Calibrator
from worker.core.fitting import fit
from worker.core.guarantees import certify, certify_frozen, freeze_thresholds, n_min
from worker.core.score_form import choose_form, in_fit_part, routed_label
from worker.core.selection import select

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

UNLABELLED = 500


class Population(Protocol):
    """Traffic with a known risk. Scores rise with confidence; errors are 1 where the routed label would be wrong."""

    @property
    def name(self) -> str: ...

    def draw(self, generator: np.random.Generator, n: int) -> tuple[Floats, Integers]:
        """`n` independent tickets: scores and errors."""

    def outcome(self, lambda_: float) -> tuple[float, float]:
        """Share of traffic with score > lambda_ (coverage) and the true error rate among it (risk, 0 where nothing
        routes).
        """


@dataclass(frozen=True)
class CurvePopulation:
    """Score u uniform on [0, 1], risk at it given by `eta`. Integrated on a grid that every jump of eta lies on."""

    name: str
    eta: Callable[[Floats], Floats]
    cells: int = 100_000

    def draw(self, generator: np.random.Generator, n: int) -> tuple[Floats, Integers]:
        u = generator.random(n)
        return u, (generator.random(n) < self.eta(u)).astype(np.int64)

    def outcome(self, lambda_: float) -> tuple[float, float]:
        at = min(max(lambda_, 0.0), 1.0)
        coverage = 1.0 - at
        if coverage <= 0.0:
            return 0.0, 0.0
        return coverage, float(np.interp(at, np.linspace(0.0, 1.0, self.cells + 1), self._above)) / coverage

    @cached_property
    def _above(self) -> Floats:
        """Errors per ticket of all traffic that score above each grid point."""
        middles = (np.arange(self.cells) + 0.5) / self.cells
        return np.concatenate((np.cumsum(self.eta(middles)[::-1])[::-1], [0.0])) / self.cells


CURVES = (
    CurvePopulation("smooth", lambda u: 0.005 + 0.45 * (1 - u) ** 2.2),
    CurvePopulation("badtop", lambda u: np.where(u > 0.97, 0.30, 0.004 + 0.40 * (1 - u) ** 2)),
    CurvePopulation("flat", lambda u: np.full_like(u, 0.055)),
    CurvePopulation("edge", lambda u: np.where(u > 0.4, 0.049, 0.20)),
    CurvePopulation(
        "bumpy", lambda u: np.where(u > 0.7, 0.02, np.where(u > 0.62, 0.16, 0.012 + 0.30 * (1 - u) ** 2.5))
    ),
)
"""badtop and bumpy break the assumption that stricter thresholds do not raise the risk; flat breaks 5 % at every
threshold, so any threshold is a violation; edge lies just below 5 % for most of its traffic and far above for the rest.
"""

LABEL_BIAS = (0.08, -0.08, 0.38, 0.06, -0.32, 0.22, 0.78, 0.57)
"""Nats that the label tokens and their order add to every ticket; one draw of N(0, .6), rounded."""


@dataclass(frozen=True)
class LanguageModelPopulation:
    """Eight skewed categories scored by something like a language model: overconfident, with a fixed label bias,
    heavy-tailed noise and 4 % of tickets that belong to no category. About 87 % of the raw argmaxes are right.

    `pool` tickets stand for the population; they are drawn once, from `pool_seed`, and never labelled.
    """

    name: str = "LLM-like"
    bias: tuple[float, ...] = LABEL_BIAS
    out_of_scope: float = 0.04
    sharpness: float = 1.9
    pool: int = 300_000
    pool_seed: int = 20_240_501

    def draw_logprobs(self, generator: np.random.Generator, n: int) -> tuple[Floats, Integers]:
        """(n, K) label log-probabilities and (n,) labels, -1 for a ticket of no category."""
        size = len(self.bias)
        prior = np.arange(1, size + 1) ** -0.7
        labels = generator.choice(size, n, p=prior / prior.sum())
        stranger = generator.random(n) < self.out_of_scope
        pull = np.abs(np.where(stranger, generator.normal(1.5, 1.5, n), generator.normal(4.6, 2.1, n)))
        towards = np.where(stranger, generator.integers(0, size, n), labels)
        logits = generator.standard_normal((n, size))
        logits[np.arange(n), towards] += pull
        logits = self.sharpness * logits + np.asarray(self.bias) + 0.3 * generator.standard_t(3, (n, size))
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logits, np.where(stranger, -1, labels)

    def draw(self, generator: np.random.Generator, n: int) -> tuple[Floats, Integers]:
        """Raw margins, and whether the raw argmax is wrong."""
        return _raw(*self.draw_logprobs(generator, n))

    def outcome(self, lambda_: float) -> tuple[float, float]:
        scores, wrong = self._rising
        accepted = scores.size - int(np.searchsorted(scores, lambda_, side="right"))
        return accepted / scores.size, float(wrong[accepted]) / max(accepted, 1)

    @cached_property
    def population(self) -> tuple[Floats, Integers]:
        """The pool itself: log-probabilities and labels."""
        return self.draw_logprobs(np.random.default_rng(self.pool_seed), self.pool)

    @cached_property
    def _rising(self) -> tuple[Floats, Integers]:
        """Rising scores of the pool, and errors among its m highest."""
        scores, errors = _raw(*self.population)
        order = np.argsort(scores, kind="stable")
        return scores[order], np.concatenate(([0], np.cumsum(errors[order][::-1])))


LANGUAGE_MODEL = LanguageModelPopulation()
POPULATIONS: tuple[Population, ...] = (*CURVES, LANGUAGE_MODEL)


@dataclass(frozen=True, slots=True)
class Labelled:
    """One draw: what a procedure may look at."""

    scores: Floats
    errors: Integers
    unlabelled: Floats
    alpha: float
    delta: float


Procedure = Callable[[Labelled], float]
"""A labelled set -> the threshold: route where the score is above it."""


def ours(drawn: Labelled) -> float:
    """Rank form."""
    return certify(drawn.scores, drawn.errors, alpha=drawn.alpha, delta=drawn.delta).lambda_


def ours_frozen(drawn: Labelled) -> float:
    """Frozen form, on scores that were never labelled."""
    frozen = freeze_thresholds(drawn.unlabelled)
    return certify_frozen(drawn.scores, drawn.errors, frozen, alpha=drawn.alpha, delta=drawn.delta).lambda_


def naive(drawn: Labelled) -> float:
    """Wrong: the loosest threshold whose empirical error rate is at most alpha."""
    s, k = _ranked(drawn)
    m = np.arange(1, s.size + 1)
    return _loosest(s, k <= drawn.alpha * m)


def uncorrected_scan(drawn: Labelled) -> float:
    """Wrong: the loosest threshold whose exact bound at delta is at most alpha, as if no other were looked at."""
    s, k = _ranked(drawn)
    return _loosest(s, binomial_cdf(k, np.arange(1, s.size + 1), drawn.alpha) <= drawn.delta)


def geifman_el_yaniv(drawn: Labelled) -> float:
    """Selection with guaranteed risk (Geifman & El-Yaniv 2017, arXiv:1705.08500, algorithm 1): binary search over
    ranks, each of its ceil(log2 n) exact bounds at an equal share of delta. The loosest threshold that passed is taken.
    """
    s, k = _ranked(drawn)
    steps = max(1, math.ceil(math.log2(s.size)))
    strict, loose, best = 1, s.size, 0
    for _ in range(steps):
        m = math.ceil((strict + loose) / 2)
        passes = binomial_cdf(k[m - 1 : m], np.array([m]), drawn.alpha)[0] <= drawn.delta / steps
        if passes:
            strict, best = m, max(best, m)
        else:
            loose = m
    return _threshold(s, best)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of `draws` labelled sets of `n`: share of violations, mean coverage."""

    population: str
    procedure: str
    n: int
    alpha: float
    delta: float
    draws: int
    violation: float
    coverage: float

    @property
    def allowed(self) -> float:
        """delta and three standard errors of a share of `draws`."""
        return self.delta + 3.0 * math.sqrt(self.delta * (1.0 - self.delta) / self.draws)

    @property
    def holds(self) -> bool:
        """Whether the violations are within what delta allows."""
        return self.violation <= self.allowed


PROCEDURES: Mapping[str, Procedure] = {
    "naive": naive,
    "geifman_el_yaniv": geifman_el_yaniv,
    "rank": ours,
    "frozen": ours_frozen,
    "uncorrected_scan": uncorrected_scan,
}


def simulate(
    population: Population,
    procedures: Sequence[str],
    *,
    n: int,
    draws: int,
    seed: int,
    alpha: float = 0.05,
    delta: float = 0.05,
) -> tuple[Outcome, ...]:
    """Every procedure (by its name in PROCEDURES) on the same draws, in the order asked."""
    generator = np.random.default_rng([seed, n])
    tally = {name: _Tally() for name in procedures}
    for _ in range(draws):
        scores, errors = population.draw(generator, n)
        unlabelled = population.draw(generator, UNLABELLED)[0] if "frozen" in tally else np.zeros(0)
        drawn = Labelled(scores, errors, unlabelled, alpha, delta)
        for name, counted in tally.items():
            counted.add(population.outcome(PROCEDURES[name](drawn)), alpha)
    return tuple(counted.outcome(population.name, name, n, alpha, delta) for name, counted in tally.items())


Fitting = Callable[[Floats, Integers], Calibrator]
Form = Literal["split", "chosen", "same_labels"]


def bias_temperature(logprobs: Floats, labels: Integers) -> Calibrator:
    """The usual winner of the selection, without the selection's cost."""
    return fit(logprobs, labels, "bias_temperature", ridge=5.0)


def simulate_form(
    population: LanguageModelPopulation,
    form: Form,
    *,
    n: int,
    draws: int,
    seed: int,
    alpha: float = 0.05,
    delta: float = 0.05,
    fitting: Fitting = bias_temperature,
    evaluate_on: int = 60_000,
) -> Outcome:
    """What calibrated scores do to the guarantee, the calibrator being fitted anew on every labelled set.

    `split`: 35 % fit, 65 % certify. `chosen`: split or raw margin as `core.score_form.choose_form` decides on the fit
    part. `same_labels`: fitted and certified on all labels, which promises nothing.
    """
    generator = np.random.default_rng([seed, n])
    counted = _Tally()
    logprobs, labels = population.population
    traffic = logprobs[:evaluate_on], labels[:evaluate_on]
    for draw in range(draws):
        logprobs, labels = population.draw_logprobs(generator, n)
        fits = np.array([in_fit_part(f"{seed}/{draw}/{i}") for i in range(n)])
        certifies = ~fits
        if form == "chosen":
            selection = select(logprobs[fits], labels[fits], seed=seed)
            gain, gain_se = selection.accuracy_gain, selection.accuracy_gain_se
            if choose_form(n, n_min(alpha, delta), gain, gain_se) == "raw_margin":
                scores, errors = _raw(logprobs, labels)
                found = certify(scores, errors, alpha=alpha, delta=delta)
                counted.add(population.outcome(found.lambda_), alpha)
                continue
        elif form == "same_labels":
            fits = certifies = np.ones(n, dtype=np.bool_)
        calibrator = fitting(logprobs[fits], labels[fits])
        routed = [routed_label("max_probability", calibrator, row) for row in logprobs[certifies].tolist()]
        errors = np.array([label.index for label in routed]) != labels[certifies]
        found = certify([label.score for label in routed], errors, alpha=alpha, delta=delta)
        counted.add(_outcome(calibrator, *traffic, found.lambda_), alpha)
    return counted.outcome(population.name, form, n, alpha, delta)


@dataclass
class _Tally:
    draws: int = 0
    violations: int = 0
    coverage: float = 0.0

    def add(self, outcome: tuple[float, float], alpha: float) -> None:
        coverage, risk = outcome
        self.draws += 1
        self.violations += risk > alpha
        self.coverage += coverage

    def outcome(self, population: str, procedure: str, n: int, alpha: float, delta: float) -> Outcome:
        rates = self.violations / self.draws, self.coverage / self.draws
        return Outcome(population, procedure, n, alpha, delta, self.draws, *rates)


def _raw(logprobs: Floats, labels: Integers) -> tuple[Floats, Integers]:
    """`core.score_form.raw_margin` for many rows."""
    top_two = np.partition(logprobs, -2, axis=1)[:, -2:]
    return top_two[:, 1] - top_two[:, 0], (logprobs.argmax(axis=1) != labels).astype(np.int64)


def _outcome(calibrator: Calibrator, logprobs: Floats, labels: Integers, lambda_: float) -> tuple[float, float]:
    probabilities = calibrator.apply(logprobs)
    routed = probabilities.max(axis=1) > lambda_
    wrong = probabilities.argmax(axis=1) != labels
    return float(routed.mean()), float(wrong[routed].mean()) if routed.any() else 0.0


def _ranked(drawn: Labelled) -> tuple[Floats, Integers]:
    """Scores from high to low, and errors among the m highest for m = 1 ... n."""
    order = np.argsort(-drawn.scores, kind="stable")
    return drawn.scores[order], np.cumsum(drawn.errors[order])


def _loosest(s: Floats, passes: NDArray[np.bool_]) -> float:
    found = np.flatnonzero(passes)
    return _threshold(s, int(found[-1]) + 1 if found.size else 0)


def _threshold(s: Floats, m: int) -> float:
    if m == 0:
        return math.inf
    return float(s[m]) if m < s.size else -math.inf
