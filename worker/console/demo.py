"""How the demo looks: a table for each rule set, and examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from worker.offline.demo import DeskResult, examples, percentile

if TYPE_CHECKING:  # these need numpy, which a worker does not
    pass

EXAMPLES_PER_SET = 5


def print_licence(out: Console, notice: str) -> None:
    out.print(Panel(notice, title="the embedded model's licence", border_style="dim"), highlight=False)


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
    from worker.core.binomial import clopper_pearson  # needs scipy, which a worker does not

    total = len(result.scored_routes)
    if not total:
        return "nothing was routed by score"
    low, high = clopper_pearson(result.wrong, total)
    return f"{result.wrong} of {total} ({result.wrong / total:.1%}; 95 % interval {low:.0%} to {high:.0%})"


def _counts(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    parts = ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda pair: -pair[1]))
    return f"{total}  [dim]({parts})[/]" if total else "0"


def _examples(results: Sequence[DeskResult]) -> Table:
    caption = "p: chance that the guess is right; the score in the reason is the largest calibrated label probability"
    table = Table(title="ten decisions", title_justify="left", caption=caption, caption_justify="left", show_lines=True)
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
