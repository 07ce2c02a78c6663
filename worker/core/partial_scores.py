"""What holds for every value that unknown labels may have: which label is routed, and the range of its score.

A calibrator's p = softmax(W x + b) compares two labels by a_j - a_i = sum_k (W_jk - W_ik) x_k + b_j - b_i, which is
linear in the relative scores x and, where those are normalised over the labels, in their log total. Interval arithmetic
(Moore, Kearfott, Cloud 2009) bounds it for each pair: exactly for identity, temperature, bias_temperature and
prior_match, whose labels enter one by one; for vector and dirichlet the bounds hold and may be wider than need be, so
that some tickets go to people that a complete answer would have routed, and never the other way round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from worker.core.calibration import NORMALISED, SCORE_FLOOR, Calibrator
from worker.core.certificates import ScoreForm
from worker.core.per_ticket import per_ticket
from worker.core.scores import LabelScores

SLACK = 1e-9
"""By so much every range is wider than computed: rounding must not lift a score over a threshold that it equals."""
EXP_LIMIT = 700.0
"""math.exp overflows a little above."""


@per_ticket
class Range:
    """Every value that is possible lies in [low, high]."""

    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Range:
        return cls(value, value)

    def widened(self) -> Range:
        return Range(self.low - SLACK, self.high + SLACK)


@dataclass(frozen=True, slots=True)
class Settled:
    """The label at `index` is the first, whatever the unknown labels are.

    `score` and `margin` are those of the score form. `at_least` holds for each label the probability that it has at
    least, 0 where it is unknown.
    """

    index: int
    score: Range
    margin: Range
    at_least: tuple[float, ...]


def settle(form: ScoreForm, calibrator: Calibrator, scores: LabelScores) -> Settled | None:
    """None where unknown labels could make another label the first. Plain equality does not count as first."""
    best = scores.best_known
    if best in scores.unknown or any(scores.logprobs[place] > scores.logprobs[best] for place in scores.unknown):
        return None
    if form == "raw_margin":
        index, others = best, [z for place, z in enumerate(scores.logprobs) if place != best]
        known = [z for place, z in enumerate(scores.logprobs) if place != best and place not in scores.unknown]
        top = scores.logprobs[best]
        margin = Range(top - max(others), top - max(known, default=-math.inf)).widened()
        if margin.low <= 0.0:
            return None
        probability, at_least = _probabilities(differences(calibrator, scores, index), scores)
        return Settled(index, margin, margin, at_least)
    at_bounds = calibrator.apply_one(scores.logprobs)
    index = max(range(len(at_bounds)), key=at_bounds.__getitem__)
    behind = differences(calibrator, scores, index)
    others_high = [pair.high for place, pair in enumerate(behind) if place != index]
    others_low = [pair.low for place, pair in enumerate(behind) if place != index]
    if max(others_high) >= -SLACK:
        return None
    probability, at_least = _probabilities(behind, scores)
    # p_i - p_j = p_i (1 - e^(a_j - a_i)), and both factors are positive
    margin = Range(
        probability.low * -math.expm1(max(others_high)), probability.high * -math.expm1(max(others_low))
    ).widened()
    score = probability.widened()
    return Settled(index, Range(score.low, min(score.high, 1.0)), margin, at_least)


def differences(calibrator: Calibrator, scores: LabelScores, index: int) -> list[Range]:
    """For each label j the range of a_j - a_index in nats. A known label must have the largest log-probability."""
    top = scores.logprobs[scores.best_known]
    high = [max(z - top, SCORE_FLOOR) for z in scores.logprobs]
    low = [SCORE_FLOOR if place in scores.unknown else z for place, z in enumerate(high)]
    total = Range(0.0, 0.0)
    if calibrator.kind in NORMALISED:
        total = Range(math.log(math.fsum(map(math.exp, low))), math.log(math.fsum(map(math.exp, high))))
    size = len(high)
    found = []
    for other in range(size):
        constant = calibrator.bias[other] - calibrator.bias[index]
        weights = _weights(calibrator, other, index)
        least, most = [constant], [constant]
        for place, weight in weights:
            ends = (weight * low[place], weight * high[place])
            least.append(min(ends))
            most.append(max(ends))
        drift = -math.fsum(weight for _, weight in weights)
        ends = (drift * total.low, drift * total.high)
        found.append(Range(math.fsum([*least, min(ends)]), math.fsum([*most, max(ends)])))
    return found


def _weights(calibrator: Calibrator, other: int, index: int) -> list[tuple[int, float]]:
    """(k, W_other,k - W_index,k) for every k that counts."""
    if other == index:
        return []
    if calibrator.matrix:
        rows = zip(calibrator.matrix[other], calibrator.matrix[index], strict=True)
        return [(place, theirs - own) for place, (theirs, own) in enumerate(rows)]
    return [(other, calibrator.scale[other]), (index, -calibrator.scale[index])]


def _probabilities(behind: list[Range], scores: LabelScores) -> tuple[Range, tuple[float, ...]]:
    """The probability of the label that everything is compared with, and each label's least."""
    own = Range(
        1.0 / math.fsum(math.exp(min(pair.high, EXP_LIMIT)) for pair in behind),
        1.0 / math.fsum(math.exp(min(pair.low, EXP_LIMIT)) for pair in behind),
    )
    at_least = tuple(
        0.0 if place in scores.unknown else own.low * math.exp(min(pair.low, EXP_LIMIT))
        for place, pair in enumerate(behind)
    )
    return own, at_least
