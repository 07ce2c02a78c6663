"""How a local broker, checks, topics, audits, replays and the cache's holdings look."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from worker.adapters.embedded import RETAINED_BYTES_PER_PARTITION
from worker.adapters.files import SAMPLES_FILE
from worker.adapters.redis_upkeep import Survey
from worker.offline.audit import End, Ledger
from worker.offline.check import Finding
from worker.offline.replay import Replay

if TYPE_CHECKING:  # these need numpy, which a worker does not
    pass

MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "wrong": "[red]wrong[/]"}


def print_findings(out: Console, findings: Sequence[Finding]) -> None:
    """A line each: ok, or what is wrong and what to do."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        todo = f"\n[dim]→ {escape(finding.todo)}[/]" if finding.todo and finding.state != "ok" else ""
        table.add_row(MARKS[finding.state], finding.part, escape(finding.what) + todo)
    out.print(table)


def print_local(
    out: Console, err: Console, variables: Mapping[str, str], folders: Sequence[Path], program: str
) -> None:
    """The variables alone on `out`, as shell, so that they can be kept in a file; the rest on `err`."""

    def say(text: str) -> None:
        err.print(text, markup=False, highlight=False, soft_wrap=True)

    kept = RETAINED_BYTES_PER_PARTITION // 2**20
    say(
        "A broker and a cache run here until Ctrl-C, for trying things out, one worker a rule set. They are nothing for"
    )
    say(f"real tickets: they have no transactions, hold {kept} MiB a partition, and forget all when they end.")
    say("In another terminal, in this folder:\n")
    for name, value in variables.items():
        out.print(f"export {name}={shlex.quote(value)}", markup=False, highlight=False, soft_wrap=True)
    out.file.flush()
    folder = folders[0]
    rules = f"--rules {shlex.quote(str(folder))}"
    tickets = folder / SAMPLES_FILE
    sent = shlex.quote(str(tickets)) + " --limit 20" if tickets.exists() else "tickets.csv"
    say(f"\n{program} send {rules} --tickets {sent}")
    say(f"{program} run {rules}    # the worker: a line for each ticket; Ctrl-C ends it")
    say(f"{program} audit {rules}    # where they ended; `export` has every decision, with its reasons")


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
    if ledger.earlier:
        out.print(
            f"{ledger.earlier} outputs are of an earlier topic of this name, or of an end that it lost", highlight=False
        )
    wrong = (
        ("missing", ledger.missing),
        ("duplicates", ledger.duplicates),
        ("order violations", ledger.out_of_order),
    )
    for what, origins in wrong:
        for origin in origins[:5]:
            place = f"{origin.topic}/{origin.partition}/{origin.offset}"
            out.print(f"  {what}: {place}", style="red", markup=False, highlight=False)
    for partition, number in sorted(ledger.expired.items()):
        place = f"{partition.topic}/{partition.number}: {number} deleted by the brokers before they were decided"
        out.print(f"  expired: {place}", style="red", markup=False, highlight=False, soft_wrap=True)
    summary = ", ".join(f"{what} {len(origins)}" for what, origins in wrong)
    if ledger.expired:
        summary += f", expired {sum(ledger.expired.values())}"
    out.print(summary, style="green" if ledger.clean else "red", highlight=False)


def print_replay(out: Console, replay: Replay, dry_run: bool) -> None:
    """How many for which reason, and why others are left."""
    out.print(f"{'would send' if dry_run else 'sent'} {len(replay.resends)} tickets in again", highlight=False)
    for what, count in [*replay.reasons.items(), *((f"left: {why}", n) for why, n in replay.left.items())]:
        out.print(f"  {count} {what}", markup=False, highlight=False)
    if replay.unread:
        out.print(
            f"{replay.unread} of them could not be read, and nothing changed in their bytes: the same workers make "
            "dead letters of them again. What refused them must be mended first: mostly `intake` in rules.yaml",
            style="yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


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
