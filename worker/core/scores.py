"""What is asked of an engine and what comes back: score requests and label scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

MASS_TOLERANCE = 1e-3
"""How far above 1 a label mass may lie from rounding (bf16 heads round to a 1/8-nat grid row by row)."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One question about one ticket: the labels' probabilities as the token after `prefix + item`.

    `prefix` is the same for every ticket of a rule set, so that engines reuse its state; `item` begins with a space and
    ends with the answer cue.
    """

    prefix: str
    item: str
    label_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LabelScores:
    """Natural log-probabilities of the labels over the full vocabulary, in the order of the label ids.

    `mass` is their total probability, the *label mass*. An engine that can only bound it from below states the bound.
    """

    logprobs: tuple[float, ...]
    mass: float

    @classmethod
    def from_logprobs(cls, logprobs: tuple[float, ...]) -> LabelScores:
        """Raises ValueError unless every value is finite, at most 0 (to rounding), and the mass is at most 1."""
        if not logprobs:
            raise ValueError("no label scores")
        if not all(math.isfinite(value) for value in logprobs):
            raise ValueError("a label score is not finite")
        mass = math.fsum(math.exp(value) for value in logprobs)
        return cls(logprobs, mass).checked()

    def checked(self) -> LabelScores:
        """Itself, with the mass capped at 1. Raises ValueError on values that no softmax can give."""
        if not all(math.isfinite(value) and value <= MASS_TOLERANCE for value in self.logprobs):
            raise ValueError("a label log-probability is not finite or above 0")
        if not (math.isfinite(self.mass) and 0.0 <= self.mass <= 1.0 + MASS_TOLERANCE):
            raise ValueError(f"label mass {self.mass} is outside [0, 1]")
        return self if self.mass <= 1.0 else LabelScores(self.logprobs, 1.0)
