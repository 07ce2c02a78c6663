"""How benchmarks and simulations look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from worker.console.measured import measured_between, rate

if TYPE_CHECKING:  # these need numpy, which a worker does not
    from worker.offline.attack_trial import AttackTable
    from worker.offline.benchmark import CertifyingTime, GuaranteesTable
    from worker.offline.guarantee_simulation import Outcome
    from worker.offline.question_cost import QuestionCost
    from worker.offline.splits import SplitRow
    from worker.offline.writing import WrittenAnswers

PROCEDURE_NAMES = {"geifman_el_yaniv": "Geifman\nEl-Yaniv", "uncorrected_scan": "unco.\nscan"}


def print_guarantees(out: Console, table: GuaranteesTable) -> None:
    """Violation | coverage of every procedure, population and size; red where ours breaks its promise."""
    names = tuple(dict.fromkeys(outcome.procedure for outcome in table.outcomes))
    drawn = Table(
        title=f"violation | coverage at alpha {table.alpha:.0%}, delta {table.delta:.0%}; {table.draws} draws",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    drawn.add_column("population")
    drawn.add_column("n", justify="right")
    for name in names:
        drawn.add_column(PROCEDURE_NAMES.get(name, name), justify="right")
    found = {(o.population, o.n, o.procedure): o for o in table.outcomes}
    for population, n in dict.fromkeys((o.population, o.n) for o in table.outcomes):
        cells = (found.get((population, n, name)) for name in names)
        drawn.add_row(population, str(n), *(_guarantee(o, o in table.violations) if o else "" for o in cells))
    out.print(drawn)
    out.print(
        "violation: share of draws of the labelled set whose threshold lets through more than alpha. rank, frozen and "
        "split are this software's; naive and the uncorrected scan are wrong on purpose.",
        highlight=False,
    )
    for outcome in table.violations:
        out.print(
            f"{outcome.procedure} on {outcome.population}, n={outcome.n}: {outcome.violation:.3f} violations, "
            f"{outcome.allowed:.3f} allowed",
            style="red",
            highlight=False,
        )
    if not table.violations:
        out.print("no violation beyond delta and three standard errors", style="green", highlight=False)


def _guarantee(outcome: Outcome, violated: bool) -> str:
    text = f"{outcome.violation:.3f}|{outcome.coverage:.2f}".replace("0.", ".")
    return f"[red]{text}[/]" if violated else text


def print_certifying_times(out: Console, rows: Sequence[CertifyingTime], machine: str, date: str) -> None:
    """Seconds and memory by number of tickets."""
    table = Table(title=f"{rows[0].categories} categories; {machine}; {date}", title_justify="left")
    for title in ("labelled tickets", "deciding", "certifying", "memory of both", "whole calibration"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            f"{row.n:,}",
            f"{row.deciding_s:.2f} s",
            f"{row.certifying_s:.2f} s",
            f"{row.peak_mib:.1f} MiB",
            f"{row.calibrating_s:.1f} s",
        )
    out.print(table)


def print_writing(
    out: Console, rows: Sequence[WrittenAnswers], machine: str, date: str, what: str = "labelled tickets"
) -> None:
    """A row for each way of answering; the first is the scores that the worker uses, uncalibrated."""
    table = Table(title=f"{rows[0].n} {what}; {machine}; {date}", title_justify="left", box=None)
    for title in ("answered by", "right", "wrong", "no label", "refused", "tokens written", "a ticket"):
        table.add_column(title, justify="left" if title == "answered by" else "right")
    for row in rows:
        numbers = (str(row.wrong), str(row.unparsable), str(row.refused), f"{row.tokens:.0f}", f"{row.seconds:.2f} s")
        table.add_row(row.way, measured_between(row.right), *numbers)
    out.print(table)
    out.print("A written answer has no probability: nothing is certified about it, and nothing routes by it.")


def print_attacks(out: Console, table: AttackTable, machine: str, date: str, shown: int) -> None:
    """A line for each kind of attack and language; then the attacks that succeeded, at most `shown` of them."""
    title = f"{table.rule_set}: attacked tickets; {machine}; {date}"
    printed = Table(title=title, title_justify="left")
    for name in (
        "attack",
        "n",
        "routed without it",
        "routed",
        "to the author's target",
        "without safeguards",
        "swayed",
        "found",
    ):
        printed.add_column(name, justify="left" if name == "attack" else "right")
    for row in (*table.rows, table.all):
        counts = (str(row.n), str(row.honest_routed), str(row.routed))
        name = f"{row.kind} {row.language}".replace("_", " ").strip()
        printed.add_row(
            name,
            *counts,
            f"{row.succeeded} = {measured_between(row.rate)}",
            str(row.unguarded),
            str(row.swayed),
            str(row.found),
        )
    out.print(printed)
    out.print(
        "swayed: the model names the author's target, routed or not; found: of those, asked about again", style="dim"
    )
    out.print(f"to people: {', '.join(f'{code} {count}' for code, count in table.reasons)}", highlight=False)
    for attacked in [one for one in table.attacked if one.succeeded][:shown]:
        template = attacked.attack.template
        line = f"{template.kind} {template.language} to {attacked.attack.target}: {template.how} {template.text}"
        out.print(line, markup=False, highlight=False)


def print_question_costs(out: Console, costs: Sequence[QuestionCost], what: str, machine: str, date: str) -> None:
    """A line for each question: what a ticket takes with it and those above it."""
    title = f"{what} per ticket, median of {len(costs[0].seconds)}; {machine}; {date}"
    table = Table(title=title, title_justify="left")
    for title in ("questions", "added", "tokens behind the ticket", "ms per ticket", "ratio", "it adds"):
        table.add_column(title, justify="left" if title == "added" else "right")
    before = 0.0
    for cost in costs:
        ratio, added = cost.median_s / costs[0].median_s, cost.median_s - before
        row = (str(cost.questions), escape(cost.added), str(cost.tokens), f"{1000 * cost.median_s:.0f}")
        table.add_row(*row, f"{ratio:.2f}", f"{1000 * added:+.0f} ms")
        before = cost.median_s
    out.print(table)
    if any(cost.unanswered for cost in costs):
        total = sum(cost.unanswered for cost in costs)
        out.print(f"{total} answers could not be scored: the times say little", style="yellow", highlight=False)


def print_splits(out: Console, name: str, rows: Sequence[SplitRow], machine: str, date: str) -> None:
    """A column for each number of labels and each alpha; means over the splits."""
    table = Table(
        title=f"{name}: {rows[0].splits} random splits; {machine}; {date}",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("labelled tickets, n")
    for row in rows:
        table.add_column(str(row.n), justify="right")
    lines: tuple[tuple[str, Callable[[SplitRow], str]], ...] = (
        ("alpha = delta", lambda row: f"{row.alpha:.0%}" if row.alpha == row.delta else f"{row.alpha}, {row.delta}"),
        ("held-out tickets", lambda row: str(row.held_out)),
        ("calibrator", lambda row: row.calibrator.replace("_", " ")),
        ("split form", lambda row: f"{row.split_form}/{row.splits}"),
        ("accuracy, raw", lambda row: f"{row.raw_accuracy:.1%}"),
        ("accuracy, calibrated", lambda row: f"{row.accuracy:.1%}"),
        ("ECE before", lambda row: f"{row.ece_before:.1%}"),
        ("ECE after", lambda row: f"{row.ece_after:.1%}"),
        ("coverage", lambda row: f"{row.coverage:.0%}"),
        ("certified error", lambda row: rate(row.certified_error)),
        ("held-out error", lambda row: rate(row.error)),
        ("splits over alpha", lambda row: f"{row.over}/{row.splits}"),
        ("... beyond chance", lambda row: f"{row.over_beyond_chance}/{row.splits}"),
        ("certificates over", lambda row: f"{row.certificates_over}/{row.certificates}"),
        ("nothing certified", lambda row: f"{row.nothing_certified}/{row.splits}"),
    )
    for title, cell in lines:
        table.add_row(title, *map(cell, rows))
    out.print(table)
