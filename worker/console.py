"""What results look like on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from worker.offline.check import Finding
from worker.offline.demo import DeskResult, examples, percentile

if TYPE_CHECKING:  # these need numpy, which a worker does not
    from worker.offline.calibrate import CalibrationResult
    from worker.offline.evaluate import Evaluation
    from worker.offline.selftest import SelfTest

MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "wrong": "[red]wrong[/]"}
EXAMPLES_PER_SET = 5


def print_findings(out: Console, findings: Sequence[Finding]) -> None:
    """A line each: ok, or what is wrong and what to do."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        todo = f"\n[dim]→ {escape(finding.todo)}[/]" if finding.todo and finding.state != "ok" else ""
        table.add_row(MARKS[finding.state], finding.part, escape(finding.what) + todo)
    out.print(table)


def print_topics(out: Console, found: Mapping[str, int | None]) -> None:
    """Topic and partitions; None is missing."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, partitions in found.items():
        table.add_row(name, "[red]missing[/]" if partitions is None else f"{partitions} partitions")
    out.print(table)


def print_licence(out: Console, notice: str) -> None:
    out.print(Panel(notice, title="the embedded model's licence", border_style="dim"), highlight=False)


def print_calibration(out: Console, result: CalibrationResult) -> None:
    """The certificates, one line each."""
    artefact = result.artefact
    out.print(f"{artefact.rule_set}: calibrator {artefact.calibrator.kind}, score {artefact.form}", highlight=False)
    for certificate in artefact.certificates:
        members = ", ".join(certificate.members)
        out.print(f"  {members}: {certificate.summary()}", markup=False, highlight=False)
    for note in artefact.notes:
        out.print(f"  note: {note}", markup=False, highlight=False)


def print_evaluation(out: Console, result: Evaluation) -> None:
    """Error among the routed against the promise, coverage, accuracy."""
    overall = result.overall
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("tickets", f"{result.tickets}, {result.seen} of them seen by the calibration and left out")
    table.add_row("routed", f"{overall.m} of {overall.n}")
    table.add_row("wrong among them", f"{overall.k}, promised at most {overall.alpha:.1%}")
    word = "exceeded beyond chance" if result.exceeded_beyond_chance else "not exceeded beyond chance"
    table.add_row("alpha", word)
    out.print(table)


def print_selftest(out: Console, result: SelfTest) -> None:
    """Usable or not, and why."""
    out.print("usable" if result.usable else "[red]not usable[/]")
    for line in (*result.problems, *result.cautions):
        out.print(f"  {line}", markup=False, highlight=False)


def print_demo(out: Console, results: Sequence[DeskResult]) -> None:
    """A table per rule set, then examples of both."""
    for result in results:
        out.print(_summary(result))
    out.print(_examples(results))


def _summary(result: DeskResult) -> Table:
    first = result.first
    table = Table(
        title=f"{result.rule_set.id}: {result.rule_set.categories.language}", title_justify="left", show_header=False
    )
    table.add_column(justify="left")
    table.add_column(justify="left")
    table.add_row("tickets in", f"{len(result.tickets)}, sent {len(result.passes)} times")
    table.add_row("routed", _counts(result.routed_per_category))
    table.add_row("escalated", _counts(result.escalated_per_reason))
    table.add_row("dead-lettered", str(first.dead_letters))
    table.add_row("automation rate", f"{result.automation_rate:.0%}")
    promise = (
        f"promised: at most {result.rule_set.rules.alpha:.0%}, with {1 - result.rule_set.rules.delta:.0%} confidence"
    )
    table.add_row("error among the routed", f"{_error(result)}  [dim]({promise})[/]")
    table.add_row("cache hits", ", ".join(f"{p.cached} of {len(p.envelopes)}" for p in result.passes))
    table.add_row("tickets per second", ", ".join(f"{len(p.envelopes) / p.seconds:.1f}" for p in result.passes))
    for percent in (50, 95):
        times = ", ".join(f"{percentile(p.latencies_ms, percent):.0f} ms" for p in result.passes)
        table.add_row(f"p{percent}", times)
    return table


def _error(result: DeskResult) -> str:
    total = len(result.scored_routes)
    return f"{result.wrong} of {total} ({result.wrong / total:.1%})" if total else "nothing was routed by score"


def _counts(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    parts = ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda pair: -pair[1]))
    return f"{total}  [dim]({parts})[/]" if total else "0"


def _examples(results: Sequence[DeskResult]) -> Table:
    table = Table(title="ten decisions", title_justify="left", show_lines=True)
    table.add_column("ticket", ratio=4)
    table.add_column("decision", ratio=2)
    table.add_column("p", justify="right")
    table.add_column("reason", ratio=4)
    for result in results:
        text = {ticket.id: ticket.text for ticket in result.tickets}
        for envelope in examples(result, EXAMPLES_PER_SET):
            done = (
                f"→ {envelope['category']}"
                if envelope["action"] == "route"
                else f"person (guess: {envelope['category']})"
            )
            p = envelope["probability"]
            table.add_row(
                escape(_short(text[envelope["ticket_id"]])),
                escape(done),
                "" if p is None else f"{p:.2f}",
                escape(envelope["reasons"][0]["sentence"]),
            )
    return table


def _short(text: str, length: int = 110) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
