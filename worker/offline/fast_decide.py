"""The evaluator for many tickets at once: what `core.policy.decide` says, in numpy, and `decide` itself where rounding
could tell the two apart.

A threshold is one of the scores that certified it, to the last bit, and numpy rounds otherwise than one ticket at a
time does. So every ticket within GUARD of a threshold, of a gate, or of a tie is decided by `decide`, and so is every
one with labels that were not returned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker.core.artefact import Artefact
from worker.core.calibration import CorrectnessCalibrator
from worker.core.categories import NONE_ID
from worker.core.policy import Calibration, Decision, NoCalibration, can_route, decide
from worker.core.rules import RuleSet
from worker.core.scores import LabelScores

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

GUARD = 1e-7
"""Far above what summing in another order can move a probability by (below 1e-10 for a thousand labels)."""
CODES = (
    "certified",
    "below_threshold",
    "uncertified_category",
    "certificate_too_weak",
    "inside_flip_band",
    "none_of_the_above",
    "low_label_mass",
    "label_not_returned",
)
"""What `decide` may say of a ticket under a calibration in force."""
_CODE = {code: number for number, code in enumerate(CODES)}


class Verdict(NamedTuple):
    """A decision without its sentence. NaN where `decide` states None."""

    code: str
    category: str
    probability: float
    margin: float

    @property
    def routes(self) -> bool:
        return self.code == "certified"

    @classmethod
    def of(cls, decision: Decision) -> Verdict:
        """Of a decision that `decide` made."""
        probability, margin = (
            math.nan if value is None else value for value in (decision.probability, decision.margin)
        )
        return cls(decision.reasons[0].code, decision.category or "", probability, margin)


class FastEvaluator:
    """One rule set and its calibration, for any number of tickets."""

    def __init__(self, rule_set: RuleSet, calibration: Calibration | NoCalibration) -> None:
        self._rule_set = rule_set
        self._calibration = calibration
        self._ids = rule_set.categories.ids
        self._none = self._ids.index(NONE_ID) if NONE_ID in self._ids else -1
        if isinstance(calibration, Calibration):
            found = [self._standing(category, calibration) for category in self._ids]
            self._standings = np.array([_CODE[code] for code, _ in found])
            self._thresholds = np.array([threshold for _, threshold in found])
            self._floor = max(rule_set.rules.gates.min_label_mass, calibration.artefact.min_label_mass)

    def decide(self, rows: Sequence[Sequence[float | None]], masses: Sequence[float]) -> tuple[list[Verdict], set[int]]:
        """A verdict for each row of log-probabilities in label order, and the places of rows that it left to `decide`:
        their verdicts are to be had from `decide`, here they are only guesses.

        Rows must be as long as there are categories; None stands for a label that was not returned.
        """
        z = np.array(rows, dtype=np.float64).reshape(len(rows), len(self._ids))
        mass = np.asarray(masses, dtype=np.float64)
        # What breaks the demands on scores that an engine sends goes to `decide` with the rest, where it is refused.
        sound: Booleans = np.logical_and.reduce(np.isfinite(z) & (z <= 0.0), axis=1) & (mass >= 0.0) & (mass <= 1.0)
        z[~sound] = 0.0
        if isinstance(self._calibration, NoCalibration):
            code, index = self._calibration.reason.code, z.argmax(axis=1).tolist()
            return [Verdict(code, self._ids[i], math.nan, math.nan) for i in index], _places(np.logical_not(sound))
        codes, index, probability, margin, unsure = self._vectors(self._calibration.artefact, z, mass)
        verdicts = [
            Verdict(CODES[code], self._ids[i], p, m)
            for code, i, p, m in zip(codes.tolist(), index.tolist(), probability.tolist(), margin.tolist(), strict=True)
        ]
        return verdicts, _places(unsure | np.logical_not(sound))

    def exactly(self, scores: LabelScores) -> Verdict:
        """What `decide` says. Raises ValueError as it does."""
        return Verdict.of(decide(scores, self._rule_set, self._calibration))

    def _vectors(
        self, artefact: Artefact, z: Floats, mass: Floats
    ) -> tuple[Integers, Integers, Floats, Floats, Booleans]:
        every = np.arange(len(z))
        p = artefact.calibrator.apply(z)
        two = np.partition(p, -2, axis=1)[:, -2:]
        lead = two[:, 1] - two[:, 0]
        if artefact.form == "max_probability":
            index = p.argmax(axis=1)
            score, margin = p[every, index], lead
            unsure = lead < GUARD
        else:  # computed by the same two roundings as one ticket at a time, so that ties are the same
            index = z.argmax(axis=1)
            others = z.copy()
            others[every, index] = -np.inf
            score = z[every, index] - others.max(axis=1)
            margin = score
            unsure = np.zeros(len(z), dtype=np.bool_)
        threshold, standing = self._thresholds[index], self._standings[index]
        unsure |= np.abs(score - threshold) < GUARD
        codes = np.where(score > threshold, _CODE["certified"], _CODE["below_threshold"])
        codes = np.where(standing != _CODE["certified"], standing, codes)
        gate = artefact.margin_gate
        if gate is not None and gate.measured:
            unsure |= np.abs(margin - gate.m_star) < GUARD
            codes = np.where(margin > gate.m_star, codes, _CODE["inside_flip_band"])
        codes = np.where(index == self._none, _CODE["none_of_the_above"], codes)
        codes = np.where(mass < self._floor, _CODE["low_label_mass"], codes)
        probability = p[every, index]
        if artefact.correctness is not None and artefact.form == "max_probability":
            probability, at_break = _correctness(artefact.correctness, probability)
            unsure |= at_break
        return codes, index, probability, lead, unsure

    def _standing(self, category: str, calibration: Calibration) -> tuple[str, float]:
        """What keeps the category from being routed, or `certified`; and the threshold."""
        if can_route(category, self._rule_set, calibration):
            return "certified", calibration.artefact.by_category[category].lambda_
        certificate = calibration.artefact.by_category.get(category)
        if certificate is None or not certificate.certified:
            return "uncertified_category", math.inf
        return "certificate_too_weak", math.inf


def _correctness(correctness: CorrectnessCalibrator, p: Floats) -> tuple[Floats, Booleans]:
    """P(right) of each max p, and where rounding could have moved it over a step."""
    if correctness.kind == "venn_abers":
        breaks, values = np.asarray(correctness.breaks), np.asarray(correctness.values)
        left, right = np.searchsorted(breaks, p, "left"), np.searchsorted(breaks, p, "right")
        near = np.searchsorted(breaks, p - GUARD, "left") != np.searchsorted(breaks, p + GUARD, "right")
        return values[left + right], near
    inside = np.clip(p, 1e-12, 1.0 - 1e-12)
    x = correctness.slope * (np.log(inside) - np.log1p(-inside)) + correctness.intercept
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x)), np.zeros(len(p), dtype=np.bool_)


def _places(mask: Booleans) -> set[int]:
    return set(np.flatnonzero(mask).tolist())
