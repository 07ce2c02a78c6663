"""Certificates: what has been shown about a threshold, and the one comparison that obeys it. Needs no numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from worker.errors import ArtefactError

Basis = Literal["all", "own", "taxonomy", "pool", "excluded"]
"""What a certificate covers: all tickets; one category; categories merged under a node of the taxonomy; the categories
that were left over; or a category that was never a candidate for routing.
"""

Procedure = Literal["rank", "frozen", "misroutes_per_ticket"]
"""Fixed-sequence testing with thresholds from the labelled scores, with thresholds fixed beforehand; or the looser
target, misroutes as a share of all traffic.
"""

ScoreForm = Literal["raw_margin", "max_probability"]
"""Which label is routed and what is compared with the threshold; see core.score_form."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """One threshold: of `n` labelled tickets the `m` above `lambda_` had `k` errors, tested at `level` of `delta`.

    Statement: over draws of the labelled set, P(error rate among the routed > alpha) <= delta; with the procedure
    `misroutes_per_ticket` the error rate is counted per ticket of all traffic. `lambda_` is +inf where nothing
    certified and -inf where every ticket routes.

    `n` counts the tickets that certify, not those of the file: predicted as a member, past the gates, and not among
    those that fit a calibrator. `need` estimates how many such tickets would do, None where more are not known to help;
    `too_few` says that so few cannot show that either. `to_label` is how many more tickets to label, as they come,
    until about `need` of them count. It, fingerprints and date are put in by whoever knows them
    (`dataclasses.replace`).
    """

    group: str
    members: tuple[str, ...]
    basis: Basis
    procedure: Procedure
    score: ScoreForm
    n: int
    m: int
    k: int
    alpha: float
    delta: float
    level: float
    lambda_: float
    need: int | None
    fingerprints: tuple[tuple[str, str], ...] = ()
    certified_on: str = ""
    to_label: int | None = None
    too_few: bool = False

    @property
    def certified(self) -> bool:
        """Whether any ticket routes under it."""
        return self.lambda_ < math.inf

    @property
    def missing(self) -> int | None:
        """Labelled tickets still to be collected, 0 once certified; None where more are not known to help."""
        if self.certified:
            return 0
        return None if self.need is None else max(self.need - self.n, 0)

    def routes(self, score: float) -> bool:
        """The strict comparison: a score equal to the threshold escalates, and so does NaN."""
        return score > self.lambda_

    def summary(self) -> str:
        """One line for reports."""
        if self.basis == "excluded":
            return "never routed: excluded before certification"
        if not self.certified:
            return f"suggest only: {self._lacks_in_words()}"
        how = {"pool": "certified as a pool", "taxonomy": "certified as a group"}.get(self.basis, "certified")
        return (
            f"{how}: {self.k} errors in {self.m} routed of n={self.n}, "
            f"alpha {self.alpha:.2%}, delta {self.delta:.2%}, {self.passes_in_words()}"
        )

    def _lacks_in_words(self) -> str:
        if self.need is None:
            return f"n={self.n}, " + (
                "too few to tell what it needs" if self.too_few else "need other scores than these"
            )
        counted = f"n={self.n}, need {self.need}"
        return (
            counted if self.to_label is None else f"{counted}: label about {self.to_label} more tickets, as they come"
        )

    def passes_in_words(self) -> str:
        """What routes under it: the comparison with the threshold, or everything that is predicted as a member."""
        if self.lambda_ == -math.inf:
            return f"whatever the score: every ticket predicted as {'it' if len(self.members) == 1 else 'one of them'}"
        return f"score > {self.lambda_:.6g}"

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON values; an infinite threshold is the string "inf" or "-inf". What only some certificates state is
        left out of the others, as older files do, whose digests hold.
        """
        record = asdict(self)
        for name, stated in (("to_label", self.to_label is not None), ("too_few", self.too_few)):
            if not stated:
                del record[name]
        record["lambda"] = _number_out(record.pop("lambda_"))
        record["members"] = list(self.members)
        record["fingerprints"] = dict(self.fingerprints)
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Certificate:
        """Inverse of `to_dict`, exactly. Raises ArtefactError."""
        values = dict(record)
        try:
            values["lambda_"] = float(values.pop("lambda"))
            values["members"] = tuple(values["members"])
            values["fingerprints"] = tuple(values["fingerprints"].items())
            certificate = cls(**values)
            possible = 0 <= certificate.k <= certificate.m <= certificate.n and 0 < certificate.alpha < 1
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            expected = ", ".join(field.name.rstrip("_") for field in fields(cls))
            raise ArtefactError(f"not a certificate ({error}); its fields are {expected}: calibrate again") from error
        for name, value, known in (
            ("basis", certificate.basis, get_args(Basis)),
            ("procedure", certificate.procedure, get_args(Procedure)),
            ("score", certificate.score, get_args(ScoreForm)),
        ):
            if value not in known:
                raise ArtefactError(
                    f"certificate {certificate.group!r}: {name} {value!r} is none of {', '.join(known)}"
                )
        if math.isnan(certificate.lambda_) or not possible:
            raise ArtefactError(f"certificate {certificate.group!r}: impossible numbers; calibrate again")
        return certificate


@dataclass(frozen=True, slots=True)
class MarginGate:
    """Stability: above `m_star`, at most `phi` of the tickets change their top label when scored again (level `delta`).

    `measured` is False below the number of repeated tickets that could show it; the gate is then off (m_star = -inf)
    and reported as `stability unmeasured`. A measured gate of +inf routes nothing: the engine flips even at large
    margins.
    """

    measured: bool
    m_star: float
    n: int
    m: int
    k: int
    phi: float
    delta: float

    def passes(self, margin: float) -> bool:
        """Strict, as every threshold."""
        return margin > self.m_star or not self.measured

    def summary(self) -> str:
        """One line for reports."""
        if not self.measured:
            return f"stability unmeasured: {self.n} tickets scored twice"
        if self.m_star == math.inf:
            return (
                f"no margin is safe, so nothing routes: the engine changes its mind at any distance, by {self.n} "
                f"tickets scored twice, phi {self.phi:.2%}, delta {self.delta:.2%}"
            )
        passes = f"margin > {self.m_star:.6g}" if self.m_star > -math.inf else "whatever the margin"
        return (
            f"{passes}: {self.k} flips in {self.m} of n={self.n} tickets scored twice, "
            f"phi {self.phi:.2%}, delta {self.delta:.2%}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON values; an infinite gate is the string "inf" or "-inf"."""
        return {**asdict(self), "m_star": _number_out(self.m_star)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> MarginGate:
        """Inverse of `to_dict`, exactly. Raises ArtefactError."""
        try:
            gate = cls(**{**record, "m_star": float(record["m_star"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ArtefactError(f"not a margin gate ({error}): calibrate again") from error
        if math.isnan(gate.m_star):
            raise ArtefactError("margin gate: m_star is not a number")
        return gate


def _number_out(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
