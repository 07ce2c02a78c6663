"""How prompts, rule tests, differences and decisions made again look."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from worker.console.measured import percent
from worker.console.visible import visible
from worker.core.turns import Turns
from worker.offline.prompt_view import Part, PromptView
from worker.offline.rule_tests import RuleTestRun
from worker.offline.rules_diff import RulesDiff

if TYPE_CHECKING:  # these need numpy, which a worker does not
    from worker.offline.backtest import Backtest
    from worker.offline.counted import Counted
    from worker.offline.measures import Measured

PARTS: Mapping[Part, str] = {"prefix": "dim", "ticket": "bold cyan", "cue": "yellow"}
"""Parts of a prompt, and how they look."""


def print_prompt(out: Console, view: PromptView) -> None:
    """On a terminal tables, else a line for each token, label and fact, with tabs between columns."""
    facts = {
        "ticket": view.text,
        "engine": f"{view.identity.engine}, {view.identity.model}",
        "tokens": ", ".join(f"{part} {view.count(part)}" for part in PARTS) + "; the label is read behind the last one",
        "room": f"{view.room} of {view.room.context:,}; tickets of up to {view.room.longest_ticket:,} fit",
        "versions": ", ".join(view.versions),
        **view.fingerprints.model_dump(),
    }
    if view.joined:
        facts["seam"] = "a token reaches from the prefix into the ticket"
    if not out.is_terminal:
        rows: list[tuple[object, ...]] = [
            *(("token", n, t.id, t.part, _piece(t.piece)) for n, t in enumerate(view.tokens)),
            *(("label", label.category, label.id, label.word, _piece(label.piece)) for label in view.labels),
            *(("fact", name, value) for name, value in facts.items()),
        ]
        for row in rows:
            out.file.write(visible("\t".join(map(str, row))) + "\n")
        return
    tokens = Table("", "id", "piece", "", title="what is sent", title_justify="left", box=None)
    last = len(view.tokens) - 1
    for n, t in enumerate(view.tokens):
        begins = n == 0 or view.tokens[n - 1].part != t.part
        notes = [f"← {t.part}"] * begins + ["← behind it, the label is read"] * (n == last)
        tokens.add_row(str(n), str(t.id), escape(_piece(t.piece)), " ".join(notes), style=PARTS[t.part])
    labels = Table("category", "word", "id", "piece", title="labels", title_justify="left", box=None)
    for label in view.labels:
        labels.add_row(label.category, escape(label.word), str(label.id), escape(_piece(label.piece)))
    about = Table(box=None, show_header=False)
    for name, value in facts.items():
        about.add_row(name, escape(value))
    out.print(tokens, labels, about, sep="\n\n", highlight=False)


def turns_yaml(turns: Turns) -> str:
    """Lines for categories.yaml; JSON strings are YAML strings, with what a terminal would obey escaped too."""
    lines = [f"    {name}: {json.dumps(value, ensure_ascii=False)}\n" for name, value in turns.model_dump().items()]
    return "prompt:\n  style: chat\n  turns:\n" + visible("".join(lines))


def _piece(text: str | None) -> str:
    """Quoted, so that spaces and line breaks show."""
    return "?" if text is None else json.dumps(text, ensure_ascii=False)


def print_rule_tests(out: Console, run: RuleTestRun) -> None:
    """What failed, which rules have no test, and one line that says it all."""
    for result in run.failed:
        where = f"rule '{result.rule}': " if result.rule is not None else ""
        out.print(f"  {where}{result.failure}", style="red", markup=False, highlight=False, soft_wrap=True)
    for name in run.untested:
        out.print(f"  rule '{name}' has no test", style="yellow", markup=False, highlight=False, soft_wrap=True)
    held = len(run.results) - len(run.failed)
    said = f"{run.rule_set}: {held} of {len(run.results)} tests hold"
    out.print(said, style="red" if run.failed else "green", markup=False, highlight=False)


def print_rules_diff(out: Console, diff: RulesDiff) -> None:
    """A line for each difference, by area; then what expires."""
    out.print(f"{diff.old} → {diff.new}", markup=False, highlight=False, soft_wrap=True)
    if diff.two_sets is not None:
        out.print(f"  {diff.two_sets}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for change in diff.changes:
        detail = f": {change.detail}" if change.detail else ""
        said = f"  {change.area}: {change.kind} {change.what}{detail}"
        out.print(said, markup=False, highlight=False, soft_wrap=True)
    if not diff.changes:
        out.print("  nothing differs that decides", highlight=False)
    for line in diff.expires:
        out.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def print_backtest(out: Console, backtest: Backtest, limits: Sequence[str]) -> None:
    """Both sides, what moves where, and what a log cannot tell."""
    was, now = backtest.recorded, backtest.replayed
    table = Table("", "as recorded", "new rules", box=None, pad_edge=False)
    if_auto: tuple[tuple[str, Callable[[Counted], str]], ...] = (
        ("held back by the mode", lambda side: f"{sum(side.held.values())}"),
        ("routed, were all in auto", lambda side: percent(side.if_auto)),
        ("expected wrong, then", lambda side: _wrong_of(side.if_auto_wrong, side.if_auto_error)),
    )
    lines: tuple[tuple[str, Callable[[Counted], str]], ...] = (
        ("tickets", lambda side: f"{side.n}"),
        ("routed", lambda side: f"{side.routed}: {percent(side.automation)}"),
        ("to people", lambda side: f"{side.people}"),
        ("routed by score", lambda side: f"{side.judged}"),
        ("expected wrong", _expected_wrong),
        *(if_auto if was.held or now.held else ()),
        ("busiest hour for people", lambda side: f"{side.busiest[1]} ({side.busiest[0]}:00Z)" if side.busiest else "–"),
    )
    for name, cell in lines:
        table.add_row(name, cell(was), cell(now))
    out.print(table)
    if backtest.not_in_force:
        out.print(f"nothing would be routed by score: {backtest.not_in_force}", style="yellow", highlight=False)
    out.print(f"{backtest.moved} of {now.n} tickets go elsewhere", highlight=False)
    for (a, b), n in backtest.moves.items():
        if a != b:
            out.print(f"  {n} {a} → {b}", markup=False, highlight=False)
    for line in limits:
        out.print(f"  {line}", style="dim", markup=False, highlight=False, soft_wrap=True)
    said = "expected wrong: from the calibrated probabilities, if they are true; no label was looked at"
    if backtest.other_calibration:
        said += "; the two sides are judged by different calibrations"
    out.print(said, style="dim", highlight=False, soft_wrap=True)


def _expected_wrong(side: Counted) -> str:
    return _wrong_of(side.expected_wrong, side.expected_error)


def _wrong_of(wrong: Measured, error: Measured) -> str:
    if math.isnan(wrong.value):
        return "–"
    return f"{wrong.value:.1f} ({wrong.lower:.0f} to {wrong.upper:.0f}), {error.value:.2%}"
