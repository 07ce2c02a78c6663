"""Reports: one self-contained page each, in English and Korean, and its figures; nothing is fetched when it opens."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from worker.core.categories import NONE_ID
from worker.core.certificates import Certificate
from worker.core.redaction import redacted
from worker.core.reliability import risk_coverage
from worker.offline.calibrate import CalibrationResult
from worker.offline.certification import Candidate
from worker.offline.demo_summary import DemoSummary
from worker.offline.evaluate import Evaluation
from worker.offline.figures import (
    Drawn,
    certificates_figure,
    confidence_figure,
    confusion_figure,
    flips_figure,
    reliability_figure,
    risk_coverage_figure,
    shares_figure,
)
from worker.offline.measures import Measured, share
from worker.offline.selftest import SelfTest

BASES = ("all", "own", "taxonomy", "pool", "excluded")
"""The order in which certificates are listed."""
SUREST_MISTAKES = 8
NBSP = "\u00a0"
CLIPPED = 220
"""Characters of a ticket that a report shows."""


@dataclass(frozen=True, slots=True)
class Report:
    """A page (UTF-8) and the figures in it."""

    html: str
    figures: tuple[Drawn, ...]


def calibration_report(result: CalibrationResult, selftest: SelfTest | None = None) -> Report:
    """The page that explains an artefact. With `selftest` its panel on flips and positions is filled in."""
    routed = result.routed
    figures = [
        reliability_figure(result.before.diagram, result.after.diagram),
        confidence_figure(result.confidence, [not row.wrong for row in result.certifying]),
        *_risk_coverage(result, routed),
        confusion_figure(result.after.confusion, result.artefact.labels),
        _positions(result),
    ]
    if any(c.certified for c in result.certificates):
        figures.append(certificates_figure(result.certificates))
    if selftest is not None and _comparisons(selftest):
        figures.append(flips_figure(_comparisons(selftest)))
    return page(
        "calibration.html.j2",
        figures,
        result=result,
        artefact=result.artefact,
        routed=share(len(routed), len(result.certifying)),
        wrong=share(sum(row.wrong for row in routed), len(routed)),
        certificates=sorted(result.certificates, key=lambda c: BASES.index(c.basis)),
        standing={m: c for c in result.certificates for m in c.members},
        predicted=Counter(result.artefact.labels[row.predicted] for row in result.certifying),
        mistakes=_surest_mistakes(result),
        selftest=selftest,
    )


def evaluation_report(evaluation: Evaluation) -> Report:
    """The page of a held-out check."""
    answered = evaluation.answered
    figures = [
        reliability_figure((), evaluation.measures.diagram),
        confidence_figure([a.decision.probability or 0.0 for a in answered], [a.right for a in answered]),
        confusion_figure(evaluation.measures.confusion, evaluation.artefact.labels),
    ]
    return page("evaluation.html.j2", figures, evaluation=evaluation, artefact=evaluation.artefact)


def selftest_report(selftest: SelfTest) -> Report:
    """The page that says whether an engine is usable for a rule set."""
    orders = ["as configured", *(run.name for run in selftest.orders)]
    names = [category for category, _ in selftest.shares]
    series = [(name, [values[i] for _, values in selftest.shares]) for i, name in enumerate(orders)]
    figures = [shares_figure("shares", "Predicted share of each category under each order.", names, series[:5])]
    if _comparisons(selftest):
        figures.append(flips_figure(_comparisons(selftest)))
    return page("selftest.html.j2", figures, selftest=selftest)


def demo_report(summary: DemoSummary) -> Report:
    """The page of a demo run."""
    errors = [share(desk.wrong, desk.scored_routes) for desk in summary.desks]
    return page("demo.html.j2", [], summary=summary, desks=list(zip(summary.desks, errors, strict=True)))


def _risk_coverage(result: CalibrationResult, routed: Sequence[Candidate]) -> list[Drawn]:
    open_rows = [row for row in result.certifying if row.gate is None]
    if not open_rows:
        return []
    n, per_ticket = len(result.certifying), result.plan.target == "misroutes_per_ticket"
    curve = [
        (share_routed := found.coverage * len(open_rows) / n, found.risk * (share_routed if per_ticket else 1.0))
        for found in risk_coverage([row.score for row in open_rows], [int(row.wrong) for row in open_rows])
    ]
    wrong = sum(row.wrong for row in routed)
    point = (len(routed) / n, wrong / (n if per_ticket else len(routed))) if routed else None
    return [risk_coverage_figure(curve, result.plan.alpha, point, per_ticket=per_ticket)]


def _positions(result: CalibrationResult) -> Drawn:
    places, n = result.positions, max(1, len(result.certifying))
    series = [
        ("labelled", [place.labelled / n for place in places]),
        ("predicted, raw", [place.predicted_raw / n for place in places]),
        ("predicted, calibrated", [place.predicted_calibrated / n for place in places]),
    ]
    alt = "Share of each category among the labels and among the predictions, in label order."
    return shares_figure("positions", alt, [place.category for place in places], series)


def _comparisons(selftest: SelfTest) -> list[tuple[str, float, float, float, bool]]:
    runs = [*((run, True) for run in selftest.repeats), *((run, False) for run in selftest.orders)]
    return [(run.name, run.rate.value, run.rate.lower, run.rate.upper, control) for run, control in runs]


def _surest_mistakes(result: CalibrationResult) -> list[dict[str, Any]]:
    """Wrong answers from the surest down: a wrong label in the file looks just like this."""
    labels = result.artefact.labels
    rows = [(p, row) for p, row in zip(result.confidence, result.certifying, strict=True) if row.wrong]
    rows.sort(key=lambda pair: (-pair[0], pair[1].ticket.id))
    routed = set(map(id, result.routed))
    return [
        {
            "id": row.ticket.id,
            "text": redacted(row.ticket.text),  # a report is passed on, and its reader has the id
            "label": labels[row.ticket.label] if row.ticket.label >= 0 else NONE_ID,
            "predicted": labels[row.predicted],
            "probability": probability,
            "routed": id(row) in routed,
        }
        for probability, row in rows[:SUREST_MISTAKES]
    ]


def page(template: str, figures: Sequence[Drawn], **values: object) -> Report:
    """A template of this project with its figures inside."""
    sources = {f.name: "data:image/svg+xml;base64," + base64.b64encode(f.svg).decode() for f in figures}
    alts = {f.name: f.alt for f in figures}
    html = _environment().get_template(template).render(figures=sources, alts=alts, **values)
    return Report(html, tuple(figures))


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("worker.offline", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        percent=percent,
        interval=interval,
        spread=spread,
        number=number,
        threshold=threshold,
        clip=clip,
        standing=standing,
        outcome=outcome,
    )
    return environment


def percent(value: float | None, digits: int = 1) -> str:
    """A share as people read it; a dash where there is none.

    With two digits (for what somebody chose, such as alpha) needless zeros are left out.
    """
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{100 * value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits > 1 else text}{NBSP}%"


def interval(measured: Measured, digits: int = 1) -> str:
    """Its two ends."""
    if not math.isfinite(measured.value):
        return "–"
    return f"{100 * measured.lower:.{digits}f} to {100 * measured.upper:.{digits}f}{NBSP}%"


def spread(measured: Measured, digits: int = 1) -> str:
    """Its interval in brackets behind it; nothing where there is none."""
    return f" ({interval(measured, digits)})" if math.isfinite(measured.value) else ""


def number(value: float | None, digits: int = 3) -> str:
    """A plain number; a dash where there is none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def threshold(value: float) -> str:
    """A threshold in words where it is infinite."""
    if math.isinf(value):
        return "none" if value > 0 else "any"
    return f"> {value:.4g}"


def clip(text: str, limit: int = CLIPPED) -> str:
    """The beginning of a long text."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def outcome(certificate: Certificate, why_excluded: str | None = None) -> str:
    """Certified or not, in a few words; `why_excluded` where the category was left out beforehand."""
    if why_excluded:
        return f"suggest only: {why_excluded}"
    if certificate.basis == "excluded":
        return (
            "suggest only: predicted for no ticket that certifies" if certificate.n == 0 else "suggest only: left out"
        )
    if not certificate.certified:
        return certificate.summary()
    return {"pool": "certified as a pool", "taxonomy": "certified as a group"}.get(certificate.basis, "certified")


def standing(certificate: Certificate | None, why_excluded: str | None = None) -> str:
    """The outcome for a single category, with the numbers of the certificate it stands under."""
    if certificate is None:
        return "suggest only"
    words = outcome(certificate, why_excluded)
    if not certificate.certified:
        return words
    return f"{words}: n={certificate.n}, m={certificate.m}, k={certificate.k}, lambda {threshold(certificate.lambda_)}"
