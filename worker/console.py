"""What results look like on a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from worker.adapters.redis_upkeep import Survey
from worker.core.turns import Turns
from worker.offline.audit import End, Ledger
from worker.offline.check import Finding
from worker.offline.demo import DeskResult, examples, percentile
from worker.offline.prompt_view import Part, PromptView
from worker.offline.replay import Replay
from worker.offline.rule_tests import RuleTestRun
from worker.offline.rules_diff import RulesDiff

if TYPE_CHECKING:  # these need numpy, which a worker does not
    from worker.core.artefact import Artefact
    from worker.offline.attack_trial import AttackTable
    from worker.offline.backtest import Backtest
    from worker.offline.benchmark import CertifyingTime, GuaranteesTable
    from worker.offline.calibrate import CalibrationResult
    from worker.offline.choices import ChoiceEvaluation
    from worker.offline.counted import Counted
    from worker.offline.evaluate import Evaluation
    from worker.offline.guarantee_simulation import Outcome
    from worker.offline.labelling import Labelling
    from worker.offline.measures import Measured
    from worker.offline.question_cost import QuestionCost
    from worker.offline.selftest import SelfTest
    from worker.offline.splits import SplitRow
    from worker.offline.writing import WrittenAnswers

MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "wrong": "[red]wrong[/]"}
EXAMPLES_PER_SET = 5
PARTS: Mapping[Part, str] = {"prefix": "dim", "ticket": "bold cyan", "cue": "yellow"}
"""Parts of a prompt, and how they look."""


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


def print_ledger(out: Console, ledger: Ledger) -> None:
    """Counts, some of what is wrong, and one line that says it all."""
    ends: tuple[End, ...] = ("routed", "escalated", "dead_lettered")
    counts = ", ".join(f"{ledger.ends.get(end, 0)} {end.replace('_', '-')}" for end in ends)
    out.print(f"{ledger.tickets} tickets: {counts}, {ledger.waiting} waiting", highlight=False)
    if ledger.foreign:
        out.print(f"{ledger.foreign} messages on the output topics are not this router's", highlight=False)
    wrong = (
        ("missing", ledger.missing),
        ("duplicates", ledger.duplicates),
        ("order violations", ledger.out_of_order),
    )
    for what, origins in wrong:
        for origin in origins[:5]:
            place = f"{origin.topic}/{origin.partition}/{origin.offset}"
            out.print(f"  {what}: {place}", style="red", markup=False, highlight=False)
    summary = ", ".join(f"{what} {len(origins)}" for what, origins in wrong)
    out.print(summary, style="green" if ledger.clean else "red", highlight=False)


def print_replay(out: Console, replay: Replay, dry_run: bool) -> None:
    """How many for which reason, and why others are left."""
    out.print(f"{'would send' if dry_run else 'sent'} {len(replay.resends)} tickets in again", highlight=False)
    for what, count in [*replay.reasons.items(), *((f"left: {why}", n) for why, n in replay.left.items())]:
        out.print(f"  {count} {what}", markup=False, highlight=False)


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
        ("routed, were all in auto", lambda side: _percent(side.if_auto)),
        ("expected wrong, then", lambda side: _wrong_of(side.if_auto_wrong, side.if_auto_error)),
    )
    lines: tuple[tuple[str, Callable[[Counted], str]], ...] = (
        ("tickets", lambda side: f"{side.n}"),
        ("routed", lambda side: f"{side.routed}: {_percent(side.automation)}"),
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


def _percent(measured: Measured) -> str:
    return f"{measured.value:.1%} ({100 * measured.lower:.1f} to {100 * measured.upper:.1f} %)"


def _expected_wrong(side: Counted) -> str:
    return _wrong_of(side.expected_wrong, side.expected_error)


def _wrong_of(wrong: Measured, error: Measured) -> str:
    if math.isnan(wrong.value):
        return "–"
    return f"{wrong.value:.1f} ({wrong.lower:.0f} to {wrong.upper:.0f}), {error.value:.2%}"


def print_labelling(out: Console, found: Labelling) -> None:
    """How many rows, what was left out and why, what auto would have got wrong, and what the file does not prove."""
    blind = sum(row.blind for row in found.rows)
    out.print(f"{len(found.rows)} labelled tickets, {blind} of them answered in shadow", highlight=False)
    for why, n in found.left.items():
        out.print(f"  left out: {n} answers that {why}", markup=False, highlight=False, soft_wrap=True)
    if found.wrong:
        table = Table("auto would have routed to", "answered", "people found another", box=None, pad_edge=False)
        for name, (n, wrong) in found.wrong.items():
            table.add_row(name or "all by score", f"{n}", _percent(wrong))
        out.print(table)
    for warning in found.warnings:
        out.print(f"  {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def print_holdings(out: Console, survey: Survey) -> None:
    """What Redis remembers, a line for each rule set."""
    for rule_set, held in sorted(survey.holdings.items()):
        times = f", {held.shortest_ttl_s} to {held.longest_ttl_s} s left" if held.longest_ttl_s is not None else ""
        about = "about " if held.sampled < held.entries else ""
        said = f"{rule_set}: {held.entries} entries, {about}{held.bytes} bytes{times}"
        out.print(said, markup=False, highlight=False, soft_wrap=True)
    if not survey.holdings:
        out.print("nothing is remembered", highlight=False)
    _print_incomplete(out, survey.complete)


def print_flush(out: Console, entries: int, complete: bool, *, dry_run: bool) -> None:
    """How much was, or would be, forgotten."""
    out.print(f"{'would forget' if dry_run else 'forgot'} {entries} entries", highlight=False)
    if not dry_run:
        out.print("workers that run remember for up to 5 minutes more; restart them where that is too long")
    _print_incomplete(out, complete)


def _print_incomplete(out: Console, complete: bool) -> None:
    if not complete:
        out.print("the server holds more keys than were looked at: raise --at-most", style="red")


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
            out.file.write("\t".join(map(str, row)) + "\n")
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
    """Lines for categories.yaml; JSON strings are YAML strings."""
    lines = [f"    {name}: {json.dumps(value, ensure_ascii=False)}\n" for name, value in turns.model_dump().items()]
    return "prompt:\n  style: chat\n  turns:\n" + "".join(lines)


def _piece(text: str | None) -> str:
    """Quoted, so that spaces and line breaks show."""
    return "?" if text is None else json.dumps(text, ensure_ascii=False)


def print_licence(out: Console, notice: str) -> None:
    out.print(Panel(notice, title="the embedded model's licence", border_style="dim"), highlight=False)


def print_calibration(out: Console, result: CalibrationResult) -> None:
    """How good the probabilities are, what would be routed, and the certificates, one line each."""
    artefact, before, after = result.artefact, result.before, result.after
    out.print(f"{artefact.rule_set}: calibrator {artefact.calibrator.kind}, score {artefact.form}", highlight=False)
    n, routed = len(result.certifying), len(result.routed)
    wrong = sum(row.wrong for row in result.routed)
    lines = (
        f"labelled {result.screened.labelled}, {n} of them certify: "
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
    table.add_row("routed", f"{overall.m} of {overall.n}: {_measured(overall.coverage)}")
    per_ticket = any(c.procedure == "misroutes_per_ticket" for c in result.artefact.certificates)
    wrong = f"{overall.k}: {_measured(overall.risk)}, promised at most {overall.alpha:.1%}"
    table.add_row("misroutes per ticket" if per_ticket else "wrong among them", wrong)
    for part in result.certificates:
        said = f"{part.k} wrong of {part.m} routed: {_measured(part.risk)}, promised at most {part.alpha:.1%}"
        beyond = ", [red]exceeded beyond chance[/]" if part.exceeded_beyond_chance else ""
        table.add_row(f"  certificate {escape(part.name)}", said + beyond)
    table.add_row("accuracy", f"{_measured(measures.accuracy)}, if everything were routed")
    table.add_row("calibration error", _measured(measures.ece))
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
    table.add_row("accuracy", f"{_measured(result.accuracy)}; guessing: {result.by_chance:.1%}")
    ece = _measured(result.ece)
    table.add_row("mean confidence", f"{result.mean_confidence:.1%}, expected calibration error {ece}")
    table.add_row("by confidence", result.monotonicity)
    table.add_row("label mass", f"{result.median_mass:.3g} (median)")
    for flips in result.flips:
        table.add_row(f"asked {flips.name}", f"{flips.flips} of {flips.n} flip: {_measured(flips.rate)}")
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


def _measured(measured: Measured) -> str:
    """A share with its 95 % interval; a dash where there was nothing to measure."""
    if not math.isfinite(measured.value):
        return "–"
    return f"{measured.value:.1%} ({100 * measured.lower:.1f} to {100 * measured.upper:.1f} %)"


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
        table.add_row(run.name, f"{run.flips} of {run.n} flip: {_measured(run.rate)}")
    table.add_row("predicted by place", " ".join(f"{share:.0%}" for share in result.by_position))
    if result.accuracy is not None:
        table.add_row("accuracy, raw", _measured(result.accuracy))
    table.add_row("labels", ", ".join(f"{label.word} ({label.token_id})" for label in result.labels))
    out.print(table, highlight=False, markup=False)


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
        table.add_row(row.way, _measured(row.right), *numbers)
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
            f"{row.succeeded} = {_measured(row.rate)}",
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
        ("certified error", lambda row: _rate(row.certified_error)),
        ("held-out error", lambda row: _rate(row.error)),
        ("splits over alpha", lambda row: f"{row.over}/{row.splits}"),
        ("... beyond chance", lambda row: f"{row.over_beyond_chance}/{row.splits}"),
        ("certificates over", lambda row: f"{row.certificates_over}/{row.certificates}"),
        ("nothing certified", lambda row: f"{row.nothing_certified}/{row.splits}"),
    )
    for title, cell in lines:
        table.add_row(title, *map(cell, rows))
    out.print(table)


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


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
