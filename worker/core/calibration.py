"""Calibrators as frozen artefacts: how label log-probabilities become probabilities. Fitting is in core.fitting.

p = softmax(W z + b) over the K labels of one question, where z are label log-probabilities in nats. W is beta * I
(temperature, Guo et al. 2017), diag(scale) (vector scaling, ibid.) or a full matrix (Dirichlet, Kull et al. 2019). A
bias b absorbs what a fixed label order and the label tokens themselves add to every ticket (Zheng et al. 2024). The
worker applies one ticket at a time in plain Python; numpy is imported only where many rows are applied at once.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import add, mul
from typing import TYPE_CHECKING, Any, Literal, get_args

from worker.errors import ArtefactError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

Kind = Literal["identity", "temperature", "bias_temperature", "vector", "dirichlet", "prior_match"]

SCORE_FLOOR = -100.0
"""Nats below the top label at which a score stops counting: less than the smallest float32 softmax can return, and
finite where an engine reports -inf. Fit and apply use the same floor.
"""

NORMALISED: frozenset[Kind] = frozenset({"vector", "dirichlet"})
"""Kinds whose answer would change with a constant added to all scores of a ticket (its label mass): they are given
scores that are normalised over the labels first.
"""


@dataclass(frozen=True, slots=True)
class Calibrator:
    """Frozen parameters: `scale` (K,) and `bias` (K,) in nats, `matrix` (K, K) for dirichlet (then `scale` is unused).

    Row k of the matrix gives the score of label k. `ridge` is the penalty it was fitted with.
    """

    kind: Kind
    scale: tuple[float, ...]
    bias: tuple[float, ...]
    matrix: tuple[tuple[float, ...], ...] = ()
    ridge: float = 0.0

    def __post_init__(self) -> None:
        size = len(self.scale)
        if self.kind not in get_args(Kind):
            raise ArtefactError(f"calibrator kind {self.kind!r} is none of {', '.join(get_args(Kind))}")
        if size == 0 or len(self.bias) != size:
            raise ArtefactError(f"calibrator has {size} scales and {len(self.bias)} biases: one of each a category")
        wants_matrix = self.kind == "dirichlet"
        if wants_matrix != bool(self.matrix) or any(len(row) != size for row in self.matrix):
            raise ArtefactError(
                f"calibrator {self.kind}: a matrix of {size} x {size} belongs to dirichlet, and only to it"
            )
        if wants_matrix and len(self.matrix) != size:
            raise ArtefactError(f"calibrator dirichlet: {len(self.matrix)} matrix rows for {size} categories")
        if not all(map(math.isfinite, (*self.scale, *self.bias, *(w for row in self.matrix for w in row)))):
            raise ArtefactError(f"calibrator {self.kind}: a parameter is not finite")

    @classmethod
    def identity(cls, categories: int) -> Calibrator:
        """softmax of the scores as they are."""
        return cls("identity", (1.0,) * categories, (0.0,) * categories)

    @property
    def categories(self) -> int:
        """K."""
        return len(self.scale)

    def apply_one(self, logprobs: Sequence[float]) -> list[float]:
        """One ticket: K log-probabilities in label order -> K probabilities that sum to 1.

        Raises ValueError on a wrong number of scores, on NaN or +inf, and where every score is -inf.
        """
        if len(logprobs) != len(self.bias):
            raise ValueError(f"{len(logprobs)} scores for {len(self.bias)} categories")
        # Every scored ticket passes here: what `map` does costs half of what a comprehension does.
        top = max(logprobs)
        relative = [z - top for z in logprobs]
        if min(relative) < SCORE_FLOOR:
            relative = [SCORE_FLOOR if z < SCORE_FLOOR else z for z in relative]  # NaN passes, and is seen below
        if self.kind in NORMALISED:
            log_total = math.log(sum(map(math.exp, relative)))
            relative = [z - log_total for z in relative]
        if self.matrix:
            rows = [sum(map(mul, row, relative)) for row in self.matrix]
        else:
            rows = list(map(mul, self.scale, relative))
        scores = list(map(add, rows, self.bias))
        top = max(scores)
        weights = list(map(math.exp, [score - top for score in scores]))
        total = sum(weights)
        if not total >= 1.0:  # the top weighs 1, so anything else is NaN
            raise ValueError("a label score is not a number, or all are -inf: nothing can be said about this ticket")
        return [weight / total for weight in weights]

    def apply(self, logprobs: ArrayLike) -> NDArray[np.float64]:
        """Many tickets: (n, K) log-probabilities -> (n, K) probabilities. Agrees with `apply_one` to rounding.

        Certify on scores from `apply_one`: a threshold is one of the scores, and rounding must not split a tie block.
        """
        import numpy as np

        z = relative_scores(logprobs, self.categories, normalised=self.kind in NORMALISED)
        scores: NDArray[np.float64] = z @ np.asarray(self.matrix).T if self.matrix else z * np.asarray(self.scale)
        scores += np.asarray(self.bias)
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=1, keepdims=True)
        return scores

    def to_dict(self) -> dict[str, Any]:
        """JSON values; the round trip through JSON is exact."""
        record = asdict(self)
        record["scale"], record["bias"] = list(self.scale), list(self.bias)
        record["matrix"] = [list(row) for row in self.matrix]
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Calibrator:
        """Inverse of `to_dict`. Raises ArtefactError."""
        try:
            values = dict(record)
            values["scale"] = tuple(map(float, values["scale"]))
            values["bias"] = tuple(map(float, values["bias"]))
            values["matrix"] = tuple(tuple(map(float, row)) for row in values["matrix"])
            values["ridge"] = float(values["ridge"])
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise ArtefactError(f"not a calibrator ({error}): calibrate again") from error


@dataclass(frozen=True, slots=True)
class CorrectnessCalibrator:
    """P(the routed label is right) from its max p; never decreasing in max p, so it moves no threshold.

    platt: sigmoid(slope * logit(max p) + intercept). venn_abers: `values` at the 2u + 1 places below, at and between
    the u increasing `breaks` of max p.
    """

    kind: Literal["platt", "venn_abers"]
    slope: float = 1.0
    intercept: float = 0.0
    breaks: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("platt", "venn_abers"):
            raise ArtefactError(f"correctness calibrator kind {self.kind!r} is neither platt nor venn_abers")
        numbers = (self.slope, self.intercept, *self.breaks, *self.values)
        if not all(map(math.isfinite, numbers)):
            raise ArtefactError(f"correctness calibrator {self.kind}: a parameter is not finite")
        if self.kind == "platt" and self.slope < 0.0:
            raise ArtefactError("correctness calibrator platt: a negative slope would turn the order of tickets around")
        rising = list(self.breaks) == sorted(set(self.breaks)) and list(self.values) == sorted(self.values)
        if self.kind == "venn_abers" and not (rising and len(self.values) == 2 * len(self.breaks) + 1):
            raise ArtefactError(
                "correctness calibrator venn_abers: breaks and values must rise, 2u + 1 values to u breaks"
            )

    def apply_one(self, max_p: float) -> float:
        """max p in [0, 1] -> probability of being right."""
        if self.kind == "venn_abers":
            return self.values[bisect_left(self.breaks, max_p) + bisect_right(self.breaks, max_p)]
        x = self.slope * logit(max_p) + self.intercept
        return 1.0 / (1.0 + math.exp(-x)) if x >= 0.0 else math.exp(x) / (1.0 + math.exp(x))

    def to_dict(self) -> dict[str, Any]:
        """JSON values; the round trip through JSON is exact."""
        return {**asdict(self), "breaks": list(self.breaks), "values": list(self.values)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> CorrectnessCalibrator:
        """Inverse of `to_dict`. Raises ArtefactError."""
        try:
            values = dict(record)
            values["breaks"] = tuple(map(float, values["breaks"]))
            values["values"] = tuple(map(float, values["values"]))
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise ArtefactError(f"not a correctness calibrator ({error}): calibrate again") from error


def logit(p: float) -> float:
    """Log-odds in nats; 0 and 1 are read as 1e-12 away from themselves."""
    p = min(max(p, 1e-12), 1.0 - 1e-12)
    return math.log(p) - math.log1p(-p)


def relative_scores(logprobs: ArrayLike, categories: int, *, normalised: bool) -> NDArray[np.float64]:
    """(n, K) scores relative to each ticket's top score and floored, or normalised over the labels after that.

    Raises ValueError on another shape, on NaN or +inf, and on a row that is -inf throughout.
    """
    import numpy as np

    z = np.array(logprobs, dtype=np.float64)  # a copy, changed in place below
    if z.ndim != 2 or z.shape[1] != categories:
        raise ValueError(f"label scores have shape {z.shape}, expected (n, {categories})")
    top = z.max(axis=1, keepdims=True)
    if not np.all(np.isfinite(top)):
        row = int(np.flatnonzero(~np.isfinite(top[:, 0]))[0])
        raise ValueError(f"row {row}: a label score is NaN or +inf, or all are -inf")
    z -= top
    np.maximum(z, SCORE_FLOOR, out=z)
    if normalised:
        z -= np.log(np.exp(z).sum(axis=1, keepdims=True))
    return z
