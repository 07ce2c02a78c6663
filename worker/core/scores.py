"""What is asked of an engine and what comes back: score requests and label scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field

from worker.core.per_ticket import per_ticket, slotted_per_ticket
from worker.errors import RequestRefused

MASS_TOLERANCE = 1e-3
"""How far above 1 a label mass may lie from rounding (bf16 heads round to a 1/8-nat grid row by row)."""

UNLIKE_PIECES = "prefix and item of a request must both be text, or both token ids"
NOT_IDS = "the token ids of a prompt must be non-negative integers"

Piece = str | tuple[int, ...]
"""A part of a prompt: text, which the engine tokenizes, or token ids, which it takes as they are."""


@per_ticket
class ScoreRequest:
    """One question about one ticket: the labels' probabilities as the token after `prefix + item`.

    `prefix` is the same for every ticket of a rule set, so that engines reuse its state; `item` begins with a space and
    ends with the answer cue. Both are text, joined before they are tokenized (with BOS where the model wants one), or
    both are token ids, joined as they are: BOS is then the prefix's own first id.
    """

    prefix: Piece = field(hash=False)
    """Not hashed, nor are the labels: they tell few requests apart, and each is hashed several times."""
    item: Piece
    label_token_ids: tuple[int, ...] = field(hash=False)

    @property
    def prompt(self) -> Piece:
        """The whole prompt. Raises RequestRefused where text and token ids would be joined."""
        if isinstance(self.prefix, str) and isinstance(self.item, str):
            return self.prefix + self.item
        if isinstance(self.prefix, tuple) and isinstance(self.item, tuple):
            return self.prefix + self.item
        raise RequestRefused(UNLIKE_PIECES)


def check_batch(requests: Sequence[ScoreRequest]) -> None:
    """What every engine demands of one call. Raises RequestRefused.

    One or more requests that share prefix and labels, all of text or all of token ids, none of them empty; labels
    distinct and not negative. (SGLang 0.5.23 ends at a prompt of no tokens, and answers text joined with ids by
    nonsense; servers before 0.5.21 score duplicate and negative labels without a word.)
    """
    prefix, labels = requests[0].prefix, requests[0].label_token_ids
    if not labels or len(set(labels)) != len(labels) or not are_token_ids(labels):
        raise RequestRefused("label token ids must be distinct non-negative integers, at least one")
    is_text = isinstance(prefix, str)
    if not is_text and not are_token_ids(prefix):
        raise RequestRefused(NOT_IDS)
    for request in requests:  # looks at the parts of each: joined, the prefix would be copied for every ticket
        item = request.item
        if request.prefix != prefix or request.label_token_ids != labels:
            raise RequestRefused("the requests of one call must share prefix and labels")
        if isinstance(item, str) is not is_text:
            raise RequestRefused(UNLIKE_PIECES)
        if not item and not prefix:
            raise RequestRefused("an empty prompt is never sent")
        if not is_text and not are_token_ids(item):
            raise RequestRefused(NOT_IDS)


def are_token_ids(values: Sequence[object]) -> bool:
    """Whether all are plain non-negative integers (`isinstance` would take True for one)."""
    return all(type(value) is int and value >= 0 for value in values)


@slotted_per_ticket
class LabelScores:
    """Natural log-probabilities of the labels over the full vocabulary, in the order of the label ids.

    `unknown` are the places, rising, of labels that the engine did not return: there `logprobs` holds an upper bound of
    the value, never the value, and anything below it is possible. `mass` is the labels' total probability, the *label
    mass*; where labels are unknown, or an engine can only bound it from below, it is that lower bound.
    """

    logprobs: tuple[float, ...]
    mass: float
    unknown: tuple[int, ...] = ()

    @classmethod
    def from_logprobs(cls, logprobs: tuple[float, ...], unknown: tuple[int, ...] = ()) -> LabelScores:
        """The mass is that of the known labels. Raises ValueError as `checked`, and on no labels at all."""
        if not logprobs:
            raise ValueError("no label scores")
        known: Sequence[float] = logprobs
        if unknown:
            hidden = frozenset(unknown)
            known = [value for place, value in enumerate(logprobs) if place not in hidden]
        try:
            mass = math.fsum(map(math.exp, known))
        except OverflowError:
            mass = math.inf
        # Nearly all that an engine sends. No value is above the tolerance where the mass is within it: log(1 + t) < t.
        if not unknown and mass <= 1.0 + MASS_TOLERANCE and math.isfinite(sum(logprobs)):
            return cls(logprobs, min(1.0, mass))
        if not all(map(math.isfinite, logprobs)):
            raise ValueError("a label score is not finite")
        return cls(logprobs, mass, unknown).checked()

    def checked(self) -> LabelScores:
        """Itself, with the mass capped at 1. Raises ValueError on values that no softmax can give."""
        if not all(map(math.isfinite, self.logprobs)) or max(self.logprobs, default=0.0) > MASS_TOLERANCE:
            raise ValueError("a label log-probability is not finite or above 0")
        if not (math.isfinite(self.mass) and 0.0 <= self.mass <= 1.0 + MASS_TOLERANCE):
            raise ValueError(f"label mass {self.mass} is outside [0, 1]")
        if self.unknown and list(self.unknown) != sorted({*self.unknown}.intersection(range(len(self.logprobs)))):
            raise ValueError("the places of unknown labels must rise and lie among the labels")
        return self if self.mass <= 1.0 else LabelScores(self.logprobs, 1.0, self.unknown)

    @property
    def returned(self) -> tuple[float | None, ...]:
        """The log-probabilities, None for each unknown label."""
        if not self.unknown:
            return self.logprobs
        hidden = frozenset(self.unknown)
        return tuple(None if place in hidden else value for place, value in enumerate(self.logprobs))

    @property
    def bound(self) -> float | None:
        """The largest log-probability that any unknown label may have; None where there is none."""
        return max((self.logprobs[place] for place in self.unknown), default=None) if self.unknown else None

    @property
    def mass_at_most(self) -> float:
        """The label mass if every unknown label had all that its bound allows; without unknown labels, `mass`."""
        if not self.unknown:
            return min(1.0, self.mass)
        return min(1.0, self.mass + math.fsum(math.exp(self.logprobs[place]) for place in self.unknown))

    @property
    def best_known(self) -> int:
        """Place of the largest known log-probability, the first of equals; of the largest bound where none is known."""
        hidden = frozenset(self.unknown)
        known = [place for place in range(len(self.logprobs)) if place not in hidden]
        return max(known or range(len(self.logprobs)), key=self.logprobs.__getitem__)
