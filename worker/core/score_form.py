"""Score forms: which label of a score vector is routed, and the number that is compared with the threshold.

What is certified must be what is routed: the label is the argmax of the same vector whose score is certified. Both
forms are computed by the same plain functions in the worker and in calibration, so equal tickets have equal scores to
the last bit and a tie block stays one block.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

from worker.core.calibration import Calibrator
from worker.core.certificates import ScoreForm
from worker.core.per_ticket import per_ticket

FIT_SHARE = 0.35
SPLIT_FROM = 400
"""Labelled tickets from which the split form is taken without asking whether the calibrator repairs accuracy."""


@per_ticket
class RoutedLabel:
    """Index of the label that would be routed, and its score."""

    index: int
    score: float


def raw_margin(logprobs: Sequence[float]) -> RoutedLabel:
    """Argmax (the first of equals) and top1 - top2 in nats, +inf where there is one label only. Raises ValueError on
    NaN.
    """
    index = _argmax(logprobs)
    margin = logprobs[index] - max([*logprobs[:index], *logprobs[index + 1 :]], default=-math.inf)
    if math.isnan(margin):
        raise ValueError("a label score is not a number")
    return RoutedLabel(index, margin)


def max_probability(probabilities: Sequence[float]) -> RoutedLabel:
    """Argmax (the first of equals) and its probability."""
    index = _argmax(probabilities)
    return RoutedLabel(index, probabilities[index])


def routed_label(form: ScoreForm, calibrator: Calibrator, logprobs: Sequence[float]) -> RoutedLabel:
    """The label and score under `form`; the raw margin does not look at the calibrator."""
    if form == "raw_margin":
        return raw_margin(logprobs)
    return max_probability(calibrator.apply_one(logprobs))


def choose_form(n: int, n_min: int, gain: float, gain_se: float) -> ScoreForm:
    """Raw margin certified on all `n` labels, or max p of a calibrator fitted on 35 % and certified on 65 %.

    `gain` is by how much bias_temperature's cross-validated accuracy exceeds the raw argmax's, `gain_se` its standard
    error, both measured on the fit part alone: the choice must not look at an error that certifies.
    """
    if (1.0 - FIT_SHARE) * n < 2 * n_min:
        return "raw_margin"
    return "max_probability" if n >= SPLIT_FROM or gain > gain_se else "raw_margin"


def in_fit_part(ticket_id: str, fit_share: float = FIT_SHARE) -> bool:
    """Whether this ticket's label fits the calibrator (else it certifies): by hash of its id, in any order."""
    digest = hashlib.sha256(b"ticket-router/fit-part\x00" + ticket_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fit_share * 2.0**64


def fit_part(ticket_ids: Iterable[str], fit_share: float = FIT_SHARE) -> list[bool]:
    """`in_fit_part` for each ticket, in order."""
    return [in_fit_part(ticket_id, fit_share) for ticket_id in ticket_ids]


def _argmax(values: Sequence[float]) -> int:
    return values.index(max(values))
