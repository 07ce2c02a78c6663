"""How calibrations, checks on labelled tickets, self-tests and labels look."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from worker.console.benchmarks import print_writing
from worker.console.measured import measured_between, percent

if TYPE_CHECKING:  # these need numpy, which a worker does not
    from worker.core.artefact import Artefact
    from worker.offline.calibrate import CalibrationResult
    from worker.offline.choices import ChoiceEvaluation
    from worker.offline.evaluate import Evaluation
    from worker.offline.labelling import Labelling
    from worker.offline.selftest import SelfTest

FEW_LABELS, TO_BEGIN_WITH = 100, 240
"""Labelled tickets below which it is said first that they are few, and how many to begin with (docs/calibration.md)."""


def print_calibration(out: Console, result: CalibrationResult) -> None:
    """How good the probabilities are, what would be routed, and the certificates, one line each."""
    artefact, before, after = result.artefact, result.before, result.after
    out.print(f"{artefact.rule_set}: calibrator {artefact.calibrator.kind}, score {artefact.form}", highlight=False)
    labelled, n, routed = result.screened.labelled, len(result.certifying), len(result.routed)
    if labelled < FEW_LABELS:
        out.print(
            f"  {labelled} labelled {'tickets are' if labelled != 1 else 'ticket is'} few: begin with {TO_BEGIN_WITH}, "
            "taken as they come (docs/calibration.md). What follows may all change with them",
            style="yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    wrong = sum(row.wrong for row in result.routed)
    lines = (
        f"labelled {labelled}, {n} of them certify: "
        f"{routed} above their thresholds ({routed / n:.0%}), {wrong} of those wrong",
        f"accuracy {before.accuracy.value:.1%} raw, {after.accuracy.value:.1%} calibrated; "
        f"calibration error {before.ece.value:.1%} raw, {after.ece.value:.1%} calibrated",
    )
    for line in lines:
        out.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    for certificate in artefact.certificates:
        members = ", ".join(certificate.members)
        said = certificate.summary()
        if certificate.basis == "excluded":
            unseen = "predicted for no ticket that certifies" if certificate.n == 0 else "left out"
            said = f"never routed: {result.excluded.get(certificate.group, unseen)}"
        out.print(f"  {members}: {said}", markup=False, highlight=False, soft_wrap=True)
    for note in artefact.notes:
        out.print(f"  note: {note}", markup=False, highlight=False, soft_wrap=True)
    if not any(certificate.certified for certificate in artefact.certificates):
        out.print("nothing is certified: every ticket goes to people", style="yellow", highlight=False)


def print_history(out: Console, artefact: Artefact) -> None:
    """What was added to each label so that the predictions follow the desk's shares."""
    data = artefact.data
    total = sum(data["shares"].values())
    table = Table(box=None, pad_edge=False)
    for title in ("category", "historical share", "nats added"):
        table.add_column(title, justify="left" if title == "category" else "right")
    for category, bias in zip(artefact.labels, artefact.calibrator.bias, strict=True):
        table.add_row(category, f"{data['shares'][category] / total:.1%}", f"{bias:+.2f}")
    out.print(table)
    for note in (f"{data['unlabelled']} unlabelled tickets", *artefact.notes):
        out.print(f"  {note}", markup=False, highlight=False, soft_wrap=True)


def print_evaluation(out: Console, result: Evaluation) -> None:
    """Error among the routed against the promise, overall and by certificate; coverage, accuracy."""
    overall, measures = result.overall, result.measures
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("tickets", f"{result.tickets}, {result.seen} of them seen by the calibration and left out")
    table.add_row("routed", f"{overall.m} of {overall.n}: {measured_between(overall.coverage)}")
    per_ticket = any(c.procedure == "misroutes_per_ticket" for c in result.artefact.certificates)
    wrong = f"{overall.k}: {measured_between(overall.risk)}, promised at most {overall.alpha:.1%}"
    table.add_row("misroutes per ticket" if per_ticket else "wrong among them", wrong)
    for part in result.certificates:
        said = f"{part.k} wrong of {part.m} routed: {measured_between(part.risk)}, promised at most {part.alpha:.1%}"
        beyond = ", [red]exceeded beyond chance[/]" if part.exceeded_beyond_chance else ""
        table.add_row(f"  certificate {escape(part.name)}", said + beyond)
    table.add_row("accuracy", f"{measured_between(measures.accuracy)}, if everything were routed")
    table.add_row("calibration error", measured_between(measures.ece))
    table.add_row("escalated", ", ".join(f"{count} {code}" for code, count in result.escalated) or "none")
    if not overall.m:
        word = "nothing was routed, so nothing was tested"
    else:
        word = "exceeded beyond chance" if result.exceeded_beyond_chance else "not exceeded beyond chance"
    table.add_row("alpha", word)
    out.print(table, highlight=False)


def print_choices(out: Console, result: ChoiceEvaluation, machine: str, date: str) -> None:
    """How often it is right, by confidence and by place; flips, latencies, and the same questions in writing."""
    n = len(result.answered)
    table = Table(title=f"{result.questions} questions; {machine}; {date}", title_justify="left", box=None)
    table.show_header = False
    unscored = "".join(f", {count} {code}" for code, count in result.unscored)
    table.add_row("answered", f"{n}{unscored}" + (f", {result.partial} without all labels" if result.partial else ""))
    table.add_row("accuracy", f"{measured_between(result.accuracy)}; guessing: {result.by_chance:.1%}")
    ece = measured_between(result.ece)
    table.add_row("mean confidence", f"{result.mean_confidence:.1%}, expected calibration error {ece}")
    table.add_row("by confidence", result.monotonicity)
    table.add_row("label mass", f"{result.median_mass:.3g} (median)")
    for flips in result.flips:
        table.add_row(f"asked {flips.name}", f"{flips.flips} of {flips.n} flip: {measured_between(flips.rate)}")
    for one in result.passes:
        times = ", ".join(f"p{percent} {1000 * one.seconds_at(percent):.0f} ms" for percent in (50, 95))
        table.add_row(f"latency {one.name}", times)
    out.print(table, highlight=False)
    by_band = Table(box=None)
    for title in ("confidence", "n", "mean confidence", "accuracy"):
        by_band.add_column(title, justify="left" if title == "confidence" else "right")
    for band in (band for band in result.bands if band.n):
        right = f"{band.accuracy:.1%} ({100 * band.lower:.1f} to {100 * band.upper:.1f} %)"
        by_band.add_row(f"{band.lo:.2f} to {band.hi:.2f}", str(band.n), f"{band.mean_confidence:.1%}", right)
    out.print(by_band, highlight=False)
    places = Table(box=None)
    for title in ("place", "offered", "is the answer", "answered", "rightly"):
        places.add_column(title, justify="right")
    for place in result.places:
        counts = (place.offered, place.labelled, place.predicted, place.right)
        places.add_row(str(place.place + 1), *map(str, counts))
    out.print(places, highlight=False)
    out.print(
        "Confidence is the label's share among the options, not calibrated: the bands show how far it is from how "
        "often the answer is right. Nothing is certified by this.",
        highlight=False,
    )
    if result.written:
        print_writing(out, result.written, machine, date, "of these questions")
    for way, why in result.unwritten:
        out.print(f"not answered by {way}: {why}", style="yellow", markup=False, highlight=False)


def print_selftest(out: Console, result: SelfTest) -> None:
    """Usable or not, why, and the figures behind it."""
    out.print("[green]usable[/]" if result.usable else "[red]not usable[/]")
    for line in (*result.problems, *result.cautions):
        out.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    easy = result.easy
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("tickets", f"{result.n}, {result.unscored} more could not be scored")
    table.add_row(
        "easy tickets",
        f"{easy.right} of {len(easy.masses)} right, labels have probability {easy.median_mass:.2f} (median)",
    )
    for run in (*result.repeats, *result.orders):
        table.add_row(run.name, f"{run.flips} of {run.n} flip: {measured_between(run.rate)}")
    table.add_row("predicted by place", " ".join(f"{share:.0%}" for share in result.by_position))
    if result.accuracy is not None:
        table.add_row("accuracy, raw", measured_between(result.accuracy))
    table.add_row("labels", ", ".join(f"{label.word} ({label.token_id})" for label in result.labels))
    out.print(table, highlight=False, markup=False)


def print_labelling(out: Console, found: Labelling) -> None:
    """How many rows, what was left out and why, what auto would have got wrong, and what the file does not prove."""
    blind = sum(row.blind for row in found.rows)
    out.print(f"{len(found.rows)} labelled tickets, {blind} of them answered in shadow", highlight=False)
    for why, n in found.left.items():
        out.print(f"  left out: {n} answers that {why}", markup=False, highlight=False, soft_wrap=True)
    if found.wrong:
        table = Table("auto would have routed to", "answered", "people found another", box=None, pad_edge=False)
        for name, (n, wrong) in found.wrong.items():
            table.add_row(escape(name) or "all by score", f"{n}", percent(wrong))
        out.print(table)
    for warning in found.warnings:
        out.print(f"  {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
