"""Thresholds with finite-sample bounds: fallback fixed-sequence testing with exact binomial bounds.

Guarantee of `certify`: over draws of the labelled set, P(error rate among the routed > alpha) <= delta. It assumes that
the labelled tickets are a random sample of the traffic to be routed (same model, engine, prompt and label order;
near-duplicates collapsed), that the score was not fitted on the same labels, and that the error rate above a threshold
crosses alpha once as the threshold loosens. `certify_frozen` drops the last assumption for thresholds that were fixed
on other tickets.

Which sizes are tested, and with which share of delta, is planned from n alone (fallback procedure, Wiens 2003, for the
fixed sequences of Learn then Test, Angelopoulos et al. 2021, arXiv:2110.01052). A certified step hands its level on; a
failed one spends it, and testing resumes at the next start. `certify_misroutes` is RCPS (Bates et al. 2021,
arXiv:2101.02703).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from worker.core.binomial import (
    binomial_cdf,
    check_level,
    clopper_pearson,
    clopper_pearson_lower,
    clopper_pearson_upper,
    critical_sizes,
    kmax,
    n_min,
)
from worker.core.certificates import Basis, Certificate, MarginGate, Procedure, ScoreForm

__all__ = [
    "Certificate",
    "FrozenThresholds",
    "MarginGate",
    "Subject",
    "certify",
    "certify_frozen",
    "certify_misroutes",
    "clopper_pearson",
    "clopper_pearson_lower",
    "clopper_pearson_upper",
    "freeze_thresholds",
    "kmax",
    "labels_needed",
    "margin_gate",
    "n_min",
]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MAX_STARTS = 4
FROZEN_COVERAGES = tuple(step / 20 for step in range(1, 21))
FROZEN_MIN_SCORES = 500
NEED_HORIZON = 100
"""How many times the present labels `labels_needed` looks ahead before it says that it does not know."""
NEED_CHANCE = 2 / 3
"""How likely the labels it asks for must be to certify something."""
NEED_PRIOR = 0.25
"""Wrong and right tickets that it adds to those counted, or no error among a few would be taken for none ever. With
this and the chance above, the labels asked for sufficed in 50 to 100 % of simulated draws wherever something could be
certified at all."""
NEED_STEP = 1.04
"""One set that it considers is so many times as large as the one before."""
TOO_FEW = 5
"""With fewer labels than so many times the fewest that could certify, nothing is said about other labels not helping
unless the errors show it."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom a certificate is about; see `Certificate`."""

    group: str = "all"
    members: tuple[str, ...] = ()
    basis: Basis = "all"
    score: ScoreForm = "raw_margin"


ALL = Subject()


@dataclass(frozen=True, slots=True)
class FrozenThresholds:
    """Thresholds fixed before any label is looked at, strict to loose, and the share of tickets above each."""

    thresholds: tuple[float, ...]
    coverages: tuple[float, ...]


def certify(scores: ArrayLike, errors: ArrayLike, *, alpha: float, delta: float, subject: Subject = ALL) -> Certificate:
    """Rank form: thresholds from the labelled scores themselves.

    `scores` (n,), higher is surer; `errors` (n,), 1 where the label that would be routed is wrong (a ticket of no
    category is). Equal scores are routed together or not at all. Raises ValueError.
    """
    s, wrong = _by_score(scores, errors)
    question = _Question("rank", alpha, delta, subject)
    sizes, starts = _plan(s.size, alpha, delta)
    ends = np.searchsorted(-s, -s[sizes - 1], side="right")  # a threshold lies at the end of a tie block
    best, level = _walk(binomial_cdf(wrong[ends], ends, alpha), starts, delta)
    if best < 0:
        return question.short_of(s, wrong)
    m = int(ends[best])
    return question.passed(s.size, m, int(wrong[m]), level, _below(s, m))


def freeze_thresholds(unlabelled_scores: ArrayLike) -> FrozenThresholds:
    """Thresholds at coverages .05, .10, ..., 1 of unlabelled scores that are independent of the labelled ones.

    Raises ValueError below 500 of them, and on NaN.
    """
    s = -np.sort(-np.asarray(unlabelled_scores, dtype=np.float64))
    if s.ndim != 1 or s.size < FROZEN_MIN_SCORES or np.isnan(s).any():
        raise ValueError(
            f"frozen thresholds need {FROZEN_MIN_SCORES} unlabelled scores that are numbers; shape {s.shape}"
        )
    at: dict[float, float] = {}
    for coverage in FROZEN_COVERAGES:
        above = math.floor(coverage * s.size)
        threshold = float(s[above]) if above < s.size else -math.inf
        at.setdefault(threshold, float(np.mean(s > threshold)))
    return FrozenThresholds(tuple(at), tuple(at.values()))


def certify_frozen(
    scores: ArrayLike,
    errors: ArrayLike,
    frozen: FrozenThresholds,
    *,
    alpha: float,
    delta: float,
    subject: Subject = ALL,
) -> Certificate:
    """Frozen form: the same walk over thresholds fixed beforehand.

    Assumes nothing on how risk changes with strictness. From 200 labels on it costs 1 to 8 points of coverage against
    `certify`, below that far more. Raises ValueError.
    """
    s, wrong = _by_score(scores, errors)
    question = _Question("frozen", alpha, delta, subject)
    fewest = n_min(alpha, delta)
    eligible = [i for i, coverage in enumerate(frozen.coverages) if s.size * coverage >= 1.25 * fewest]
    if not eligible and s.size >= fewest and frozen.thresholds:
        eligible = [len(frozen.thresholds) - 1]
    if not eligible:
        return question.short_of(s, wrong)
    count = _start_count(s.size, fewest)
    starts = {eligible[0] + len(eligible) * i // count for i in range(count)}
    thresholds = np.array(frozen.thresholds[eligible[0] :])
    m = np.searchsorted(-s, -thresholds, side="left")  # labelled scores strictly above each
    is_start = np.array([i in starts for i in range(eligible[0], len(frozen.thresholds))])
    best, level = _walk(binomial_cdf(wrong[m], m, alpha), is_start, delta)
    if best < 0:
        return question.short_of(s, wrong)
    return question.passed(s.size, int(m[best]), int(wrong[m[best]]), level, float(thresholds[best]))


def certify_misroutes(
    scores: ArrayLike, errors: ArrayLike, *, alpha: float, delta: float, subject: Subject = ALL
) -> Certificate:
    """The looser target: misroutes per ticket of *all* traffic at most alpha, with probability 1 - delta.

    The loss falls as the threshold tightens by construction, so one exact bound at full delta serves every threshold:
    no multiplicity, and 59 labels in total are enough at 5 %/5 %. Raises ValueError.
    """
    s, wrong = _by_score(scores, errors)
    question = _Question("misroutes_per_ticket", alpha, delta, subject)
    allowed = kmax(s.size, alpha, delta)
    ends = _block_ends(s)
    passing = ends[wrong[ends] <= allowed]
    if passing.size == 0:
        need = n_min(alpha, delta) if allowed < 0 else None
        return question.refused(s.size, need, _too_few(wrong, alpha, delta))
    m = int(passing[-1])
    return question.passed(s.size, m, int(wrong[m]), delta, _below(s, m))


def margin_gate(margins: ArrayLike, flips: ArrayLike, *, phi: float = 0.01, delta: float = 0.05) -> MarginGate:
    """Stability, from tickets scored twice under different batch mixes.

    `margins` (n,), and `flips` (n,): 1 where the top label differed. Below n_min(phi, delta) repeats (299 at 1 %/5 %)
    the gate is off, as nothing could show stability. Search the routing threshold among the labelled tickets inside the
    gate. Raises ValueError.
    """
    certificate = certify(margins, flips, alpha=phi, delta=delta)
    measured = certificate.n >= n_min(phi, delta)
    m_star = certificate.lambda_ if measured else -math.inf
    return MarginGate(measured, m_star, certificate.n, certificate.m, certificate.k, phi, delta)


def labels_needed(scores: ArrayLike, errors: ArrayLike, *, alpha: float, delta: float) -> int | None:
    """How many labelled tickets would likely certify something if they were like these.

    An estimate: the fewest, above those there are, of which one of the sizes that are tested first certifies with a
    chance of two in three, at the error rate that these have among their surest tickets. None where no multiple up to
    100 would.
    """
    s, wrong = _by_score(scores, errors)
    check_level("alpha", alpha)
    return _labels_needed(s, wrong, alpha, delta)


@lru_cache(maxsize=512)
def _plan(n: int, alpha: float, delta: float) -> tuple[Integers, NDArray[np.bool_]]:
    """Sizes to test, increasing, and which of them start with a fresh share of delta: from n, never from labels."""
    fewest = n_min(alpha, delta)
    if n < fewest:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_)
    count = _start_count(n, fewest)
    at_start = critical_sizes(n, alpha, delta / count)
    spread = np.linspace(at_start[0], 0.9 * n, count, endpoint=False)
    raised = np.searchsorted(at_start, spread, side="left")
    starts = np.unique(at_start[raised[raised < at_start.size]])
    afterwards = critical_sizes(n, alpha, delta)
    sizes = np.unique(np.concatenate((starts, afterwards[afterwards >= starts[0]], [n])))
    is_start = np.isin(sizes, starts)
    sizes.setflags(write=False)
    is_start.setflags(write=False)
    return sizes, is_start


def _start_count(n: int, fewest: int) -> int:
    return min(max(n // (4 * fewest), 1), MAX_STARTS)


def _walk(p_values: Floats, starts: NDArray[np.bool_], delta: float) -> tuple[int, float]:
    """Strict to loose through the fallback procedure: index of the last certified step, -1 for none, and its level.

    A p-value is P(Bin(m, alpha) <= k). Shares of delta are counted, not added, so that all of them make exactly delta.
    """
    total = int(starts.sum())
    best, best_level, held = -1, 0.0, 0
    for step, (p_value, start) in enumerate(zip(p_values.tolist(), starts.tolist(), strict=True)):
        held += start
        if held == 0:
            continue
        level = delta if held == total else float(Fraction(held, total)) * delta
        if p_value <= level:
            best, best_level = step, level
        else:
            held = 0
    return best, best_level


def _by_score(scores: ArrayLike, errors: ArrayLike) -> tuple[Floats, Integers]:
    """Scores from high to low, and the number of errors among the m highest for m = 0 ... n."""
    s, e = np.asarray(scores, dtype=np.float64), np.asarray(errors)
    if s.ndim != 1 or s.shape != e.shape:
        raise ValueError(f"scores of shape {s.shape} and errors of shape {e.shape}: expected (n,) and (n,)")
    if np.isnan(s).any():
        raise ValueError("a score is not a number: such a ticket escalates and cannot certify anything")
    if not np.all((e == 0) | (e == 1)):
        raise ValueError("errors are 1 (the routed label would be wrong) or 0")
    order = np.argsort(-s, kind="stable")
    wrong = np.zeros(s.size + 1, dtype=np.int64)
    np.cumsum(e[order], out=wrong[1:], dtype=np.int64)
    return s[order], wrong


def _labels_needed(s: Floats, wrong: Integers, alpha: float, delta: float) -> int | None:
    n, fewest = s.size, n_min(alpha, delta)
    if n == 0:
        return fewest
    horizon = NEED_HORIZON * max(n, fewest)
    sizes, first, errors = _prospects(1 << (horizon - 1).bit_length(), alpha, delta)
    ends = _block_ends(s)  # equal scores are accepted together
    rates = (wrong[ends] + NEED_PRIOR) / (ends + 2 * NEED_PRIOR)
    rates = np.minimum.accumulate(rates[::-1])[::-1]  # being stricter makes no worse
    above = np.minimum(np.ceil(first / sizes * n).astype(np.int64), n)
    likely = binomial_cdf(errors, first, rates[np.searchsorted(ends, above)]) >= NEED_CHANCE
    enough = sizes[likely & (sizes > n) & (sizes <= horizon)]
    return int(enough.min()) if enough.size else None


@lru_cache(maxsize=64)
def _prospects(horizon: int, alpha: float, delta: float) -> tuple[Integers, Integers, Integers]:
    """Numbers of labels up to about the horizon, increasing: for each the sizes at which its tests start, and the
    errors that each of those may have. Three arrays of one length.
    """
    fewest = n_min(alpha, delta)
    turns = [4 * fewest * (starts + 1) for starts in range(1, MAX_STARTS)]  # from there on one start more
    ladder, size = set(turns), fewest
    while size <= horizon:
        ladder.add(size)
        size = max(size + 1, math.ceil(size * NEED_STEP))
    rows: list[tuple[int, int, int]] = []
    for labels in sorted(ladder):
        count = _start_count(labels, fewest)
        most = horizon if count == MAX_STARTS else turns[count - 1]
        tested = critical_sizes(most, alpha, delta / count)
        tested = tested[: np.searchsorted(tested, labels, side="right")]
        raised = np.searchsorted(tested, np.linspace(tested[0], 0.9 * labels, count, endpoint=False), side="left")
        rows += [(labels, int(tested[errors]), int(errors)) for errors in np.unique(raised[raised < tested.size])]
    sizes, first, errors = np.array(rows, dtype=np.int64).T
    return sizes, first, errors


def _too_few(wrong: Integers, alpha: float, delta: float) -> bool:
    """Whether these are so few that nothing follows from their having certified nothing: not even that more of all
    tickets are wrong than right.
    """
    n, fewest = wrong.size - 1, n_min(alpha, delta)
    return n < TOO_FEW * fewest and (n == 0 or clopper_pearson_lower(int(wrong[n]), n, 0.05) <= max(alpha, 0.5))


def _block_ends(s: Floats) -> Integers:
    """Numbers of items at which a tie block of the falling scores ends."""
    return np.flatnonzero(np.append(s[1:] < s[:-1], np.ones(min(s.size, 1), dtype=np.bool_))) + 1


def _below(s: Floats, m: int) -> float:
    """The strict threshold that accepts exactly the m highest of the falling scores."""
    return float(s[m]) if m < s.size else -math.inf


@dataclass(frozen=True, slots=True)
class _Question:
    procedure: Procedure
    alpha: float
    delta: float
    subject: Subject

    def passed(self, n: int, m: int, k: int, level: float, lambda_: float) -> Certificate:
        return self._certificate(n=n, m=m, k=k, level=level, lambda_=lambda_, need=n)

    def short_of(self, s: Floats, wrong: Integers) -> Certificate:
        """Refused for what these scores and errors are."""
        need = _labels_needed(s, wrong, self.alpha, self.delta)
        return self.refused(s.size, need, _too_few(wrong, self.alpha, self.delta))

    def refused(self, n: int, need: int | None, too_few: bool) -> Certificate:
        too_few = too_few and need is None
        return self._certificate(n=n, m=0, k=0, level=0.0, lambda_=math.inf, need=need, too_few=too_few)

    def _certificate(
        self, *, n: int, m: int, k: int, level: float, lambda_: float, need: int | None, too_few: bool = False
    ) -> Certificate:
        return Certificate(
            group=self.subject.group,
            members=self.subject.members,
            basis=self.subject.basis,
            procedure=self.procedure,
            score=self.subject.score,
            n=n,
            m=m,
            k=k,
            alpha=self.alpha,
            delta=self.delta,
            level=level,
            lambda_=lambda_,
            need=need,
            too_few=too_few,
        )
