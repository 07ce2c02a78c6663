"""How the demo looks: what became of each rule set's tickets, and examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from worker.offline.demo import DeskResult, examples, percentile, sentence_of

EXAMPLES_PER_SET = 5


def print_licence(out: Console, notice: str) -> None:
    out.print(Panel(notice, title="the embedded model's licence", border_style="dim"), highlight=False)


def print_estimate(out: Console, seconds: float) -> None:
    """How long it takes, while it runs."""
    takes = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
    out.print(f'about {takes} on this machine; for a shorter look: make demo ARGS="--tickets 10"', highlight=False)


def print_demo(out: Console, results: Sequence[DeskResult]) -> None:
    """A table with a column for each rule set, then examples of all."""
    out.print(_summary(results))
    out.print(_examples(results))


def print_next(out: Console, program: str, folder: Path) -> None:
    """What to type next."""
    rules = f"--rules {folder}"
    for command, what in (
        (f'decide {rules} "I was charged twice"', "one ticket of yours, decided and explained"),
        (f"local {rules}", "a broker and a cache, to route files of tickets"),
    ):
        out.print(f"next: {program} {command}    # {what}", markup=False, highlight=False, soft_wrap=True)


def _summary(results: Sequence[DeskResult]) -> Table:
    table = Table()
    table.add_column()
    for result in results:
        table.add_column(f"{result.rule_set.id} ({result.rule_set.categories.language})", justify="left")
    for name, of in _ROWS.items():
        table.add_row(name, *(of(result) for result in results))
    return table


def _error(result: DeskResult) -> str:
    """Observed and promised; what is observed says something where chance alone would hardly bring it about."""
    from worker.core.binomial import clopper_pearson  # needs scipy, which a worker does not

    rules, total = result.rule_set.rules, len(result.scored_routes)
    promise = f"promised: at most {rules.alpha:.0%}, with {1 - rules.delta:.0%} confidence"
    if not total:
        return f"nothing was routed by score\n[dim]{promise}[/]"
    low, high = clopper_pearson(result.wrong, total)
    verdict = "within the promise" if high <= rules.alpha else "too few to judge"
    if low > rules.alpha:
        verdict = "[red]above what was promised, beyond chance[/]"
    seen = f"{result.wrong} of {total} ({result.wrong / total:.1%}): {verdict}"
    return f"{seen}\n[dim]95% interval: {low:.0%} to {high:.0%}\n{promise}[/]"


def _sent(result: DeskResult) -> str:
    times = {1: "once", 2: "twice"}.get(len(result.passes), f"{len(result.passes)} times")
    return f"{len(result.tickets)}, sent {times}"


def _cache_hits(result: DeskResult) -> str:
    hits = ", ".join(f"{p.cached} of {len(p.envelopes)}" for p in result.passes)
    never = result.never_cached
    if not never:
        return hits
    return f"{hits}\n[dim]{never} never kept: may address the router[/]"


def _times(percent: int) -> Callable[[DeskResult], str]:
    return lambda result: ", ".join(f"{percentile(p.latencies_ms, percent):.0f} ms" for p in result.passes)


_ROWS: Mapping[str, Callable[[DeskResult], str]] = {
    "tickets in": _sent,
    "routed": lambda result: _counts(result.routed_per_category),
    "escalated": lambda result: _counts(result.escalated_per_reason),
    "dead-lettered": lambda result: str(result.first.dead_letters),
    "automation rate": lambda result: f"{result.automation_rate:.0%}",
    "error among the routed": _error,
    "cache hits": _cache_hits,
    "tickets per second": lambda result: ", ".join(f"{len(p.envelopes) / p.seconds:.1f}" for p in result.passes),
    "p50": _times(50),
    "p95": _times(95),
}


def _counts(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    parts = ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda pair: -pair[1]))
    return f"{total}  [dim]({parts})[/]" if total else "0"


def _examples(results: Sequence[DeskResult]) -> Table:
    caption = "p: chance that the guess is right; the score in the reason is the largest calibrated label probability"
    shown = [(result, examples(result, EXAMPLES_PER_SET)) for result in results]
    number = sum(len(envelopes) for _, envelopes in shown)
    title = f"{'ten' if number == 10 else number} decisions"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", show_lines=True)
    table.add_column("ticket", ratio=4)
    table.add_column("decision", ratio=2)
    table.add_column("p", justify="right")
    table.add_column("reason", ratio=4)
    for result, envelopes in shown:
        text = {ticket.id: ticket.text for ticket in result.tickets}
        for envelope in envelopes:
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
                escape(sentence_of(envelope, result.rule_set)),
            )
    return table


def _short(text: str, length: int = 110) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
