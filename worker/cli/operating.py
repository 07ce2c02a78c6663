"""Commands of who runs the worker: run, serve, local, check, watch, topics, audit, replay, cache."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Literal

import orjson
import typer

from worker import serving, top
from worker.cli.arguments import Moment, Rules
from worker.cli.terminal import err, out, program
from worker.console.operating import (
    print_findings,
    print_flush,
    print_holdings,
    print_ledger,
    print_local,
    print_replay,
    print_topics,
)
from worker.core.answer_events import answer_json_schema
from worker.core.schemas import SCHEMAS, SchemaName
from worker.errors import ConfigError
from worker.offline.replay import Selection
from worker.settings import load_settings

app = typer.Typer()
cache = typer.Typer(help="Look at what Redis remembers, or have it forget.", no_args_is_help=True)
app.add_typer(cache, name="cache")

OneRuleSet = Annotated[Path | None, typer.Option("--rules", help="Folder of a rule set: only its entries.")]
AtMost = Annotated[int, typer.Option(min=1_000, help="Keys of the server that are looked at.")]


@app.command()
def run(rules: Rules) -> None:
    """Run the worker until SIGTERM, against what ROUTER_* names."""
    settings = load_settings()
    serving.run(serving.serve(settings, rules, serving.set_up_telemetry(settings)))


@app.command()
def serve(rules: Rules) -> None:
    """Answer over HTTP until SIGTERM: tickets on POST /v1/decide, typed questions on POST /v1/systemone."""
    settings = load_settings()
    serving.run(serving.serve_http(settings, rules, serving.set_up_telemetry(settings)))


@app.command()
def local(
    rules: Annotated[
        list[Path], typer.Option("--rules", help="Folder of a rule set; repeat it for several.", show_default=False)
    ],
) -> None:
    """Run a broker and a cache for trying things out on this machine, until Ctrl-C; nothing stays behind."""
    asyncio.run(serving.local(rules, lambda variables: print_local(out, err, variables, rules, program())))


@app.command()
def check(rules: Rules) -> None:
    """Check rules, calibration, topics, engine, labels and cache; exit code 1 where something is wrong."""
    settings = load_settings()
    serving.set_up_telemetry(settings, quiet=True)
    findings = asyncio.run(serving.check(settings, rules))
    print_findings(out, findings)
    if any(finding.state == "wrong" for finding in findings):
        raise typer.Exit(1)


app.command("top")(top.command)


@app.command()
def topics(
    rules: Rules,
    create: Annotated[bool, typer.Option("--create", help="Create those that are missing.")] = False,
    partitions: Annotated[int, typer.Option(min=1, max=10_000, help="For topics that are created.")] = 6,
    replication: Annotated[
        int, typer.Option(min=-1, max=10, help="For topics that are created; -1: the broker's.")
    ] = -1,
) -> None:
    """List the topics of a rule set, or create them."""
    print_topics(out, serving.rule_set_topics(load_settings(), rules, create, partitions, replication))


@app.command()
def send(
    rules: Rules,
    tickets: Annotated[Path, typer.Option("--tickets", help="CSV or JSONL with text, and id where there is one.")],
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only so many.")] = None,
) -> None:
    """Put the tickets of a file on the input topic; their labels are left out."""
    topic, count = serving.send(load_settings(), rules, tickets, limit)
    out.print(f"{count} tickets sent to {topic}", markup=False, highlight=False)


@app.command()
def export(
    rules: Rules,
    to: Annotated[Path, typer.Option("--to", help="JSONL file; `-` for standard output.")] = Path("-"),
    what: Annotated[
        Literal["decisions", "tickets", "answers"],
        typer.Option(help="Decisions; tickets that went to people, as texts; or people's answers (topics.answers)."),
    ] = "decisions",
) -> None:
    """Write every decision on the decisions topic as JSONL, oldest first within a partition; or tickets, or answers."""
    err.print(f"{serving.export(load_settings(), rules, to, what)} {what}", highlight=False)


@app.command()
def audit(rules: Rules, since: Moment = None) -> None:
    """Compare input and output topics: every ticket in one place, once, in order? Exit code 1 where not."""
    ledger = serving.audit(load_settings(), rules, since)
    print_ledger(out, ledger)
    if not ledger.clean:
        raise typer.Exit(1)


@app.command()
def replay(
    rules: Rules,
    source: Annotated[
        Literal["dead-letter", "human"], typer.Option("--from", help="Which topic's tickets.", show_default=False)
    ],
    reason: Annotated[str | None, typer.Option(help="Only those with this reason code (docs/messages.md).")] = None,
    since: Moment = None,
    until: Moment = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, send nothing.")] = False,
    max_attempts: Annotated[int, typer.Option(min=1, max=1000, help="A ticket that was sent in so often is left.")] = 5,
) -> None:
    """Send dead letters or escalated tickets to the input topic again, each at most once for every time it came out."""
    selection = Selection(reason, until, max_attempts)
    found = serving.replay(load_settings(), rules, source, since, selection, dry_run=dry_run)
    print_replay(out, found, dry_run)


@app.command()
def schema(
    name: Annotated[SchemaName, typer.Argument(help="Which message.")] = "decision",
    rules: Annotated[
        Path | None,
        typer.Option("--rules", help="With `answer`: its categories are this rule set's.", show_default=False),
    ] = None,
) -> None:
    """Print the JSON Schema of a message: decision, card, answer, dead_letter."""
    if rules is not None and name != "answer":
        raise typer.BadParameter("--rules goes with answer")
    found = SCHEMAS[name]() if rules is None else answer_json_schema(serving.load_rules(rules))
    sys.stdout.write(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode() + "\n")


@cache.command("stats")
def cache_stats(rules: OneRuleSet = None, at_most: AtMost = 10_000_000) -> None:
    """Print how many scores Redis remembers of each rule set, their memory, and how long they will stay."""
    print_holdings(out, serving.cache_stats(load_settings(), rules, at_most))


@cache.command("flush")
def cache_flush(
    rules: OneRuleSet = None,
    everything: Annotated[bool, typer.Option("--all", help="Of every rule set.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how much there is, forget nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing.")] = False,
    at_most: AtMost = 10_000_000,
) -> None:
    """Have Redis forget the scores of a rule set, or all; they are made anew when tickets need them."""
    if (rules is None) != everything:
        raise typer.BadParameter("say --rules FOLDER, or --all")
    settings = load_settings()
    if dry_run or not yes:
        survey = serving.cache_stats(settings, rules, at_most)
        entries = sum(held.entries for held in survey.holdings.values())
        if dry_run:
            print_flush(out, entries, survey.complete, dry_run=True)
            return
        if not sys.stdin.isatty():
            raise ConfigError(f"{entries} entries would be forgotten: say --yes")
        typer.confirm(f"Forget {entries} entries?", abort=True)
    print_flush(out, *serving.cache_flush(settings, rules, at_most), dry_run=False)
